"""Choose a draft vocabulary, write it, and check one.

t2d: bool [vocab], whether the target's token is in the draft vocabulary.
d2t: int64 [size], offsets: draft id i is the target's id i + d2t[i], rising with i.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from pipeline.errors import PipelineError
from pipeline.vocab.classes import GROUPS, always_kept, script_of, token_texts

VOCAB_FILE = "vocab.safetensors"


@dataclass(frozen=True, kw_only=True)
class DraftVocab:
    """ids: int64 [size], the target's ids that it holds, rising; vocab_size: of the target."""

    ids: npt.NDArray[np.int64]
    vocab_size: int

    @property
    def t2d(self) -> npt.NDArray[np.bool_]:
        known = np.zeros(self.vocab_size, np.bool_)
        known[self.ids] = True
        return known

    @property
    def d2t(self) -> npt.NDArray[np.int64]:
        return self.ids - np.arange(len(self.ids))

    def to_bytes(self) -> bytes:
        """A safetensors file; the same vocabulary gives the same bytes."""
        data: bytes = save({"d2t": self.d2t, "t2d": self.t2d})
        return data


def build_vocab(
    counts: npt.NDArray[np.int64],
    *,
    size: int,
    tokenizer: Any,
    eos_ids: set[int],
    must_include: Collection[str] = (),
) -> DraftVocab:
    """What must be there, then the most frequent tokens, ties and unseen ones by lower id.

    counts: int64 [vocab], supervised occurrences. Raises PipelineError for an unknown group, or if
    the size holds less than what must be there, or more than the target has.
    """
    vocab_size = len(counts)
    unknown = sorted(set(must_include) - set(GROUPS))
    if unknown:
        raise PipelineError(f"--must-include {unknown[0]}: choose from {', '.join(GROUPS)}")
    kept = {i for i in always_kept(tokenizer, eos_ids) if i < vocab_size}
    needed = {"specials, terminators and bytes": len(kept)}
    texts = token_texts(tokenizer, vocab_size) if must_include else []
    for name in must_include:
        group = {i for i, text in enumerate(texts) if text and GROUPS[name](text)}
        needed[name] = len(group)
        kept |= group
    if not len(kept) <= size <= vocab_size:
        what = ", ".join(f"{count:,} {name}" for name, count in needed.items())
        raise PipelineError(
            f"--size {size}: must lie between {len(kept):,} ({what}) and the {vocab_size:,} tokens "
            "of the target model"
        )
    forced = np.zeros(vocab_size, np.bool_)
    forced[list(kept)] = True
    order = np.lexsort((np.arange(vocab_size), -counts, ~forced))
    return DraftVocab(ids=np.sort(order[:size]), vocab_size=vocab_size)


def check_vocab(t2d: npt.NDArray[Any], d2t: npt.NDArray[Any]) -> DraftVocab:
    """Raises PipelineError saying what is wrong: types, range, order, or that they disagree."""
    if t2d.dtype != np.bool_ or t2d.ndim != 1 or d2t.dtype != np.int64 or d2t.ndim != 1:
        raise PipelineError(
            f"t2d is {t2d.dtype} {list(t2d.shape)}, d2t {d2t.dtype} {list(d2t.shape)}; they must "
            "be bool [vocab] and int64 [size]"
        )
    ids = np.arange(len(d2t)) + d2t
    if len(ids) and not (ids.min() >= 0 and ids.max() < len(t2d)):
        raise PipelineError(f"d2t: leads to ids {ids.min()} to {ids.max()} of {len(t2d)}")
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if falls.size:
        raise PipelineError(
            f"d2t: draft id {falls[0] + 1} does not lead to a higher id than before"
        )
    wrong = np.setxor1d(ids, np.flatnonzero(t2d))
    if wrong.size:
        raise PipelineError(f"t2d and d2t disagree on token {wrong[0]}")
    return DraftVocab(ids=ids, vocab_size=len(t2d))


def read_vocab(folder: Path) -> DraftVocab:
    """Read what `pipeline vocab` wrote; its own hash and consistency are verified."""
    path = folder / VOCAB_FILE
    try:
        data = path.read_bytes()
        told = json.loads((folder / "vocab.json").read_text())["sha256"]
        tensors: Mapping[str, Any] = load(data)
        t2d, d2t = tensors["t2d"], tensors["d2t"]
    except Exception as error:  # whatever a stranger's file makes the parsers raise
        raise PipelineError(f"{folder}: cannot read a draft vocabulary: {error}") from error
    if hashlib.sha256(data).hexdigest() != told:
        raise PipelineError(f"{path}: is not the file that vocab.json describes")
    return check_vocab(t2d, d2t)


def coverage(
    vocab: DraftVocab, by_source: Mapping[str, npt.NDArray[np.int64]], tokenizer: Any
) -> dict[str, Any]:
    """Share of the supervised tokens that it holds: in all, by script, by source.

    by_source: source -> int64 [vocab], supervised occurrences.
    """
    known = vocab.t2d
    total = sum(by_source.values(), np.zeros(vocab.vocab_size, np.int64))
    texts = token_texts(tokenizer, vocab.vocab_size)
    scripts = np.array([script_of(text) for text in texts])
    return {
        "all": _share(total, known),
        "scripts": {
            str(name): {
                **_share(total[scripts == name], known[scripts == name]),
                "vocabulary": int(known[scripts == name].sum()),
            }
            for name in np.unique(scripts[(total > 0) | known])
        },
        "sources": {name: _share(counts, known) for name, counts in sorted(by_source.items())},
    }


def _share(counts: npt.NDArray[np.int64], known: npt.NDArray[np.bool_]) -> dict[str, Any]:
    tokens = int(counts.sum())
    share = int(counts[known].sum()) / tokens if tokens else None
    return {"tokens": tokens, "share": share if share is None else round(share, 6)}
