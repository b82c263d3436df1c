"""docs/e4b.md: its sizes again, by the forecast's own code from the geometry of E4B."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.forecast import Probe, forecast
from pipeline.geometry import feature_layout
from pipeline.inspect_run import inspect_run
from pipeline.layers import choose_layers
from pipeline.schema import Layout
from pipeline.settings import Settings
from pipeline.validate.bench import E4B

PAGE = (Path(__file__).parent.parent / "docs" / "e4b.md").read_text()
ROWS, PROMPT, ANSWER = 100_000, 200, 400
SETS = ("mtp", "mtp,dspark,eagle3")


def layout_of(features: str) -> Layout:
    sets = features.split(",")
    layers = choose_layers(sets, [], num_layers=E4B.num_layers, architecture=E4B.architecture)
    return feature_layout(E4B, sets, top_k=64, depth=3, layers=layers)


def assumed() -> tuple[float, int]:
    """(how much smaller states get, bytes a token of all other columns), as the page says."""
    found = re.search(r"shrink to 1/([\d.]+) and all other columns take (\d+) bytes", PAGE)
    assert found
    return float(found[1]), int(found[2])


def states_of(layout: Layout) -> int:
    return sum(c.bytes_per_token for c in layout.columns if c.dtype in ("bfloat16", "float16"))


def forecast_of(features: str) -> dict[str, Any]:
    """`--dry-run`'s own sum, with a probe of one row that compresses as the page assumes."""
    layout = layout_of(features)
    ratio, rest = assumed()
    tokens = PROMPT + ANSWER
    probe = Probe(
        rows=1,
        tokens=tokens,
        generated=ANSWER,
        rollout_seconds=0.0,
        rollout_bytes=0,
        feature_seconds=0.0,
        feature_bytes=round(tokens * (states_of(layout) / ratio + rest)),
        memory=0,
        gpu_memory=0,
    )
    plan = SimpleNamespace(rows=ROWS, prompt_tokens=ROWS * PROMPT, rejected={}, parts=())
    settings = Settings.check(target="t", prompts="p", out="o", features=features)
    run: Any = SimpleNamespace(plan=plan, spec=SimpleNamespace(layout=layout), settings=settings)
    return forecast(run, probe, workers=1, free=None)


@pytest.mark.parametrize("features", SETS)
def test_the_table_of_a_run_is_what_the_forecast_adds_up(features: str) -> None:
    told = forecast_of(features)
    assert told["tokens"] == 60_000_000 and f"{told['tokens']:,} tokens" in PAGE
    logical = told["tokens"] * told["bytes_per_token"] / 1e9
    line = (
        f"| `{features}` | {logical:,.1f} GB | {told['shards']:,} | {told['bytes'] / 1e9:,.0f} GB |"
    )
    assert line in PAGE


def test_bytes_of_a_token_are_those_of_the_columns() -> None:
    every = {c.name: c.bytes_per_token for c in layout_of(SETS[1]).columns}
    blocks = [name for name in every if name.startswith("block_")]
    groups = {
        "final_hidden": ["final_hidden"],
        "sliding_key/value": ["sliding_key", "sliding_value"],
        "full_key/value": ["full_key", "full_value"],
        "64 teacher": [
            "teacher_top_ids",
            "teacher_top_logprobs",
            "teacher_tail_mass",
            "token_logprobs",
        ],
        "ids, mask, targets": ["input_ids", "loss_mask", "target_ids", "target_mask"],
        "six block outputs": blocks,
    }
    assert sorted(n for g in groups.values() for n in g) == sorted(n for n, b in every.items() if b)
    for words, names in groups.items():
        (line,) = [ln for ln in PAGE.splitlines() if ln.startswith("| ") and words in ln[:24]]
        assert line.endswith(f"| {sum(every[name] for name in names):,} |"), words
    numbers = ", ".join(name.split("_")[1] for name in blocks)
    assert f"six block outputs ({numbers})" in PAGE
    for features in SETS:
        assert (
            f"| **`--features {features}`** | **{layout_of(features).bytes_per_token:,}** |" in PAGE
        )


def test_the_assumed_compression_is_that_of_gemma4_nano(nano_run: Path) -> None:
    found = inspect_run(nano_run)
    states = [c for c in found.columns if c.dtype == "bfloat16"]
    ratio = sum(c.logical_bytes for c in states) / sum(c.disk_bytes for c in states)
    rest = sum(c.disk_bytes for c in found.columns if c.dtype != "bfloat16") / found.tokens
    assert assumed() == (pytest.approx(ratio, rel=0.01), pytest.approx(rest, rel=0.03))
