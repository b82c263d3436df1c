"""Continuous batching over one llama.cpp context: a finished answer frees its place at once."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeline.errors import PipelineError
from pipeline.models.base import FinishReason, Generation, Int32Array, Prompt, Sampling
from pipeline.models.llamacpp_native import Context
from pipeline.models.sampling import RowSampler


def answer_limits(prompts: Sequence[Prompt], sampling: Sampling, *, room: int) -> list[int]:
    """The most tokens that each prompt's answer may have, prompt and answer within `room` tokens.

    Raises PipelineError for a prompt that leaves no room for a single token.
    """
    limits = []
    for index, prompt in enumerate(prompts):
        left = room - len(prompt.ids)
        if left < 1:
            raise PipelineError(
                f"prompt {index} has {len(prompt.ids)} tokens, which leaves no room for an answer "
                f"in the context of {room}: raise the context length or drop the prompt"
            )
        limits.append(min(sampling.max_new_tokens, left))
    return limits


@dataclass(kw_only=True)
class _Slot:
    """One sequence of the context while it answers a prompt.

    pending: tokens not decoded yet, the rest of the prompt or the token just chosen.
    reserved: KV cells that prompt and answer may come to need.
    """

    prompt_index: int
    sequence_id: int
    limit: int
    reserved: int
    pending: Int32Array
    sampling: Sampling
    sampler: RowSampler
    position: int = 0
    answer: list[int] = field(default_factory=list)


class ContinuousBatch:
    """Answers prompts with up to `sequences` of them in one context.

    A prompt is admitted in order, once a sequence and enough cells for its longest answer are
    free, so a decode call never meets a full context.
    """

    def __init__(
        self, context: Context, *, sequences: int, cells: int, eos_ids: frozenset[int]
    ) -> None:
        """context: empty, with at least `sequences` outputs per decode call."""
        self._context, self._free_cells, self._eos_ids = context, cells, eos_ids
        self._free_sequences = list(range(sequences))
        self._slots: list[_Slot] = []

    def run(
        self, prompts: Sequence[Prompt], limits: Sequence[int], sampling: Sampling
    ) -> list[Generation]:
        """One answer per prompt, in order; limits: the most tokens of each, at least 1."""
        answers: list[Generation | None] = [None] * len(prompts)
        waiting = deque(enumerate(zip(prompts, limits, strict=True)))
        while waiting or self._slots:
            while waiting and self._admit(*waiting[0], sampling):
                waiting.popleft()
            for slot, reason in self._step():
                answers[slot.prompt_index] = Generation(
                    np.array(slot.answer, dtype=np.int32), reason
                )
        return [answer for answer in answers if answer is not None]

    def _admit(self, index: int, work: tuple[Prompt, int], sampling: Sampling) -> bool:
        prompt, limit = work
        reserved = len(prompt.ids) + limit
        if not self._free_sequences or reserved > self._free_cells:
            return False
        self._free_cells -= reserved
        self._slots.append(
            _Slot(
                prompt_index=index,
                sequence_id=self._free_sequences.pop(0),
                limit=limit,
                reserved=reserved,
                pending=prompt.ids,
                sampling=sampling,
                sampler=RowSampler(prompt.seed, sampling),
            )
        )
        return True

    def _step(self) -> list[tuple[_Slot, FinishReason]]:
        """One decode call and, for every slot without pending tokens, its next token.

        Returns the slots that finished. Answering slots come first in the call, with one token
        each; prompts share what is left of it.
        """
        self._slots.sort(key=lambda slot: not slot.answer)  # stable
        room = self._context.batch_tokens
        parts: list[tuple[_Slot, int]] = []
        for slot in self._slots:
            count = min(room, len(slot.pending))
            if count:
                parts.append((slot, count))
                room -= count
        ready = self._decode(parts)
        logits = self._context.logits(len(ready)) if ready else ()
        finished: list[tuple[_Slot, FinishReason]] = []
        for slot, row in zip(ready, logits, strict=True):
            token = slot.sampler(row)
            slot.answer.append(token)
            slot.pending = np.array([token], dtype=np.int32)
            reason = slot.sampling.finish_of(slot.answer, self._eos_ids, slot.limit)
            if reason is not None:
                finished.append((slot, reason))
        for slot, _ in finished:
            self._release(slot)
        return finished

    def _decode(self, parts: Sequence[tuple[_Slot, int]]) -> list[_Slot]:
        """Decode the first `count` pending tokens of each slot; the slots left without any."""
        tokens = np.concatenate([slot.pending[:count] for slot, count in parts])
        positions = np.concatenate(
            [slot.position + np.arange(count, dtype=np.int32) for slot, count in parts]
        )
        sequence_ids = np.repeat(
            np.array([slot.sequence_id for slot, _ in parts], dtype=np.int32),
            [count for _, count in parts],
        )
        wants_logits = np.zeros(len(tokens), dtype=np.bool_)
        ready, end = [], 0
        for slot, count in parts:
            end += count
            slot.pending = slot.pending[count:]
            slot.position += count
            if not len(slot.pending):
                wants_logits[end - 1] = True
                ready.append(slot)
        self._context.decode(tokens, positions, sequence_ids, wants_logits)
        return ready

    def _release(self, slot: _Slot) -> None:
        self._context.forget(slot.sequence_id)
        self._free_sequences.append(slot.sequence_id)
        self._free_cells += slot.reserved
        self._slots.remove(slot)
