"""One row group as flat arrays: the rows of a column one after the other, [N, …] for N tokens.

Rules then work on whole row groups at once: row r owns the tokens starts[r] to starts[r + 1].
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.schema import FLOAT_DTYPES, BoundColumn
from pipeline.validate.report import NotChecked, Problem
from pipeline.validate.shard import ShardFile

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
SCAN_BYTES = 2**20  # of a column scanned at a time: stays in the cache


class Scan(NamedTuple):
    """What holds for each innermost vector of a float column; arrays of its shape but the last.

    off_grid: a value is not one of the column's logical dtype.
    """

    non_finite: BoolArray
    all_zero: BoolArray
    off_grid: BoolArray


@dataclass(kw_only=True)
class Group:
    """A row group, cut down to the rows whose columns agree on the number of tokens.

    trouble: what kept values from being read, by the rule it breaks. row_ids: sample ids.
    whole: nothing was left out of the columns or the rows.
    """

    file: ShardFile
    first_row: int
    row_ids: list[str] = field(default_factory=list)
    starts: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    scalars: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    trouble: dict[str, list[Problem]] = field(default_factory=dict)
    whole: bool = True

    @property
    def rows(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    @cached_property
    def lengths(self) -> IntArray:
        return np.diff(self.starts)

    @cached_property
    def row_of(self) -> IntArray:
        """The row of each token, int64 [N]."""
        return np.repeat(np.arange(self.rows), self.lengths)

    @cached_property
    def same_row(self) -> BoolArray:
        """bool [N - 1]: tokens i and i + 1 belong to one row."""
        same: BoolArray = self.row_of[1:] == self.row_of[:-1]
        return same

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array column, [N, …]. Raises NotChecked where there is none to read."""
        if name not in self.arrays:
            raise NotChecked(self._absent(name))
        return self.arrays[name]

    def scalar(self, name: str) -> Any:
        """A scalar column: a list of strings or an integer array, [R]. Raises NotChecked."""
        if name not in self.scalars:
            raise NotChecked(self._absent(name))
        return self.scalars[name]

    def _absent(self, name: str) -> str:
        layout = self.file.layout
        if layout is not None and all(c.name != name for c in layout.columns):
            return f"{self.file.kind} files have no column {name}"
        return f"{self.file.name}: column {name} cannot be read"

    def float_columns(self) -> Iterator[BoundColumn]:
        for column in self.file.need_layout().columns:
            if column.dtype in FLOAT_DTYPES and column.name in self.arrays:
                yield column

    def scan(self, column: BoundColumn) -> Scan:
        """One pass over a float column."""
        return self._scans[column.name]

    @cached_property
    def _scans(self) -> dict[str, Scan]:
        """Of all float columns at once: numpy leaves the interpreter to the other threads."""
        columns = list(self.float_columns())
        with ThreadPoolExecutor(pa.cpu_count()) as pool:
            scans = pool.map(lambda c: scan_floats(self.arrays[c.name], c.dtype), columns)
            return {c.name: scan for c, scan in zip(columns, scans, strict=True)}

    def places(
        self,
        column: str,
        broken: BoolArray,
        *,
        found: Callable[[tuple[int, ...]], str],
        expected: str | Callable[[tuple[int, ...]], str],
    ) -> Iterator[Problem]:
        """One problem for each row in which `broken` is set anywhere.

        broken: bool [N, …]; found, expected: from an index into the flat arrays to text.
        """
        if not broken.any():
            return
        positions = np.argwhere(broken)  # in order, so a row's places are together
        rows, first, counts = np.unique(
            self.row_of[positions[:, 0]], return_index=True, return_counts=True
        )
        for row, at, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
            token, *rest = positions[at].tolist()
            flat = (token, *rest)
            yield Problem(
                file=self.file.name,
                row=self.row_ids[row],
                column=column,
                index=(token - int(self.starts[row]), *rest),
                found=found(flat),
                expected=expected if isinstance(expected, str) else expected(flat),
                places=count,
            )

    def row_problems(
        self, column: str, broken: BoolArray, *, found: Callable[[int], str], expected: str
    ) -> Iterator[Problem]:
        """One problem for each row r with broken[r]."""
        for row in np.flatnonzero(broken).tolist():
            yield Problem(
                file=self.file.name,
                row=self.row_ids[row],
                column=column,
                found=found(row),
                expected=expected,
            )


def scan_floats(values: npt.NDArray[np.float32], dtype: str) -> Scan:
    """values: float32 [N, …]; dtype: the logical dtype of the column."""
    vectors = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    flags = np.zeros((3, len(vectors)), dtype=np.bool_)
    step = max(1, SCAN_BYTES // (4 * vectors.shape[1]))
    with np.errstate(over="ignore", invalid="ignore"):
        _scan_blocks(vectors, flags, step, dtype)
    shape = values.shape[:-1] if values.ndim > 1 else values.shape
    return Scan(*(flag.reshape(shape) for flag in flags))


def _scan_blocks(vectors: npt.NDArray[np.float32], flags: BoolArray, step: int, dtype: str) -> None:
    """Set flags [3, N], those of a Scan, for vectors [N, C]."""
    for start in range(0, len(vectors), step):
        block = vectors[start : start + step]
        bits = block.view(np.uint32)
        seen = np.bitwise_or.reduce(bits, axis=1)
        # A sum of finite values may overflow, but one with NaN or infinity is never finite.
        # einsum adds three times as fast as sum, which rounds better: of no use here.
        suspects = np.flatnonzero(~np.isfinite(np.einsum("ij->i", block)))
        flags[0, start + suspects] = ~np.isfinite(block[suspects]).all(axis=1)
        flags[1, start : start + step] = (seen & 0x7FFFFFFF) == 0
        if dtype == "bfloat16":
            # A bfloat16 is the upper half of a float32.
            flags[2, start : start + step] = (seen & 0xFFFF) != 0
        elif dtype == "float16":
            flags[2, start : start + step] = _no_float16(block, bits, seen)


def _no_float16(
    block: npt.NDArray[np.float32], bits: npt.NDArray[np.uint32], seen: npt.NDArray[np.uint32]
) -> BoolArray:
    """Which of a block's finite vectors [N, C] hold a value that float16 has not.

    bits: the block's; seen: their OR per vector. A float16 has 11 significant bits, so the lower 13
    of its float32 are 0; that is all there is to check for the magnitudes of normal float16 values,
    2^-14 to 65504. Only the few others are rounded, 15 times as slow.
    """
    broken: BoolArray = (seen & 0x1FFF) != 0
    magnitude = bits & np.uint32(0x7FFFFFFF)
    magnitude -= np.uint32(0x38800000)  # 2^-14; what is smaller wraps around to the top
    odd = np.flatnonzero(magnitude > np.uint32(0x477FE000 - 0x38800000))
    values = block.reshape(-1)[odd]
    wrong = odd[(values.astype(np.float16).astype(np.float32) != values) & np.isfinite(values)]
    broken[wrong // block.shape[1]] = True
    return broken
