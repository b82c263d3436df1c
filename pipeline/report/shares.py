"""What a part of a run comes to, and how far its text can be drafted at most."""

from dataclasses import dataclass, field

import numpy as np

from pipeline.report.counts import FloatArray, IntArray
from pipeline.validate.group import BoolArray

# Depths of the acceptance bound; block drafters draft more tokens than a run has targets.
DEPTHS = 8


@dataclass(kw_only=True)
class Share:
    """What one source or one script makes of a run.

    disk_bytes: a row group's compressed bytes shared out by tokens. product_sums, starts:
    [DEPTHS], of the k-step products of top-1 mass and of the positions they start from.
    """

    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    disk_bytes: float = 0.0
    product_sums: FloatArray = field(default_factory=lambda: np.zeros(DEPTHS))
    starts: IntArray = field(default_factory=lambda: np.zeros(DEPTHS, dtype=np.int64))

    def __add__(self, other: "Share") -> "Share":
        return Share(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    @property
    def acceptance(self) -> list[float | None]:
        """By depth k - 1: the mean over positions of the product of top-1 mass over k steps."""
        return [
            float(total / count) if count else None
            for total, count in zip(self.product_sums, self.starts, strict=True)
        ]

    def expected_length(self, depth: int) -> float | None:
        """Tokens a verification step yields at most: 1 + the acceptance at depths 1 to `depth`."""
        known = [value for value in self.acceptance[:depth] if value is not None]
        return 1 + sum(known) if known else None


def products(
    top1: FloatArray, mask: BoolArray, row_of: IntArray, rows: int
) -> tuple[FloatArray, IntArray]:
    """For each row and depth k the sum of the k-step products of top-1 mass, and their number.

    top1: float64 [N], of teacher row t; returns [rows, DEPTHS] each. A product starts at t if the
    tokens t+1 to t+k are all supervised and of t's row; it multiplies teacher rows t to t+k-1.
    """
    sums, counts = np.zeros((rows, DEPTHS)), np.zeros((rows, DEPTHS), dtype=np.int64)
    at, product = np.arange(len(top1)), np.ones(len(top1))
    for k in range(1, DEPTHS + 1):
        inside = at + k < len(top1)
        at, product = at[inside], product[inside]
        goes_on = mask[at + k] & (row_of[at + k] == row_of[at])
        at, product = at[goes_on], product[goes_on] * top1[at[goes_on] + k - 1]
        sums[:, k - 1] = np.bincount(row_of[at], weights=product, minlength=rows)
        counts[:, k - 1] = np.bincount(row_of[at], minlength=rows)
    return sums, counts
