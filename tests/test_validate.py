"""The validator: a clean run has no finding, and each rule finds its own corruption alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corruptions_rows import CORRUPTIONS, flip_a_byte
from tampering import Row, Tampered

from pipeline.errors import PipelineError
from pipeline.validate import RULES, rules_format, validate


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Tampered:
    return Tampered(tiny_run, tmp_path / "out")


def test_a_clean_run_has_no_finding_and_only_gemma4s_rules_are_skipped(tiny_run: Path) -> None:
    report = validate(tiny_run)
    assert report.findings == () and report.ok
    skipped = [r.id for r in report.rules if r.status == "skipped"]
    assert skipped == ["kv.value_norm", "kv.key_norm", "teacher.softcap"]
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    assert (report.rows, report.tokens) == (manifest["rows_out"], manifest["tokens"])
    assert report.files == len(manifest["shards"]) + len(manifest["rollouts"]) == 4
    finishes = {row for f in tiny_run.glob("data/*") for row in finish_reasons(f)}
    assert finishes == {"stop", "length"}  # or some rules would have had nothing to check


def finish_reasons(path: Path) -> list[str]:
    return list(pq.read_table(path, columns=["finish_reason"])["finish_reason"].to_pylist())


def test_every_rule_has_a_corruption() -> None:
    tested = {*CORRUPTIONS, "encoding.row_group", "kv.value_norm", "kv.key_norm"}
    assert sorted(tested) == sorted(rule.id for rule in RULES)
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", CORRUPTIONS)
def test_exactly_this_rule_finds_its_corruption(rule: str, run: Tampered) -> None:
    CORRUPTIONS[rule](run)
    report = validate(run.out)
    assert {f.rule for f in report.findings} == {rule}
    assert [r.id for r in report.rules if r.status == "fail"] == [rule]
    for finding in report.findings:
        assert finding.message and "\n" not in finding.message
        assert finding.found and finding.expected
    json.dumps(report.as_dict(), allow_nan=False)


def test_a_row_group_over_the_limit(run: Tampered, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules_format.ROW_GROUP_LIMIT == 256 * 2**20
    monkeypatch.setattr(rules_format, "ROW_GROUP_LIMIT", 2**19)
    found = validate(run.out).findings
    assert {(f.rule, f.file) for f in found} == {
        ("encoding.row_group", run.commit(name)["file"]) for name in ("train-00000", "train-00001")
    }
    monkeypatch.undo()
    run.write("train-00001", run.rows("train-00001")[:1])
    monkeypatch.setattr(rules_format, "ROW_GROUP_LIMIT", 1)
    files = {f.file for f in validate(run.out).findings if f.rule == "encoding.row_group"}
    assert run.commit("train-00001")["file"] not in files  # a single row may be of any size


# Where a finding points, and further forms of the corruptions.


def test_a_finding_names_file_row_column_index_and_both_values(run: Tampered) -> None:
    run.edit_row(lambda row: row["target_ids"].__setitem__((4, 1), 7))
    (finding,) = validate(run.out).findings
    expected = run.rows("train-00000")[0]["input_ids"][6]
    assert finding.file == run.commit("train-00000")["file"]
    assert (finding.row, finding.column, finding.index) == ("row-0", "target_ids", (4, 1))
    assert (finding.found, finding.places) == ("7", 1)
    assert finding.expected == f"{expected}, token t+2 of the row"
    assert finding.message == (
        f"{finding.file}: row row-0: target_ids[4, 1]: 7; expected {expected}, token t+2 of the row"
    )


def test_all_findings_are_listed_one_for_each_row_and_column(run: Tampered) -> None:
    for row in ("row-0", "row-1", "turns"):
        run.edit_row(lambda row: row["final_hidden"].__setitem__(slice(2, 5), np.inf), row=row)
    findings = validate(run.out).findings
    assert [(f.rule, f.row, f.index, f.places) for f in findings] == [
        ("numbers.finite", "row-0", (2,), 3),
        ("numbers.finite", "row-1", (2,), 3),
        ("numbers.finite", "turns", (2,), 3),
    ]


def test_num_tokens_alone_wrong_is_one_finding(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(num_tokens=row["num_tokens"] + 1))
    (finding,) = validate(run.out).findings
    assert (finding.rule, finding.column) == ("rows.num_tokens", "num_tokens")


def test_a_row_whose_columns_disagree_does_not_hide_trouble_in_other_rows(run: Tampered) -> None:
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.1), row="row-2")
    run.edit_column("train-00000", "token_logprobs", lambda rows: rows[0].pop())
    found = {(f.rule, f.row) for f in validate(run.out).findings}
    assert found == {("rows.num_tokens", "row-0"), ("teacher.mass", "row-2")}


def test_a_flipped_bit_fails_the_hash_and_names_the_column(run: Tampered) -> None:
    old = run.json("commits/train-00000.json")
    flip_a_byte(run, "train-00000", "final_hidden.list.element.list.element")
    run.record("train-00000", sha256=old["sha256"])
    findings = {f.rule: f for f in validate(run.out).findings}
    assert findings.keys() == {"files.sha256", "files.name", "parquet.pages"}
    assert findings["parquet.pages"].column == "final_hidden"


def test_a_dropped_row_and_a_foreign_row_are_named(run: Tampered) -> None:
    rows = run.rows("train-00000")
    rows[1]["sample_id"] = "foreign"
    run.write("train-00000", rows)
    found = [(f.rule, f.row, f.found) for f in validate(run.out).findings]
    assert found == [
        ("rows.order", "row-1", "in no shard and not rejected"),
        ("rows.order", "foreign", "in no rollout, or rejected"),
        ("positions.drawn", "foreign", str(rows[1]["position_offset"])),
    ]


def test_a_row_rejected_in_extraction_is_no_missing_row(run: Tampered) -> None:
    rows = run.rows("train-00000")
    reject = {"source": "x:1", "sample_id": "row-1", "reason": "non_finite", "detail": "d"}
    run.write("train-00000", [row for row in rows if row["sample_id"] != "row-1"])
    run.edit_json("commits/train-00000.json", rejects=[reject])
    rejected = run.json("manifest.json")["rejected"]
    run.edit_json("manifest.json", rejected={**rejected, "non_finite": 1})
    assert run.fired() == {"manifest.rejects"}
    with (run.out / "rejects.jsonl").open("a") as file:
        file.write(json.dumps(reject) + "\n")
    assert run.fired() == set()


@pytest.mark.parametrize("offset", [-1, 1024])
def test_an_offset_outside_the_context(run: Tampered, offset: int) -> None:
    run.edit_row(lambda row: row.update(position_offset=offset))
    assert run.fired() == {"positions.context"}


def test_a_target_that_reaches_into_the_next_row_is_found(run: Tampered) -> None:
    rows = run.rows("train-00000")
    rows[0]["target_ids"][-1, 0] = rows[1]["input_ids"][0]
    run.write("train-00000", rows)
    (finding,) = validate(run.out).findings
    assert (finding.rule, finding.index) == ("targets.ids", (rows[0]["num_tokens"] - 1, 0))


def test_a_target_across_a_user_turn_is_found(run: Tampered) -> None:
    def reach_over(row: Row) -> None:
        mask = row["loss_mask"]
        end = int(np.flatnonzero(mask[:-1] > mask[1:])[0])  # last token of the first answer
        second = end + 1 + int(np.argmax(mask[end + 1 :]))
        assert second - end > 3
        row["target_mask"][second - 2, 1] = 1  # x_{t+1} is the header's last token

    run.edit_row(reach_over, row="turns")
    assert run.fired() == {"targets.mask"}


def test_a_column_dropped_swapped_or_of_another_type(run: Tampered) -> None:
    table = pq.read_table(run.path("train-00000"))
    names = table.schema.names
    run.write_table("train-00000", table.select([*names[:-2], names[-1], names[-2]]))
    assert run.fired() == {"schema.arrow"}
    run.write_table("train-00000", table.drop_columns(["token_logprobs"]))
    report = validate(run.out)
    assert {f.rule for f in report.findings} == {"schema.arrow"}
    at = names.index("num_tokens")
    wide = table["num_tokens"].cast(pa.int64())
    field = table.schema.field(at).with_type(pa.int64())
    run.write_table("train-00000", table.set_column(at, field, wide))
    (finding,) = validate(run.out).findings
    assert (finding.column, finding.found, finding.expected) == ("num_tokens", "int64", "int32")


def test_without_commits_the_manifest_serves_as_the_record(run: Tampered) -> None:
    for path in (run.out / "commits").iterdir():
        path.unlink()
    (run.out / "commits").rmdir()
    report = validate(run.out)
    assert report.ok and report.files == 4
    skipped = {r.id: r.not_checked for r in report.rules if r.status == "skipped"}
    assert skipped.keys() == {
        "manifest.commits",
        "commits.readable",
        "kv.value_norm",
        "kv.key_norm",
        "teacher.softcap",
    }
    assert skipped["manifest.commits"] == ("the directory has no commits/",)


def test_out_data_is_the_run_and_loose_shards_are_checked_by_their_footers(
    run: Tampered, tmp_path: Path
) -> None:
    assert validate(run.out / "data").files == 4
    loose = tmp_path / "loose"
    loose.mkdir()
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.1))
    for i in (0, 1):
        path = run.path(f"train-0000{i}")
        (loose / path.name).write_bytes(path.read_bytes())
    report = validate(loose)
    assert {f.rule for f in report.findings} == {"teacher.mass"}
    status = {r.id: r.status for r in report.rules}
    assert status["files.sha256"] == status["rows.order"] == status["masks.terminator"] == "skipped"
    assert status["targets.mask"] == status["rows.unique"] == status["schema.arrow"] == "pass"


def test_what_is_no_run_cannot_be_validated(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="holds no manifest"):
        validate(tmp_path)
    with pytest.raises(PipelineError, match="no such directory"):
        validate(tmp_path / "nowhere")


def test_progress_ends_at_all_bytes_and_never_falls(tiny_run: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = validate(tiny_run, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (report.bytes, report.bytes)
    assert seen == sorted(seen)


def test_validation_needs_no_torch(tiny_run: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.validate import validate; "
        f"assert validate(Path({str(tiny_run)!r})).ok; "
        "print(sorted({'torch', 'transformers', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_gemma4s_values_have_rms_1_and_swapped_keys_are_found(
    nano_run: Path, tmp_path: Path
) -> None:
    clean = validate(nano_run)
    assert clean.ok and all(rule.status == "pass" for rule in clean.rules)
    run = Tampered(nano_run, tmp_path / "out")
    name = run.rows("train-00000")[0]["sample_id"]

    def swap(row: Row) -> None:
        row["sliding_key"], row["sliding_value"] = row["sliding_value"], row["sliding_key"]

    run.edit_row(swap, row=name)
    found = validate(run.out).findings
    assert [(f.rule, f.row, f.column) for f in found] == [
        ("kv.value_norm", name, "sliding_value"),
        ("kv.key_norm", name, "sliding_key"),
    ]


def test_a_key_that_k_norm_cannot_give_is_found(nano_run: Path, tmp_path: Path) -> None:
    """gemma4-nano has trained norms, so its bounds are narrower than any wrong tensor's range."""
    run = Tampered(nano_run, tmp_path / "out")
    name = run.rows("train-00000")[0]["sample_id"]
    geometry = json.loads((run.out / "manifest.json").read_text())["geometry"]
    low, high = geometry["shared_kv"]["full"]["key_norm"]
    assert 0 < low < high

    def grow(row: Row) -> None:
        row["full_key"][5, 0] *= 16.0  # exact in bfloat16

    run.edit_row(grow, row=name)
    (finding,) = validate(run.out).findings
    assert (finding.rule, finding.column, finding.index) == ("kv.key_norm", "full_key", (5, 0))
    assert finding.expected == f"length {low:.3f} to {high:.3f}, as k_norm's weights allow"


def test_any_number_of_processes_gives_the_same_report(tiny_run: Path, tmp_path: Path) -> None:
    """Findings in the same order, of files that are read by different processes."""
    run = Tampered(tiny_run, tmp_path / "out")
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.1))
    run.edit_row(lambda row: row["final_hidden"].__setitem__(0, np.nan), row="turns")
    one, three = (validate(run.out, processes=n).as_dict() for n in (1, 3))
    assert len(one["findings"]) >= 2
    assert {**one, "seconds": 0} == {**three, "seconds": 0}


def test_quick_reads_no_row_and_still_finds_a_flipped_bit(tiny_run: Path, tmp_path: Path) -> None:
    clean = validate(tiny_run, quick=True)
    assert clean.ok and clean.rows == 0
    by_id = {rule.id: rule for rule in clean.rules}
    assert by_id["files.sha256"].checked == 4 and by_id["footer.fingerprint"].checked == 4
    assert by_id["teacher.mass"].not_checked == ("--quick reads no rows",)
    run = Tampered(tiny_run, tmp_path / "out")
    content = bytearray(run.path("train-00001").read_bytes())
    content[500] ^= 1
    run.path("train-00001").write_bytes(content)
    found = validate(run.out, quick=True).findings
    assert [(f.rule, f.file) for f in found] == [
        ("files.sha256", run.path("train-00001").relative_to(run.out).as_posix())
    ]


@pytest.mark.parametrize("missing", ["train-00000", "train-00001", "rollout-00000"])
def test_a_partly_downloaded_copy(missing: str, tiny_run: Path, tmp_path: Path) -> None:
    """What is there is checked in full; what is not is one finding, or none if allowed."""
    run = Tampered(tiny_run, tmp_path / "out")
    run.path(missing).unlink()
    assert "files.missing" in run.fired()
    report = validate(run.out, allow_missing=True)
    assert report.ok, [f.message for f in report.findings]
    by_id = {rule.id: rule for rule in report.rules}
    assert by_id["files.missing"].not_checked == ("1 files are not here (--allow-missing)",)
    left = next(n for n in ("train-00000", "train-00001") if n != missing)
    run.write(left, [{**row, "on_policy": 0} for row in run.rows(left)])
    found = {f.rule for f in validate(run.out, allow_missing=True).findings}
    assert "rows.on_policy" in found


def test_the_page_of_rules_is_the_code() -> None:
    """Written by `python -m pipeline.validate.document > docs/validation.md`."""
    from pipeline.validate.document import WHY, document

    page = Path(__file__).parent.parent / "docs" / "validation.md"
    assert page.read_text() == document()
    assert all(f"## {group}\n" in document() for group in WHY)
