"""Generation of the transformers backend: continuous batching over its dynamic cache.

Rows decode in lockstep, one token a step. A row that ends leaves at once; when several have left,
waiting prompts are prefilled together and join the rows that are under way. Which rows share a
step follows from the prompts and the answers alone, so a second run does the same.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.models.base import Generation, Prompt, Sampling
from pipeline.models.sampling import RowSampler

ROWS = 32  # rows that decode together
# Prompts join when as many may: to join copies the cache once, and so does each decoding step.
JOINING = 8
# All rows are padded to the longest, so no prompt joins a row that is much shorter than itself;
# another round of decoding costs more than a little padding.
PADDED, PADDING = 1.5, 512

# (input_ids, mask, positions [B, T], cache) -> logits [B, V] of the last token
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, DynamicCache], torch.Tensor]
# (logits [B, V], the rows' samplers) -> a token per row
Choose = Callable[[torch.Tensor, Sequence[RowSampler]], list[int]]


@dataclass
class _Batch:
    """Rows under way, padded on the left to the longest.

    rows: which prompts, [B]; mask: int64 [B, W], 1 for the real columns of the cache.
    """

    rows: list[int]
    cache: DynamicCache
    mask: torch.Tensor

    def keep(self, slots: Sequence[int]) -> None:
        """Drop every row but those in these slots."""
        if len(slots) < len(self.rows):
            kept = torch.tensor(slots, dtype=torch.long, device=self.mask.device)
            self.cache.batch_select_indices(kept)
            self.mask = self.mask[kept]
            self.rows = [self.rows[slot] for slot in slots]

    def join(self, other: "_Batch") -> None:
        """Take over another batch's rows; columns that are padding in every row go."""
        width = max(int(mask.sum(dim=1).max()) for mask in (self.mask, other.mask))
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            if not isinstance(mine, DynamicLayer):  # it shares the K and V of another layer
                continue
            columns = width
            if mine.is_sliding:  # holds what the next token sees of its window
                columns = min(width, mine.sliding_window - 1)
                mine.cumulative_length = width
            mine.keys = torch.cat([_columns(x.keys, columns) for x in (mine, theirs)])
            mine.values = torch.cat([_columns(x.values, columns) for x in (mine, theirs)])
        masks = [_columns(x.mask[..., None], width)[..., 0] for x in (self, other)]
        self.mask = torch.cat(masks)
        self.rows += other.rows


def _columns(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """The last `count` columns of [B, …, W, C], zeros before them where there are fewer."""
    missing = count - tensor.shape[-2]
    return torch.nn.functional.pad(tensor, (0, 0, max(0, missing), 0))[..., -count:, :]


class Generator:
    """The answers to some prompts; `run` gives them in order."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        step: Step,
        choose: Choose,
        new_cache: Callable[[], DynamicCache],
        eos_ids: frozenset[int],
        max_length: int,
        device: Any,
    ) -> None:
        self._prompts, self._sampling = prompts, sampling
        self._step, self._choose, self._new_cache = step, choose, new_cache
        self._eos_ids, self._max_length, self._device = eos_ids, max_length, device
        self._samplers = [RowSampler(prompt.seed, sampling) for prompt in prompts]
        self._answers: list[list[int]] = [[] for _ in prompts]
        self._finished: dict[int, Generation] = {}

    @torch.inference_mode()
    def run(self) -> list[Generation]:
        lengths = [len(prompt.ids) for prompt in self._prompts]
        waiting = deque(sorted(range(len(lengths)), key=lambda i: lengths[i]))
        batch: _Batch | None = None
        while waiting or batch:
            under_way = [lengths[i] + len(self._answers[i]) for i in batch.rows] if batch else []
            count = joining([lengths[i] for i in waiting], under_way)
            if count:
                started = self._prefill([waiting.popleft() for _ in range(count)])
                if batch and started.rows:
                    batch.join(started)
                else:
                    batch = batch or started
            elif batch:
                self._decode(batch)
            batch = batch if batch and batch.rows else None
        return [self._finished[i] for i in range(len(self._prompts))]

    def _prefill(self, rows: list[int]) -> _Batch:
        ids, mask = _left_pad([self._prompts[i].ids for i in rows])
        batch = _Batch(rows, self._new_cache(), mask.to(self._device))
        positions = (batch.mask.cumsum(dim=1) - 1).clamp(min=0)
        self._advance(batch, ids.to(self._device), positions)
        return batch

    def _decode(self, batch: _Batch) -> None:
        last = [[self._answers[i][-1]] for i in batch.rows]
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones((len(last), 1))], dim=1)
        positions = batch.mask.sum(dim=1, keepdim=True) - 1
        self._advance(batch, torch.tensor(last, device=self._device), positions)

    def _advance(self, batch: _Batch, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """One pass, one token more for each row of the batch; finished rows leave it."""
        logits = self._step(ids, batch.mask, positions, batch.cache)
        chosen = self._choose(logits, [self._samplers[i] for i in batch.rows])
        staying = []
        for slot, (i, token) in enumerate(zip(batch.rows, chosen, strict=True)):
            answer = self._answers[i]
            answer.append(token)
            limit = min(self._sampling.max_new_tokens, self._max_length - len(self._prompts[i].ids))
            reason = self._sampling.finish_of(answer, self._eos_ids, limit)
            if reason is None:
                staying.append(slot)
            else:
                self._finished[i] = Generation(np.array(answer, dtype=np.int32), reason)
        batch.keep(staying)


def joining(waiting: Sequence[int], under_way: Sequence[int]) -> int:
    """How many of the waiting prompts start now.

    waiting: their lengths, rising; under_way: the lengths so far of the rows that decode.
    """
    free = ROWS - len(under_way)
    if not waiting or (under_way and free < min(JOINING, len(waiting))):
        return 0
    longest = PADDED * min([waiting[0], *under_way]) + PADDING
    return sum(length <= longest for length in waiting[:free])


def _left_pad(prompts: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(ids) for ids in prompts)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, width - len(prompt) :] = torch.tensor(prompt)
        mask[b, width - len(prompt) :] = 1
    return ids, mask
