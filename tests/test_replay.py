"""Replay: stored rows again through the target model; a changed value, token or model is found."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from run_files import settings_of
from tampering import Tampered, retarget

from pipeline.console import print_report
from pipeline.errors import PipelineError
from pipeline.validate import Replay, validate

ALL = 100  # rows: more than there are


def replay(run: Path, target: str, rows: int = ALL) -> Any:
    return validate(run, replay=Replay(rows, target))


def test_untouched_rows_come_out_equal_to_the_bit(nano_run: Path) -> None:
    """On the machine that made them; greedy tokens are the arg-max but for rounding."""
    report = replay(nano_run, "gemma4-nano")
    assert report.ok, [f.message for f in report.findings]
    columns = {name: worst.error for name, worst in report.replay.items()}
    assert columns.pop("greedy input_ids") < 1
    assert set(columns) >= {"final_hidden", "sliding_key", "full_value", "teacher_top_logprobs"}
    assert set(columns.values()) == {0.0}
    by_id = {rule.id: rule for rule in report.rules}
    assert by_id["replay.columns"].checked == by_id["replay.greedy"].checked == 12


def test_sampled_rows_are_replayed_but_not_called_greedy(tiny_run: Path) -> None:
    report = replay(tiny_run, settings_of(tiny_run).target)
    assert report.ok
    by_id = {rule.id: rule for rule in report.rules}
    assert (by_id["replay.columns"].checked, by_id["replay.greedy"].status) == (7, "skipped")


@pytest.mark.parametrize("column", ["sliding_key", "full_key", "final_hidden"])
def test_one_changed_value_is_found_where_bytes_alone_say_nothing(
    column: str, nano_run: Path, tmp_path: Path
) -> None:
    run = Tampered(nano_run, tmp_path / "out")
    name = run.rows("train-00000")[3]["sample_id"]

    def change(row: Any) -> None:
        values = row[column]
        at = (5, *(size // 2 for size in values.shape[1:]))
        # A bfloat16, and float16; small, or the length of a K vector alone gives it away.
        values[at] = 0.5 if values[at] != 0.5 else 0.25

    run.edit_row(change, row=name)
    assert not [f for f in validate(run.out).findings if "replay" not in f.rule]
    report = replay(run.out, "gemma4-nano")
    found = [f for f in report.findings if f.rule == "replay.columns"]
    assert [(f.row, f.column, f.index[0], f.places) for f in found if f.index] == [
        (name, column, 5, 1)
    ]


def test_a_token_the_model_would_not_have_picked_is_found(nano_run: Path, tmp_path: Path) -> None:
    run = Tampered(nano_run, tmp_path / "out")
    row = next(r for r in run.rows("train-00000") if r["loss_mask"].sum() > 4)
    at = int(np.flatnonzero(row["loss_mask"])[2])

    def change(row: Any) -> None:
        row["input_ids"][at] = 1999
        retarget(row)

    run.edit_row(change, row=row["sample_id"], rollout=True)
    report = replay(run.out, "gemma4-nano")
    greedy = [f for f in report.findings if f.rule == "replay.greedy"]
    assert [(f.row, f.index) for f in greedy] == [(row["sample_id"], (at,))]


def test_another_target_model_is_refused(nano_run: Path, tiny_llama_dir: Path) -> None:
    with pytest.raises(PipelineError, match="its sha256 is not"):
        replay(nano_run, str(tiny_llama_dir))


def test_the_same_seed_draws_the_same_rows(nano_run: Path) -> None:
    one, again, other = (
        validate(nano_run, replay=Replay(3, "gemma4-nano", seed)) for seed in (1, 1, 2)
    )
    assert one.drawn == again.drawn and len(one.drawn) == 3
    assert set(one.drawn) != set(other.drawn)
    assert (one.replay_seed, other.replay_seed) == (1, 2)


def test_batch_mates_of_a_drawn_row_are_compared_too(nano_run: Path, tmp_path: Path) -> None:
    """They were computed anyway; only the pass that checks greedy tokens is a row's own."""
    (drawn,) = replay(nano_run, "gemma4-nano", rows=1).drawn
    run = Tampered(nano_run, tmp_path / "out")
    mate = next(r["sample_id"] for r in run.rows("train-00000") if r["sample_id"] != drawn)
    run.edit_row(lambda row: row["full_value"].__setitem__((2, 0, 1), 4.0), row=mate)
    report = replay(run.out, "gemma4-nano", rows=1)
    assert report.drawn == (drawn,)
    found = [(f.row, f.column, f.index) for f in report.findings if f.rule == "replay.columns"]
    assert found == [(mate, "full_value", (2, 0, 1))]
    by_id = {rule.id: rule for rule in report.rules}
    assert (by_id["replay.columns"].checked, by_id["replay.greedy"].checked) == (12, 1)


def test_the_report_says_which_rows_were_drawn_and_how_many_were_not(tiny_run: Path) -> None:
    report = replay(tiny_run, settings_of(tiny_run).target, rows=1)
    compared = {rule.id: rule.checked for rule in report.rules}["replay.columns"]
    assert 1 <= compared < report.rows == 7  # the other shard's rows are in other micro-batches
    console = Console(record=True, width=500, file=io.StringIO())
    print_report(console, report, show_all=False)
    (line,) = (text for text in console.export_text().splitlines() if "Replayed" in text)
    assert line == (
        f"Replayed {compared} rows: 1 drawn by --seed 0 ({report.drawn[0]}) and those in their "
        f"micro-batches; {7 - compared} rows were not: another --seed draws others, --replay 7 "
        "takes all"
    )
    whole = replay(tiny_run, settings_of(tiny_run).target)
    assert len(whole.drawn) == 7
    print_report(console, whole, show_all=False)
    assert "rows were not" not in console.export_text()
