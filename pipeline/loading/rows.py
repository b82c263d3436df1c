"""Rows by number, and rows in a shuffled order that any number of processes share.

Order is a pure function of (seed, epoch): row groups are permuted and dealt to the consumers (each
DataLoader worker of each rank is one), each to the one with the fewest rows so far; a consumer
then permutes the rows of `buffer_groups` of its row groups at a time.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from pipeline.errors import PipelineError
from pipeline.loading.reading import FeatureIndex, Row, RowGroup
from pipeline.seeds import row_seed


class FeatureDataset(torch.utils.data.Dataset[Row]):
    """All rows of a run by number, in the order of its shards. Reads a row group at a time."""

    def __init__(
        self,
        out: str | Path,
        columns: Collection[str] | None = None,
        *,
        cached_groups: int = 2,
        verify_sha256: bool = False,
        allow_incomplete: bool = False,
        allow_missing: bool = False,
    ) -> None:
        """As FeatureIndex; cached_groups: row groups (at most 256 MiB each) kept in memory."""
        self.index = FeatureIndex(
            out,
            columns,
            verify_sha256=verify_sha256,
            allow_incomplete=allow_incomplete,
            allow_missing=allow_missing,
        )
        self._starts = np.array([group.first_row for group in self.index.groups])
        self._cached_groups = max(1, cached_groups)
        self._cache: OrderedDict[int, list[Row]] = OrderedDict()

    def __len__(self) -> int:
        return self.index.rows

    def __getitem__(self, number: int) -> Row:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        number %= len(self)
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        if at not in self._cache:
            while len(self._cache) >= self._cached_groups:
                self._cache.popitem(last=False)
            self._cache[at] = self.index.read(self.index.groups[at])
        self._cache.move_to_end(at)
        return self._cache[at][number - int(self._starts[at])]


class FeatureStream(torch.utils.data.IterableDataset[Row]):
    """All rows once an epoch in a shuffled order, shared by ranks and DataLoader workers.

    Without DataLoader workers, or with a loader that asks its workers for their state, use
    `state_dict()`. A plain DataLoader keeps its workers' progress to itself: there pass how many
    batches the trainer has taken, `state_dict(batches=…, batch_size=…, num_workers=…)`.
    """

    def __init__(
        self,
        out: str | Path,
        columns: Collection[str] | None = None,
        *,
        seed: int = 0,
        shuffle: bool = True,
        buffer_groups: int = 4,
        rank: int = 0,
        world_size: int = 1,
        even: bool = False,
        verify_sha256: bool = False,
        allow_incomplete: bool = False,
        allow_missing: bool = False,
    ) -> None:
        """As FeatureIndex. rank, world_size: of this process among the trainers'.

        even: every consumer stops where the shortest ends, so that all ranks take the same number
        of rows (DDP waits for those that end early); without it every row comes exactly once.
        Raises PipelineError where there are fewer row groups than ranks.
        """
        if not 0 <= rank < world_size:
            raise PipelineError(f"rank {rank} of {world_size}")
        self.index = FeatureIndex(
            out,
            columns,
            verify_sha256=verify_sha256,
            allow_incomplete=allow_incomplete,
            allow_missing=allow_missing,
        )
        if len(self.index.groups) < world_size:
            raise PipelineError(
                f"{out}: {len(self.index.groups)} row groups cannot be dealt to {world_size} ranks"
            )
        self._seed, self._shuffle, self._even = seed, shuffle, even
        self._buffer_groups = max(1, buffer_groups)
        self._rank, self._world_size = rank, world_size
        self._epoch = 0
        # Rows taken this epoch by each DataLoader worker of this rank; one entry without workers.
        self._taken: list[int] = [0]

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its beginning; its order differs from other epochs'."""
        self._epoch, self._taken = epoch, [0]

    def __iter__(self) -> Iterator[Row]:
        """The rest of the epoch; at its end the next one is set, from its beginning."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if len(self._taken) != workers:
            if any(self._taken):
                raise PipelineError(
                    f"the state is of {len(self._taken)} DataLoader workers, not {workers}"
                )
            self._taken = [0] * workers
        start = self._taken[worker]
        groups, limit = self._share(worker, workers)
        for taken, row in enumerate(self._rows(groups, start, limit), start=start + 1):
            self._taken[worker] = taken
            yield row
        if info is None:
            self.set_epoch(self._epoch + 1)

    def state_dict(
        self, *, batches: int | None = None, batch_size: int = 1, num_workers: int = 0
    ) -> dict[str, Any]:
        """Where in which epoch this rank is, for `load_state_dict`.

        batches: taken this epoch from a plain DataLoader of that batch_size and num_workers, which
        deals batches from its workers in turn.
        """
        taken = list(self._taken)
        if batches is not None:
            workers = max(1, num_workers)
            taken = [
                min(
                    len(range(worker, batches, workers)) * batch_size,
                    self._share(worker, workers)[1],
                )
                for worker in range(workers)
            ]
        return {
            "fingerprint": self.index.fingerprint,
            "seed": self._seed,
            "epoch": self._epoch,
            "world_size": self._world_size,
            "taken": taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`. Raises PipelineError where it is of other rows or another order."""
        expected = {
            "fingerprint": self.index.fingerprint,
            "seed": self._seed,
            "world_size": self._world_size,
        }
        for key, value in expected.items():
            if state[key] != value:
                raise PipelineError(f"the state has {key} {state[key]}, here it is {value}")
        self._epoch, self._taken = state["epoch"], list(state["taken"])

    def _share(self, worker: int, workers: int) -> tuple[list[RowGroup], int]:
        """The row groups of a consumer in its order, and how many of their rows it takes."""
        groups = self.index.groups
        order = self._random("groups").permutation(len(groups))
        consumers = self._world_size * workers
        dealt: list[list[RowGroup]] = [[] for _ in range(consumers)]
        rows = [0] * consumers
        for at in order if self._shuffle else range(len(groups)):
            least = rows.index(min(rows))
            dealt[least].append(groups[at])
            rows[least] += groups[at].rows
        mine = self._rank * workers + worker
        return dealt[mine], min(rows) if self._even else rows[mine]

    def _rows(self, groups: list[RowGroup], start: int, limit: int) -> Iterator[Row]:
        """Rows [start, limit) of a consumer; the next buffer is read while one is given out."""
        buffers = [
            groups[i : i + self._buffer_groups] for i in range(0, len(groups), self._buffer_groups)
        ]
        skipped, wanted = 0, []
        for number, buffer in enumerate(buffers):
            rows = sum(group.rows for group in buffer)
            if skipped + rows > start and skipped < limit:
                wanted.append((number, buffer, skipped))
            skipped += rows
        with ThreadPoolExecutor(1) as reader:
            ahead = [reader.submit(self._read, *item[:2]) for item in wanted[:1]]
            for place, (_, _, before) in enumerate(wanted):
                rows_now = ahead.pop().result()
                if place + 1 < len(wanted):
                    ahead.append(reader.submit(self._read, *wanted[place + 1][:2]))
                yield from rows_now[max(0, start - before) : limit - before]

    def _read(self, number: int, buffer: list[RowGroup]) -> list[Row]:
        rows = [row for group in buffer for row in self.index.read(group)]
        if not self._shuffle:
            return rows
        # Of the buffer's first group, which no two consumers share.
        name = f"rows {number} {buffer[0].first_row}"
        return [rows[i] for i in self._random(name).permutation(len(rows))]

    def _random(self, purpose: str) -> np.random.Generator:
        return np.random.Generator(
            np.random.Philox(key=row_seed(self._seed, f"epoch {self._epoch} {purpose}", ""))
        )
