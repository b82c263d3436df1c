"""A few rows to look at, the same ones for the same ids, and their tokens as text."""

import hashlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError
from pipeline.validate.group import Group

SAMPLES = 10
BEFORE = 24  # tokens of context shown before the first supervised one
SHOWN = 160  # tokens shown of a row
TABLE_ROWS = 12  # of them token by token

# The text of some token ids.
Decode = Callable[[Sequence[int]], str]
# A character has at most four bytes, and a token at least one.
PIECES_OF_A_CHAR = 4
BROKEN = "\ufffd"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A window of one row: tokens start to start + n, arrays cut to it.

    target_ids, target_mask: int32, uint8 [n, depth]; teacher_ids, teacher_probs: [n], the arg-max
    of each teacher row and its probability; token_probs: float64 [n], of x_t at t-1.
    anchor: index in the window of the first token all of whose targets are supervised, or None.
    """

    sample_id: str
    source: str
    finish_reason: str
    on_policy: bool
    num_tokens: int
    supervised: int
    position_offset: int
    start: int
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    target_ids: npt.NDArray[np.int32]
    target_mask: npt.NDArray[np.uint8]
    teacher_ids: npt.NDArray[np.int32]
    teacher_probs: npt.NDArray[np.float64]
    token_probs: npt.NDArray[np.float64]

    @property
    def anchor(self) -> int | None:
        whole = np.flatnonzero((self.target_mask != 0).all(axis=1))
        return int(whole[0]) if self.target_mask.shape[1] and len(whole) else None


class Sampler:
    """Keeps the rows whose ids have the smallest digests: as good as random, yet two runs over
    the same prompts show the same rows."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str, Sample]] = []  # a heap: the largest digest first

    def add(self, group: Group) -> None:
        for row, sample_id in enumerate(group.row_ids):
            raw = sample_id.encode("utf-8", "surrogatepass")
            digest = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")
            if len(self._kept) < SAMPLES:
                heapq.heappush(self._kept, (-digest, sample_id, _cut(group, row)))
            elif (-digest, sample_id) > self._kept[0][:2]:
                heapq.heapreplace(self._kept, (-digest, sample_id, _cut(group, row)))

    def finish(self) -> tuple[Sample, ...]:
        return tuple(sample for _, _, sample in sorted(self._kept, key=lambda kept: -kept[0]))


def _cut(group: Group, row: int) -> Sample:
    first, last = int(group.starts[row]), int(group.starts[row + 1])
    mask = group.array("loss_mask")[first:last]
    supervised = np.flatnonzero(mask)
    start = max(0, int(supervised[0]) - BEFORE) if len(supervised) else 0
    at = slice(first + start, min(last, first + start + SHOWN))

    def cut(name: str) -> Any:
        # A copy: a view would keep the whole row group alive.
        return group.array(name)[at].copy()

    depth = group.file.need_footer().depth
    has_targets = "target_ids" in group.arrays
    nothing = np.zeros((at.stop - at.start, depth if has_targets else 0))
    return Sample(
        sample_id=group.row_ids[row],
        source=group.scalar("source")[row],
        finish_reason=group.scalar("finish_reason")[row],
        on_policy=bool(group.scalar("on_policy")[row]),
        num_tokens=last - first,
        supervised=len(supervised),
        position_offset=int(group.scalar("position_offset")[row]),
        start=start,
        input_ids=cut("input_ids"),
        loss_mask=cut("loss_mask"),
        target_ids=cut("target_ids") if has_targets else nothing.astype(np.int32),
        target_mask=cut("target_mask") if has_targets else nothing.astype(np.uint8),
        teacher_ids=group.array("teacher_top_ids")[at, 0].copy(),
        teacher_probs=np.exp(group.array("teacher_top_logprobs")[at, 0].astype(np.float64)),
        token_probs=np.exp(cut("token_logprobs").astype(np.float64)),
    )


def token_decoder(target: str | None, tokenizer: str | None) -> tuple[Decode, str | None]:
    """How ids become text, and why they do not where the target model is not on this machine."""
    if target is None:
        return _as_numbers, "no manifest.json says what the target model is"
    # transformers: only here, and only what reads a tokenizer.
    from pipeline.models.load import find_target, load_tokenizer

    try:
        return decoder_of(load_tokenizer(find_target(target), tokenizer)), None
    except (PipelineError, OSError) as error:
        return _as_numbers, str(error)


def decoder_of(tokenizer: Any) -> Decode:
    """Decodes ids; one that is a piece of a character becomes the vocabulary's own name for it."""

    def decode(tokens: Sequence[int]) -> str:
        try:
            text = str(tokenizer.decode(list(tokens)))
            if len(tokens) == 1 and (not text or BROKEN in text):
                text = tokenizer.convert_ids_to_tokens(tokens[0]) or _as_numbers(tokens)
        except (OverflowError, TypeError, ValueError, IndexError):
            return _as_numbers(tokens)  # an id outside the vocabulary
        return text

    return decode


def pieces(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[int, int, str]]:
    """(start, stop, text) of tokens that can be read: alone, or several that make a character."""
    start = 0
    while start < len(tokens):
        for stop in range(start + 1, min(len(tokens), start + PIECES_OF_A_CHAR) + 1):
            # Twice the same id, since alone it would be called by its name.
            if stop > start + 1 or BROKEN not in decode([tokens[start]] * 2):
                text = decode(tokens[start:stop])
                if BROKEN not in text:
                    break
        else:
            stop, text = start + 1, decode(tokens[start : start + 1])
        yield start, stop, text
        start = stop


def _as_numbers(tokens: Sequence[int]) -> str:
    return "".join(f"[{token}]" for token in tokens)
