"""The bench's parts on gemma4-nano: what is deterministic of them has the right value."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.bench import model, storage
from pipeline.bench.rows import random_rows
from pipeline.bench.timing import Line, medians
from pipeline.geometry import feature_layout


@pytest.fixture(scope="module")
def loaded() -> Any:
    return model.load("gemma4-nano", "transformers", max_length=512, threads=1)


def test_medians_run_the_ways_in_turn_and_leave_the_warm_up_out() -> None:
    calls: list[str] = []
    ticks = iter([0, 100, 0, 1, 0, 7, 0, 3, 0, 9, 0, 2, 0, 8])  # warm-ups are begun only
    took = medians(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        3,
        clock=lambda: next(ticks),
    )
    assert calls == ["a", "b"] * 4
    assert took == {"a": 2, "b": 8}
    assert Line("x", 3.0, 2.0, "s").ratio == 1.5


def test_sizes_are_of_the_same_values(loaded: Any, tmp_path: Path) -> None:
    layout = feature_layout(loaded.geometry, ["mtp"], top_k=64, depth=3)
    rows = random_rows(loaded.geometry.vocab_size, [24, 40])
    done = storage.features_of(loaded, layout, rows)
    assert [row["num_tokens"] for row in done] == [24, 40]
    footer = model.footer_of(loaded, layout, "mtp", {})
    lines = storage.encoding(done, layout, footer, tmp_path, 1)
    by_name = {line.unit: line for line in lines if "size" in line.what}
    raw = by_name["MB over raw values"]
    assert raw.theirs == pytest.approx(64 * layout.bytes_per_token / 1e6)
    assert raw.ours == (tmp_path / "ours.parquet").stat().st_size / 1e6
    # safetensors holds the bits of the logical dtypes and a header: no less than the raw values'.
    held = by_name["MB over safetensors"].theirs
    assert 0.95 * raw.theirs < held < 1.2 * raw.theirs


def test_extraction_has_a_line(loaded: Any, tmp_path: Path) -> None:
    line = model.extraction(loaded, "mtp", [24, 40], tmp_path, budget=4096, repeats=1)
    assert line.ours > 0 and line.theirs > 0 and line.bar
    assert "2 rows of 24-40" in line.what
