"""Shards and rollouts that were changed alike: the plan and the fingerprint give them away."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tampering import Row, Tampered, retarget

from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings
from pipeline.shards import file_sha256
from pipeline.validate import validate


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Tampered:
    return Tampered(tiny_run, tmp_path / "out")


@pytest.fixture(scope="module")
def given_run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("given")
    turns = [("user", "One"), ("assistant", "x y"), ("user", "Two"), ("assistant", "z")]
    row = {"id": "row-0", "messages": [{"role": r, "content": c} for r, c in turns]}
    (base / "prompts.jsonl").write_text(json.dumps(row))
    settings = Settings.check(
        target=str(tiny_llama_dir),
        prompts=str(base / "prompts.jsonl"),
        out=str(base / "out"),
        turns="given",
    )
    execute(settings, LocalWorker)
    return base / "out"


def first_answer(row: Row) -> tuple[int, int]:
    """The tokens [start, stop) of the first answer."""
    mask = row["loss_mask"]
    start = int(np.argmax(mask))
    return start, start + int(np.argmin(np.append(mask[start:], 0)))


def set_mask(at: int, value: int) -> Any:
    def change(row: Row) -> None:
        row["loss_mask"][at] = value
        retarget(row)

    return change


def test_a_changed_prompt_token_is_found_at_its_place(run: Tampered) -> None:
    old = int(run.rows("rollout-00000")[0]["input_ids"][3])

    def change(row: Row) -> None:
        row["input_ids"][3] = old ^ 1
        retarget(row)

    run.edit_row(change, rollout=True)
    found = [f for f in validate(run.out).findings if f.rule == "rows.prompt"]
    assert [(f.row, f.index, f.found, f.expected) for f in found] == [
        ("row-0", (3,), f"token {old ^ 1}", f"{old}, of the planned prompt")
    ]


@pytest.mark.parametrize("turn", [0, 1])
def test_a_supervised_header_is_found_in_any_turn(turn: int, run: Tampered) -> None:
    row = next(r for r in run.rows("rollout-00001") if r["sample_id"] == "turns")
    starts = np.flatnonzero(np.diff(row["loss_mask"].astype(int)) == 1) + 1
    assert len(starts) == 2
    run.edit_row(set_mask(starts[turn] - 1, 1), row="turns", rollout=True)
    (found,) = (f for f in validate(run.out).findings if f.rule == "rows.prompt")
    assert (found.row, found.index) == ("turns", (starts[turn] - 1,))
    assert found.found == "a supervised token of the prompt"


def test_an_answer_that_lost_its_first_token_is_found(run: Tampered) -> None:
    row = next(r for r in run.rows("rollout-00001") if r["sample_id"] == "turns")
    start, _ = first_answer(row)
    run.edit_row(set_mask(start, 0), row="turns", rollout=True)
    (found,) = (f for f in validate(run.out).findings if f.rule == "rows.prompt")
    assert (found.index, found.found) == ((start - 1,), "no supervised token after this prompt")


def test_a_conversation_that_lost_its_second_turn_is_found(run: Tampered) -> None:
    def cut(row: Row) -> None:
        _, stop = first_answer(row)
        row.update({k: v[:stop] for k, v in row.items() if isinstance(v, np.ndarray)})
        row.update(num_tokens=stop, finish_reason="stop")
        retarget(row)

    run.edit_row(cut, row="turns", rollout=True)
    found = [f for f in validate(run.out).findings if f.rule == "rows.prompt"]
    assert [(f.row, f.found) for f in found] == [("turns", "1 answers")]


def test_unsupervised_tokens_after_the_last_answer_are_found(run: Tampered) -> None:
    row = run.rows("rollout-00000")[0]
    run.edit_row(set_mask(row["num_tokens"] - 1, 0), rollout=True)
    (found,) = (f for f in validate(run.out).findings if f.rule == "rows.prompt")
    assert (found.index, found.expected) == (
        (row["num_tokens"] - 1,),
        "the row's end, after its last answer",
    )


def test_a_row_under_another_source_is_found(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(source="elsewhere:1"), rollout=True)
    (found,) = validate(run.out).findings
    assert (found.rule, found.column, found.found) == ("rows.prompt", "source", "elsewhere:1")


def test_given_answers_are_compared_with_the_plan(given_run: Path, tmp_path: Path) -> None:
    assert validate(given_run).ok
    run = Tampered(given_run, tmp_path / "out")
    start, _ = first_answer(run.rows("rollout-00000")[0])
    run.edit_row(set_mask(start - 1, 1), rollout=True)
    (found,) = validate(run.out).findings
    assert (found.rule, found.index, found.found) == ("rows.prompt", (start - 1,), "loss_mask 1")


def test_a_planned_token_that_changed_is_found_by_the_digest_or_the_rollout(run: Tampered) -> None:
    rows, before = run.plan_rows(0), run.json("plan/plan.json")
    record = run.commit("rollout-00000")
    rows[0]["segments"][0][1] ^= 1
    run.write_plan(0, rows)
    assert run.fired() == {"rows.prompt"}
    (run.out / "plan/plan.json").write_text(json.dumps(before))
    run.record("rollout-00000", inputs_sha256=record["inputs_sha256"])
    assert run.fired() == {"plan.files", "rows.prompt"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", {"name": "x", "kind": "hf", "sha256": "0" * 64}),
        ("scored_by", "llamacpp"),
        ("generated_by", "endpoint"),
        ("sampling", {"max_new_tokens": 96, "temperature": 0.0, "top_p": 1.0, "top_k": 0}),
        ("bytes_per_token", 1),
    ],
)
def test_what_the_manifest_says_is_what_the_fingerprint_covers(
    key: str, value: Any, run: Tampered
) -> None:
    run.edit_json("manifest.json", **{key: value})
    found = [(f.rule, f.column) for f in validate(run.out).findings]
    wanted = "target.sha256" if key == "target" else key
    assert found == [("manifest.settings", wanted)]


def test_a_setting_that_does_not_change_bytes_may_differ(run: Tampered) -> None:
    settings = run.json("manifest.json")["settings"]
    run.edit_json("manifest.json", settings={**settings, "workers": 9})
    assert validate(run.out).ok
    run.edit_json("manifest.json", settings={**settings, "dtype": "float16"})
    assert [f.column for f in validate(run.out).findings] == ["settings.dtype"]


@pytest.mark.parametrize("name", ["plan.json", "part-00001.parquet", "shards.json"])
def test_a_plan_that_lost_a_file(name: str, run: Tampered) -> None:
    (run.out / "plan" / name).unlink()
    wanted = {"plan.inputs"} if name == "shards.json" else {"plan.files"}
    assert wanted <= run.fired() <= {*wanted, "rows.plan"}


def test_a_reject_that_the_plan_does_not_have(run: Tampered) -> None:
    path = run.out / "rejects.jsonl"
    path.write_text(path.read_text().replace("empty", "other", 1))
    assert run.fired() == {"manifest.rejects"}


def test_an_invented_reject_is_found_though_all_numbers_agree(run: Tampered) -> None:
    """A row that was removed, called rejected."""
    reject = {"source": "x:1", "sample_id": "row-9", "reason": "bad_json", "detail": "d"}
    with (run.out / "rejects.jsonl").open("a") as file:
        file.write(json.dumps(reject) + "\n")
    manifest = run.json("manifest.json")
    rejected = {**manifest["rejected"], "bad_json": manifest["rejected"]["bad_json"] + 1}
    run.edit_json("manifest.json", rejected=rejected, rows_in=manifest["rows_in"] + 1)
    (found,) = validate(run.out).findings
    assert (found.rule, found.row, found.found) == (
        "manifest.rejects",
        "row-9",
        "1 rejects of no record",
    )


def test_rejects_of_the_plan_are_counted(run: Tampered) -> None:
    run.edit_json("plan/plan.json", rejected={"bad_json": 7})
    (found,) = validate(run.out).findings
    assert (found.rule, found.file) == ("plan.files", "plan/rejects.jsonl")


def test_a_part_with_other_columns_is_no_plan(run: Tampered) -> None:
    path = run.out / "plan" / "part-00000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.append_column("more", pa.nulls(len(table))), path)
    parts = run.json("plan/plan.json")["parts"]
    parts[0] |= {"sha256": file_sha256(path), "bytes": path.stat().st_size}
    run.edit_json("plan/plan.json", parts=parts)
    run.record("rollout-00000", inputs_sha256=parts[0]["sha256"])
    (found,) = validate(run.out).findings
    assert (found.rule, found.file) == ("plan.files", "plan/part-00000.parquet")


def test_a_copy_without_the_plan_says_what_it_could_not_check(run: Tampered) -> None:
    shutil.rmtree(run.out / "plan")
    report = validate(run.out)
    assert report.ok
    skipped = {r.id for r in report.rules if r.status == "skipped"}
    assert {"plan.files", "plan.inputs", "rows.plan", "rows.prompt"} <= skipped
