"""Rows to measure with; numpy alone, since jobs/bench_gpu.py uses them too."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]


def random_rows(vocab_size: int, lengths: Sequence[int]) -> list[Row]:
    """Rollout rows of random ids; the second half of each is supervised."""
    random = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(lengths):
        mask = np.zeros(length, np.uint8)
        mask[length // 2 :] = 1
        rows.append(
            {
                "sample_id": f"row-{number}",
                "source": "bench:1",
                "num_tokens": length,
                "finish_reason": "length",
                "degenerate": 0,
                "on_policy": 1,
                "input_ids": random.integers(5, vocab_size, length).astype(np.int32),
                "loss_mask": mask,
            }
        )
    return rows
