"""How often one token follows another, and a pair: what a Markov head starts from."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_BITS = 21  # of an id in a packed key; three fit into 63 bits
_PENDING = 4_000_000  # keys collected before they are counted together


class Counts(NamedTuple):
    """keys: int32 [N, order + 1], distinct, in rising order; counts: int64 [N]."""

    keys: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """first: (x_{t-1}, x_t); second: (x_{t-2}, x_{t-1}, x_t); counted where x_t is supervised.

    Rows are apart: no transition crosses from one into the next.
    """

    first: Counts
    second: Counts


class _Counter:
    """Counts of packed keys, merged a few million at a time."""

    def __init__(self, order: int) -> None:
        self._order = order
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._pending: list[npt.NDArray[np.int64]] = []
        self._size = 0

    def add(self, ids: npt.NDArray[np.int64], supervised: npt.NDArray[np.bool_]) -> None:
        if len(ids) <= self._order:
            return
        key = np.zeros(len(ids) - self._order, np.int64)
        for step in range(self._order + 1):
            key = (key << _BITS) | ids[step : len(ids) - self._order + step]
        self._pending.append(key[supervised[self._order :]])
        self._size += len(self._pending[-1])
        if self._size >= _PENDING:
            self._merge()

    def _merge(self) -> None:
        new, counts = np.unique(
            np.concatenate([np.empty(0, np.int64), *self._pending]), return_counts=True
        )
        keys, inverse = np.unique(np.concatenate([self._keys, new]), return_inverse=True)
        total = np.zeros(len(keys), np.int64)
        np.add.at(total, inverse, np.concatenate([self._counts, counts]))
        self._keys, self._counts, self._pending, self._size = keys, total, [], 0

    def finish(self) -> Counts:
        self._merge()
        parts = [
            (self._keys >> (_BITS * step)) & (2**_BITS - 1) for step in range(self._order, -1, -1)
        ]
        return Counts(np.stack(parts, axis=1).astype(np.int32), self._counts)


def count_transitions(
    rows: Iterable[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]],
) -> Transitions:
    """rows: input_ids [T] and loss_mask [T] of each row; ids below 2**21."""
    first, second = _Counter(1), _Counter(2)
    for ids, mask in rows:
        wide, supervised = ids.astype(np.int64), mask.astype(np.bool_)
        first.add(wide, supervised)
        second.add(wide, supervised)
    return Transitions(first=first.finish(), second=second.finish())
