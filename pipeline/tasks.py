"""The units of work of a run: one rollout part, one shard; and how shards are cut."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipeline.manifest import Commit, RunFolder


class RowRange(NamedTuple):
    """Rows [start, stop) of one rollout file (a path under OUT)."""

    file: str
    start: int
    stop: int


class RowFault(NamedTuple):
    """Why a row of a task cannot be done; reason: a reject reason."""

    reason: str
    detail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """Answer the prompts of one plan part.

    inputs_sha256: digest of what the file is made from, here the part file's.
    rows: how many; faults: by index, rows known to fail, which become rejects.
    """

    index: int
    rows: int
    inputs_sha256: str
    faults: Mapping[int, RowFault] = dataclasses.field(default_factory=dict)
    attempt: int = 1

    @property
    def name(self) -> str:
        return f"rollout-{self.index:05d}"

    @property
    def plan_file(self) -> str:
        return f"plan/part-{self.index:05d}.parquet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Extract the features of consecutive rollout rows, in order, into one shard of `total`."""

    index: int
    total: int
    ranges: tuple[RowRange, ...]
    faults: Mapping[int, RowFault] = dataclasses.field(default_factory=dict)
    attempt: int = 1

    @property
    def name(self) -> str:
        return f"train-{self.index:05d}"

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)

    @property
    def inputs_sha256(self) -> str:
        """Rollout files are named by their content, so this stands for the rows themselves."""
        text = json.dumps([self.index, self.total, self.ranges])
        return hashlib.sha256(text.encode()).hexdigest()


Task = RolloutTask | ShardTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """Do some rows of a task and keep nothing, to see whether they can be done at all."""

    task: Task
    rows: range

    @property
    def name(self) -> str:
        return f"{self.task.name}, rows {self.rows.start}:{self.rows.stop} alone"


Unit = Task | Trial


def plan_shards(
    rollouts: Sequence[Commit], folder: RunFolder, *, bytes_per_token: int, shard_bytes: int
) -> list[ShardTask]:
    """Cut all rollout rows, in order, into shards of about even token counts.

    bytes_per_token: of the features in their logical dtypes. Lengths are known now, so sizes are
    even; a shard holds at least one row. Memory grows with the shards, not with the rows.
    """
    total = sum(commit.tokens for commit in rollouts)
    wanted = max(1, round(total * bytes_per_token / shard_bytes))
    shards: dict[int, list[RowRange]] = {}
    before = 0
    for file, row, tokens in _row_lengths(rollouts, folder):
        # The shard that the row's middle falls into.
        ranges = shards.setdefault((before + tokens // 2) * wanted // max(1, total), [])
        before += tokens
        if ranges and ranges[-1].file == file:
            ranges[-1] = ranges[-1]._replace(stop=row + 1)
        else:
            ranges.append(RowRange(file, row, row + 1))
    return [
        ShardTask(index=index, total=len(shards), ranges=tuple(ranges))
        for index, ranges in enumerate(shards.values())
    ]


def _row_lengths(rollouts: Sequence[Commit], folder: RunFolder) -> Iterator[tuple[str, int, int]]:
    """(file, row in it, tokens) of every rollout row, in order."""
    for commit in rollouts:
        lengths = folder.read_table(commit.file, ["num_tokens"])["num_tokens"].to_pylist()
        for row, tokens in enumerate(lengths):
            yield commit.file, row, tokens
