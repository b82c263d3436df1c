"""One row on its way through a rollout: prompts out, answers in, ids and loss mask at the end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.chat import ChatRenderer, Tools, UInt8Array
from pipeline.chat_encoding import Int32Array
from pipeline.prompt_turns import Message

if TYPE_CHECKING:  # importing it for real would load torch
    from pipeline.models.base import FinishReason


class Conversation:
    """State of one row: which turns are answered, and the ids so far.

    Answers are kept as the ids they came as. One that ends with the template's own end-of-turn
    token takes the place of that token in the next segment, so it is there once.

    Attributes:
        turns_done: answers taken so far.
        finish_reason, answer: of the last answer; None and empty before the first.
    """

    def __init__(self, segments: Sequence[npt.ArrayLike], *, eos_ids: Collection[int]) -> None:
        """
        segments: int32 [n_i] each, the fixed ids before answer i; from the second on they start
            with what follows an answer's content.
        eos_ids: the ids that end an answer.

        Raises ValueError: no segment, an empty one, or one with nothing besides an end-of-turn
        token, which would let two answers touch.
        """
        self._segments = [np.asarray(segment, dtype=np.int32) for segment in segments]
        if not self._segments or len(self._segments[0]) == 0:
            raise ValueError("a conversation needs a prompt before its first answer")
        if any(len(segment) < 2 for segment in self._segments[1:]):
            raise ValueError("there must be template text between two answers")
        self._eos_ids = frozenset(eos_ids)
        self._pieces: list[Int32Array] = []
        self._masks: list[UInt8Array] = []
        self._pending: Int32Array | None = self._segments[0]
        self.turns_done = 0
        self.finish_reason: FinishReason | None = None
        self.answer: Int32Array = np.empty(0, np.int32)

    @classmethod
    def all_turns(
        cls, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools = ()
    ) -> Conversation:
        """Every question is answered anew; given answers are dropped. Raises RowReject."""
        segments = renderer.prompt_segments(messages, tools)
        return cls([renderer.encode(text) for text in segments], eos_ids=renderer.eos_ids)

    @classmethod
    def last_turn(
        cls, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools = ()
    ) -> Conversation:
        """Only the last question is answered; earlier answers are context. Raises RowReject."""
        segments, answers = renderer.last_prompt(messages, tools)
        context = [renderer.encode(segments[0])]
        for answer, segment in zip(answers, segments[1:], strict=True):
            context += [renderer.encode(answer), renderer.encode(segment)]
        return cls([np.concatenate(context)], eos_ids=renderer.eos_ids)

    @property
    def segments(self) -> list[Int32Array]:
        """int32 [n_i] each, as they were given."""
        return self._segments

    @property
    def ids(self) -> Int32Array:
        """int32 [T]: everything up to the end of the last answer; empty before the first."""
        return np.concatenate([np.empty(0, np.int32), *self._pieces])

    @property
    def loss_mask(self) -> UInt8Array:
        """uint8 [T]: 1 iff the answers hold the token, terminators included."""
        return np.concatenate([np.empty(0, np.uint8), *self._masks])

    def next_prompt(self) -> Int32Array | None:
        """int32 [P], the context for the next answer; None once the conversation has ended."""
        if self._pending is None:
            return None
        return np.concatenate([*self._pieces, self._pending])

    def add_answer(self, ids: npt.ArrayLike, finish_reason: FinishReason) -> None:
        """Take the answer to `next_prompt`.

        ids: int32 [N], N >= 1, with a terminator as its last id iff finish_reason is "stop".
        The conversation ends after its last turn, after an answer that a stop string or the length
        limit ended, and after a terminator that is not the one the template goes on from.

        Raises ValueError: no answer is due, or ids and finish_reason contradict each other.
        """
        answer = np.asarray(ids, dtype=np.int32)
        if self._pending is None:
            raise ValueError("this conversation has ended; it takes no more answers")
        self._check_answer(answer, finish_reason)
        self._append(self._pending, mask=0)
        self._append(answer, mask=1)
        self.turns_done += 1
        self.finish_reason, self.answer = finish_reason, answer
        self._pending = None
        if finish_reason == "stop" and self.turns_done < len(self._segments):
            following = self._segments[self.turns_done]
            if following[0] == answer[-1]:
                self._pending = following[1:]

    def _check_answer(self, answer: Int32Array, finish_reason: FinishReason) -> None:
        if finish_reason not in ("stop", "stop_string", "length"):
            raise ValueError(f"a generated answer cannot have finish_reason {finish_reason!r}")
        if answer.ndim != 1 or len(answer) == 0:
            raise ValueError(f"an answer needs ids of shape [N], N >= 1, not {answer.shape}")
        ends = np.isin(answer, list(self._eos_ids))
        if ends[:-1].any():
            raise ValueError("an answer goes on after a terminator")
        if bool(ends[-1]) != (finish_reason == "stop"):
            raise ValueError(
                f"finish_reason {finish_reason!r} contradicts the answer's last id {answer[-1]}"
            )

    def _append(self, ids: Int32Array, *, mask: int) -> None:
        self._pieces.append(ids)
        self._masks.append(np.full(len(ids), mask, dtype=np.uint8))
