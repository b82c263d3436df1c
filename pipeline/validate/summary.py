"""What remains of a file once its rows were read: counts, and two digests of each row."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.shards import ids_sha256
from pipeline.validate.group import Group
from pipeline.validate.report import NotChecked
from pipeline.validate.shard import ShardFile

UInt64Array = npt.NDArray[np.uint64]
# Scalars that a shard takes over from its rollout row as they are, besides ids and mask.
CARRIED_SCALARS = ("source", "finish_reason", "degenerate", "on_policy")


@dataclass(kw_only=True)
class FileSummary:
    """16 bytes a row, so that a run of any size fits.

    ids, content: uint64 [rows], digests of the sample id and of what a shard takes over.
    whole: every row and column could be read; without that the digests say nothing.
    semantics: as they stand in the footer, None where they are not known.
    """

    file: ShardFile
    sha256: str = ""
    whole: bool = True
    rows: int = 0
    tokens: int = 0
    semantics: Any = None
    supervised_tokens: int = 0
    ids_sha256: str = ""
    ids: UInt64Array = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    content: UInt64Array = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))


class Summarizer:
    """Builds a FileSummary row group by row group."""

    def __init__(self, file: ShardFile, sha256: Callable[[], str]) -> None:
        self._summary = FileSummary(file=file, whole=file.layout is not None)
        if file.footer is not None and not file.semantics_error:
            self._summary.semantics = file.footer.said
        self._sha256 = sha256
        self._ids: list[str] = []
        self._content: list[int] = []

    def add(self, group: Group) -> None:
        summary = self._summary
        summary.rows += group.rows
        summary.tokens += group.tokens
        try:
            self._ids += group.scalar("sample_id")
            self._content += _content_digests(group)
            summary.supervised_tokens += int(group.array("loss_mask").sum(dtype=np.int64))
        except NotChecked:
            summary.whole = False
        summary.whole &= group.whole

    def finish(self) -> FileSummary:
        summary = self._summary
        summary.sha256 = self._sha256()
        if summary.whole:
            summary.ids_sha256 = ids_sha256(self._ids)
            summary.ids = np.array([id_digest(i) for i in self._ids], dtype=np.uint64)
            summary.content = np.array(self._content, dtype=np.uint64)
        return summary


def id_digest(sample_id: str) -> int:
    return _digest(sample_id.encode("utf-8", "surrogatepass"))


def _digest(raw: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def _content_digests(group: Group) -> list[int]:
    scalars: list[Any] = [group.scalar(name) for name in CARRIED_SCALARS]
    ids, mask = group.array("input_ids"), group.array("loss_mask")
    digests = []
    for row, (start, stop) in enumerate(zip(group.starts[:-1], group.starts[1:], strict=True)):
        head = "\0".join(str(column[row]) for column in scalars).encode("utf-8", "surrogatepass")
        digests.append(
            _digest(head + b"\0" + ids[start:stop].tobytes() + mask[start:stop].tobytes())
        )
    return digests
