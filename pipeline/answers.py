"""What ends an answer besides its terminator, and what is wrong with one that never ends."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError

# Whether the answer so far, as ids, is at its end.
Ended = Callable[[Sequence[int]], bool]

GRAM = 4
LEAST_DISTINCT = 0.5  # of an answer's 4-grams; a loop has fewer


class StopStrings:
    """Strings that end an answer, looked for in its text: they may lie across token borders.

    The token that completes one is the answer's last (the ids are what was sampled, so none is
    cut), and `start` tells where in the text the string begins.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        """Raises PipelineError for an empty string, which would end every answer."""
        if not all(strings):
            raise PipelineError("--stop: an empty string would end every answer at once")
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # A token that matters has at least one byte of text; those before only give the decoder
        # whole characters.
        self._window = max(len(text.encode()) for text in strings) + 8

    def __call__(self, ids: Sequence[int]) -> bool:
        """Whether the last token completes a stop string, given that none was there before."""
        tail = self._decode(ids[-self._window :])
        return any(text in tail for text in self._strings)

    def start(self, ids: Sequence[int]) -> int:
        """Characters of the answer's text before the first stop string; -1 if there is none."""
        text = self._decode(ids)
        found = [at for s in self._strings if (at := text.find(s)) >= 0]
        return min(found, default=-1)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def distinct_share(ids: npt.ArrayLike) -> float:
    """The share of an answer's 4-grams that are distinct; 1.0 for one too short to have any.

    ids: int32 [N].
    """
    answer = np.asarray(ids)
    if len(answer) < GRAM:
        return 1.0
    grams = np.lib.stride_tricks.sliding_window_view(answer, GRAM)
    return len(np.unique(grams, axis=0)) / len(grams)


def is_degenerate(ids: npt.ArrayLike, finish_reason: str) -> bool:
    """Whether an answer loops: it was cut by the limit, and over half of its 4-grams repeat.

    ids: int32 [N], the last answer of a row.
    """
    return finish_reason == "length" and distinct_share(ids) < LEAST_DISTINCT
