"""The command line as its users meet it: exit codes, streams, JSON, start without torch."""

import io
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from run_files import data_files, options_of, settings_of, shard_rows
from tampering import Tampered
from typer.testing import CliRunner

import pipeline.validate
from pipeline.cli import app
from pipeline.console import FINDINGS_SHOWN, print_report, sparkline
from pipeline.errors import PipelineError
from pipeline.inspect_run import SPREAD_BINS, Spread, inspect_run, teacher_entropy
from pipeline.schema import load_schema
from pipeline.shards import read_rows
from pipeline.validate import validate

ENV = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}


def run_cli(*args: str, env: dict[str, str] = ENV) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def invoke(*args: str) -> Any:
    return CliRunner().invoke(app, [*args], env=ENV)


@pytest.fixture
def broken(tiny_run: Path, tmp_path: Path) -> Tampered:
    run = Tampered(tiny_run, tmp_path / "out")
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.1))
    return run


def test_validate_exits_0_clean_and_1_with_findings(tiny_run: Path, broken: Tampered) -> None:
    clean = invoke("validate", str(tiny_run))
    assert clean.exit_code == 0
    assert "0 findings." in clean.output
    found = invoke("validate", str(broken.out))
    assert found.exit_code == 1
    assert "row row-0: teacher_tail_mass[0]:" in found.output


def test_what_cannot_run_exits_2_with_one_line_on_stderr(tmp_path: Path) -> None:
    for command in ("validate", "inspect"):
        done = run_cli(command, str(tmp_path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"error: {tmp_path}: holds no manifest.json")
        assert done.stderr.count("\n") == 1
    assert isinstance(invoke("schema", "nope").exception, PipelineError)
    assert invoke("validate").exit_code == 2


def test_json_goes_to_stdout_alone_and_says_the_same(tiny_run: Path, broken: Tampered) -> None:
    done = run_cli("validate", str(broken.out), "--json")
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout, parse_constant=pytest.fail)
    assert report["ok"] is False
    assert [f["rule"] for f in report["findings"]] == ["teacher.mass"]
    assert report["findings"][0]["row"] == "row-0"
    assert report["findings"][0]["index"] == [0]
    by_id = {rule["id"]: rule["status"] for rule in report["rules"]}
    assert by_id["teacher.mass"] == "fail"
    assert by_id["teacher.softcap"] == "skipped"
    assert by_id["targets.ids"] == "pass"
    inspected = json.loads(invoke("inspect", str(tiny_run), "--json").stdout)
    assert inspected["rows"] == 7


def test_a_hostile_id_neither_styles_the_terminal_nor_breaks_the_json(broken: Tampered) -> None:
    hostile = "[red]x[/]\x1b[2J\n" + "a" * 5000
    broken.edit_row(lambda row: row.update(sample_id=hostile))
    shown = invoke("validate", str(broken.out)).output
    assert "\x1b" not in shown
    assert r"row [red]x[/]\x1b[2J\n" in shown and "a" * 200 not in shown
    findings = json.loads(invoke("validate", str(broken.out), "--json").stdout)["findings"]
    assert hostile in {f["row"] for f in findings}


def test_the_console_shows_20_findings_of_a_rule_and_all_with_the_option(
    broken: Tampered, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train-00000", "train-00001"):
        rows = broken.rows(name)
        for row in rows:
            for column in ("final_hidden", "full_key", "full_value", "teacher_top_logprobs"):
                row[column][3] = np.nan
        broken.write(name, rows)
    report = validate(broken.out)
    listed = [f for f in report.findings if f.rule == "numbers.finite"]
    assert len(listed) == 7 * 4 > FINDINGS_SHOWN
    for show_all, shown in ((False, FINDINGS_SHOWN), (True, 28)):
        console = Console(width=200, record=True, file=io.StringIO())
        print_report(console, report, show_all=show_all)
        text = console.export_text()
        assert text.count("NaN or infinity; expected finite numbers") == shown
        assert ("… and 8 more (--all lists them)" in text) != show_all


def test_inspect_counts_what_the_rows_say(tiny_run: Path, broken: Tampered) -> None:
    found = inspect_run(tiny_run)
    rows = [row for name in ("train-00000", "train-00001") for row in broken.rows(name)]
    assert found.rows == len(rows) == 7
    assert found.tokens == sum(row["num_tokens"] for row in rows)
    assert found.supervised_tokens == sum(int(row["loss_mask"].sum()) for row in rows)
    assert found.finish_reasons == {
        reason: sum(row["finish_reason"] == reason for row in rows) for reason in ("length", "stop")
    }
    assert found.on_policy == {"1": 7}
    assert found.rejects == {"bad_json": 1, "empty_conversation": 1}
    offsets = sorted(row["position_offset"] for row in rows)
    assert found.position_offset is not None
    assert found.position_offset.median == offsets[3] and found.position_offset.max == offsets[-1]
    hits = [
        row["teacher_top_ids"][t - 1, 0] == row["input_ids"][t]
        for row in rows
        for t in range(1, row["num_tokens"])
        if row["loss_mask"][t]
    ]
    assert found.argmax_share == pytest.approx(np.mean(hits))
    assert 0 < found.argmax_share < 1
    sizes = {column.name: column for column in found.columns}
    assert sizes["final_hidden"].logical_bytes == found.tokens * 32 * 2
    assert found.bytes_per_token == found.disk_bytes / found.tokens
    assert sum(c.disk_bytes for c in found.columns) < found.disk_bytes


def test_inspect_draws_how_lengths_and_offsets_spread(tiny_run: Path) -> None:
    found = inspect_run(tiny_run)
    lengths = [row["num_tokens"] for row in shard_rows(tiny_run)]
    assert found.num_tokens is not None
    width = (max(lengths) - min(lengths)) / SPREAD_BINS
    expected = [0] * SPREAD_BINS
    for length in lengths:
        expected[min(int((length - min(lengths)) / width), SPREAD_BINS - 1)] += 1
    assert list(found.num_tokens.histogram) == expected
    drawn = sparkline(found.num_tokens.histogram, " ▁▂▃▄▅▆▇█")
    assert f"{drawn} min {min(lengths)}" in invoke("inspect", str(tiny_run)).output
    assert sparkline((0, 1, 4, 8), " ▁▂▃▄▅▆▇█") == " ▁▄█"
    assert sparkline((0, 1, 1000), " .:-=+*#@") == " .@" and sparkline((0, 0), " x") == "  "
    same = Spread.of(np.array([5, 5]))
    assert same is not None and sum(same.histogram) == 2 and same.max == 5
    narrow = run_cli("inspect", str(tiny_run), env={**ENV, "PYTHONIOENCODING": "ascii"})
    assert narrow.returncode == 0 and "@" in narrow.stdout


def test_teacher_entropy_of_known_rows() -> None:
    with np.errstate(divide="ignore"):
        top = np.log(np.array([[0.5, 0.5], [0.5, 0.25], [1 - 1e-9, 1e-30]], dtype=np.float32))
    tail = np.array([0, 0.25, 0], dtype=np.float32)
    bits = teacher_entropy(top, tail) / np.log(2)
    np.testing.assert_allclose(bits, [1, 1.5, 0], atol=1e-6)


def test_inspect_says_which_shard_it_cannot_read(broken: Tampered) -> None:
    path = broken.path("train-00001")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PipelineError, match=r"train-00001.*`pipeline validate` lists all"):
        inspect_run(broken.out)


def test_schema_lists_and_shows_every_column() -> None:
    refs = invoke("schema").output
    assert "common/v1:" in refs and "mtp/v1:" in refs
    shown = invoke("schema", "mtp").output
    for column in load_schema("mtp").columns:
        assert column.name in shown


def examples(command: Any) -> list[str]:
    """What a command's help gives as examples; commands below it count too."""
    found = []
    for name, sub in getattr(command, "commands", {}).items():
        text = CliRunner().invoke(app, [name, "--help"], env=ENV).output
        flat = " ".join(text.split())
        assert f"Example: pipeline {name}" in flat, name
        assert sub.epilog.startswith("Example: pipeline ")
        found.append(sub.epilog.removeprefix("Example: "))
    return found


def test_every_commands_help_has_an_example_that_parses() -> None:
    group = typer.main.get_command(app)
    found = examples(group)
    assert len(found) == len(group.commands) > 10  # type: ignore[attr-defined]
    for example in found:
        # Up to the end of the command proper: examples may redirect.
        words = list(itertools.takewhile(lambda w: w not in (">", "|", "&&"), shlex.split(example)))
        group.commands[words[1]].make_context(words[1], words[2:])  # type: ignore[attr-defined]


def test_completion_is_there_for_the_shells() -> None:
    """The script bash would source, and the names it then offers."""
    env = {**ENV, "_PIPELINE_COMPLETE": "complete_bash", "COMP_WORDS": "pipeline va"}
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'pipeline'; "]
    program[-1] += "from pipeline.cli import main; main()"
    offered = subprocess.run(
        program, capture_output=True, text=True, env={**env, "COMP_CWORD": "1"}
    )
    assert offered.stdout.split() == ["validate"], offered.stderr
    script = subprocess.run(
        program, capture_output=True, text=True, env={**ENV, "_PIPELINE_COMPLETE": "source_bash"}
    )
    assert "complete -o default -F" in script.stdout


def test_starting_imports_neither_torch_nor_what_only_commands_need() -> None:
    code = (
        "import sys, pipeline.cli\n"
        "print({'torch', 'transformers', 'ray', 'pyarrow', 'datasets'} & set(sys.modules))\n"
        "import pipeline.console, pipeline.inspect_run\n"
        "print({'torch', 'transformers', 'ray'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\nset()\n", done.stderr


def test_a_reader_that_stops_early_ends_it_without_a_word(tiny_run: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "pipeline.cli", "validate", str(tiny_run), "--json"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=ENV)
    os.close(write)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_ctrl_c_exits_130_without_a_traceback(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.validate, "validate", interrupted)
    result = invoke("validate", str(tiny_run))
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_rows_read_back_as_tampering_wrote_them(broken: Tampered) -> None:
    # Guards the other tests: a helper that wrote something else would make them pass for nothing.
    name = "train-00000"
    rows = broken.rows(name)
    broken.write(name, rows)
    again = read_rows(broken.path(name), broken.layout(name).columns)
    for row, back in zip(rows, again, strict=True):
        for key, value in row.items():
            np.testing.assert_array_equal(value, back[key])


def test_rollout_then_extract_is_the_whole_run(tiny_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = options_of(settings_of(tiny_run, out=str(out), max_reject_fraction=0.01))
    early = run_cli("extract", *words)
    assert early.returncode == 2 and "not all rollouts are there yet" in early.stderr
    first = run_cli("rollout", *words)
    assert first.returncode == 0, first.stderr
    assert "7 conversations with" in first.stdout and "`pipeline extract`" in first.stdout
    second = run_cli("extract", *words)
    assert second.returncode == 1  # 22 % rejected, and 1 % allowed
    assert "9 rows in = 7 out + 2 rejected" in second.stdout
    assert "complete, but 22.2% of the rows were rejected" in second.stderr
    assert run_cli("extract", *words, "--max-reject-fraction", "0.3").returncode == 0
    assert data_files(out) == data_files(tiny_run)


def test_prompts_tells_what_a_run_would_take(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Counts by reason, one row token by token with its answer, and the same as JSON."""
    lines = [
        json.dumps({"id": "a", "prompt": "Why?", "completion": "So."}),
        json.dumps({"conversations": [{"from": "human", "value": "Hi"}]}),
        json.dumps({"prompt": "a <|im_end|> b"}),
        "not json",
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    done = invoke("prompts", str(path), "--target", str(tiny_llama_dir), "--show", "1")
    assert done.exit_code == 0, done.output
    assert "4 rows = 2 accepted + 2 rejected" in done.output
    assert "p.jsonl:3: a user turn contains '<|im_end|>'" in done.output
    assert "<|im_start|>·257 " in done.output and "⟨answer⟩" in done.output
    given = invoke(
        "prompts", str(path), "--target", str(tiny_llama_dir), "--turns", "given", "--json"
    )
    assert json.loads(given.stdout) == {
        "rows": 4,
        "accepted": 1,
        "rejected": {"bad_json": 1, "no_assistant_turn": 2},
        "tokens": len("user\nWhy?\nassistant\nSo.\n") + 4,  # bytes, and four control tokens
        "sources": {},
    }
