"""--config, --set and the command line: what wins, what is refused, what a run tells and keeps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from run_files import data_files, settings_of
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config_file import read_assignments, read_config, settings_text
from pipeline.errors import PipelineError
from pipeline.settings import Settings, with_settings

GIVEN = {"target": "T", "prompts": ["P"], "out": "O"}


def parsed(*words: str) -> Settings:
    """What a command with the options of a run makes of its words."""
    seen: list[Settings] = []
    app = typer.Typer()
    app.command()(with_settings(seen.append))
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, result.output
    return seen[0]


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_beats_set_beats_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        "target: T\nprompts: P\nout: O\nseed: 1\nshard_mb: 1\ntopk: 1\nstop: [END, '<|x|>']\n"
        "temperature: 1\nverify_resume: true\n",
    )
    found = parsed("--config", path, "--set", "topk=2", "--set", "shard_mb=2", "--shard-mb", "3")
    assert (found.shard_mb, found.topk, found.seed, found.depth) == (3, 2, 1, 3)
    assert found.stop == ["END", "<|x|>"] and found.temperature == 1.0 and found.verify_resume
    # Given on the command line, a value wins also where it is the default.
    assert parsed("--config", path, "--topk", "64").topk == 64
    assert parsed("--config", path, "--stop", "x", "--set", "stop=[y]").stop == ["x"]


def test_every_option_can_come_from_the_file(tmp_path: Path) -> None:
    """All settings at values that are not their defaults, through YAML and back."""
    others: dict[str, Any] = {
        **GIVEN,
        "features": "mtp,eagle3",
        "layers": ["eagle3=1,2,3"],
        "stop": ["END"],
        "backend": "transformers",
        "turns": "given",
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "control_tokens": "text",
        "device": "cpu",
        "thinking": "drop",
        "template_arg": ["enable_thinking=false"],
    }
    for name, field in Settings.model_fields.items():
        if name in others:
            continue
        default = field.get_default()
        if isinstance(default, bool):
            others[name] = not default
        elif isinstance(default, int | float):
            others[name] = default + 1 if name not in ("top_p", "max_reject_fraction") else 0.5
        else:
            others[name] = 5 if name in ("limit", "shuffle") else "text"
    wanted = Settings.check(**others)
    defaults = Settings.check(**GIVEN)
    same = [n for n in Settings.model_fields if getattr(wanted, n) == getattr(defaults, n)]
    assert set(same) == set(GIVEN)
    assert parsed("--config", config(tmp_path, settings_text(wanted))) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_new_token: 5", r"no setting max_new_token; did you mean max_new_tokens\?"),
        ("max-new-tokens: 5", r"no setting max-new-tokens; did you mean max_new_tokens\?"),
        ("zzzzqq: 5", "no setting zzzzqq; --help lists the options"),
        ("topk: '5'", r"topk: Input should be a valid integer \(got '5'\)"),
        ("topk: true", "topk: Input should be a valid integer"),
        ("topk: 1.5", "topk: Input should be a valid integer"),
        ("topk: 0", "topk: Input should be greater than or equal to 1"),
        ("target: 5", r"target: Input should be a valid string \(got 5\)"),
        ("turns: on", "turns: Input should be 'all', 'last' or 'given'"),
        ("stop: 5", "stop: Input should be a valid list"),
        ("stop: [1]", r"stop\.0: Input should be a valid string"),
        ("topk: 5\ntopk: 6", "line 2: topk is given twice"),
        ("5: 6", "line 1: 5 is not a setting's name"),
        ("a: [", "line 1: "),
        ("- a", "must hold lines of the form"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("a: \x00", "not YAML that can be read"),
        ("?", "not a setting's name"),
        ("[" * 4000, "not YAML that can be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = config(tmp_path, text)
    with pytest.raises(PipelineError, match=said) as caught:
        read_config(path, Settings)
    assert str(caught.value).startswith(f"--config {path}")


def test_a_file_that_is_not_there_and_one_that_is_empty(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="No such file"):
        read_config(str(tmp_path / "none.yaml"), Settings)
    with pytest.raises(PipelineError, match="utf-8"):
        (tmp_path / "latin.yaml").write_bytes(b"target: \xff")
        read_config(str(tmp_path / "latin.yaml"), Settings)
    assert read_config(config(tmp_path, "# nothing\n"), Settings) == {}


def test_set_takes_text_as_it_stands_and_the_rest_as_yaml() -> None:
    words = [
        "target=3",
        "limit=null",
        "topk=7",
        "stop=[a, b]",
        "prompts=p=X:2",
        "dry_run=true",
        "tokenizer=null",
    ]
    assert read_assignments(words, Settings) == {
        "target": "3",
        "limit": None,
        "topk": 7,
        "stop": ["a", "b"],
        "prompts": ["p=X:2"],
        "dry_run": True,
        "tokenizer": None,
    }
    for word, said in (
        ("topk", "--set topk: must be key=value"),
        ("top_q=1", "did you mean top_p"),
        ("topk=many", "topk: Input should be a valid integer"),
        ("stop=[", "the value is not YAML"),
    ):
        with pytest.raises(PipelineError, match=said):
            read_assignments([word], Settings)


def test_what_must_be_given_may_come_from_anywhere(tmp_path: Path) -> None:
    app = typer.Typer()

    @app.command()
    @with_settings
    def run(settings: Settings) -> None: ...

    done = CliRunner().invoke(app, ["--target", "T", "--set", "out=O"])
    assert done.exit_code == 2
    assert "error: --prompts is missing: give it there, or as `prompts:` in --config" in done.stderr
    assert parsed("--target", "T", "--set", "out=O", "--set", "prompts=P").out == "O"


def test_a_run_prints_and_keeps_all_settings_and_resumes_from_them(
    tiny_run: Path, tmp_path: Path
) -> None:
    """A file, then the run's own run.yaml; nothing is done twice."""
    out = tmp_path / "out"
    given = settings_of(tiny_run, out=str(out), max_reject_fraction=0.5)
    path = config(tmp_path, settings_text(given))

    def run(command: str, *words: str) -> Any:
        return CliRunner().invoke(app, [command, *words])

    first = run("rollout", "--config", path)
    assert first.exit_code == 0, first.stderr
    printed = first.stderr.split("settings:\n")[1].split("target tiny")[0].split("\ntarget ")[0]
    assert Settings.check(**yaml.safe_load(printed)) == given
    # Not a terminal: plain lines, with all that the live line has.
    assert re.search(
        r"^rollouts: 2/2 parts, 7 rows, [\d,]+ tokens/s, 0:00 left, 0 rejected, 1 worker, "
        r"[\d.,]+ GB disk left$",
        first.stderr,
        re.MULTILINE,
    )
    stored = str(out / "run.yaml")
    assert Settings.check(**yaml.safe_load(Path(stored).read_text())) == given
    second = run("extract", "--config", stored, "--log-json")
    assert second.exit_code == 0, second.stderr
    assert data_files(out) == data_files(tiny_run)
    events = [json.loads(line) for line in second.stderr.splitlines()]
    assert [e["event"] for e in events if e["event"] in ("stage", "progress", "summary")] == [
        *("stage", "stage", "progress", "progress", "summary")
    ]
    assert events[-1]["rows_out"] == 7 and events[-1]["complete"] is True
    last = events[-2]
    assert (last["stage"], last["done"], last["total"], last["rows"]) == ("features", 2, 2, 7)
    assert last["workers"] == 1 and last["free_bytes"] > 10**6 and last["seconds_left"] == 0
    assert last["tokens"] == events[-1]["tokens"] and last["rejected"] == 0
    quiet = run("extract", "--config", stored, "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")
    # Errors are told all the same, and as JSON where JSON is wanted.
    refused = run("extract", "--config", stored, "--quiet", "--seed", "99")
    assert refused.exit_code == 2 and refused.stderr.startswith("error: --out")
    refused = run("extract", "--config", stored, "--log-json", "--seed", "99")
    error = json.loads(refused.stderr.splitlines()[-1])
    assert (error["event"], error["exit_code"]) == ("error", 2) and "seed" in error["text"]
    rejects = run("extract", "--config", stored, "--log-json", "--max-reject-fraction", "0.1")
    error = json.loads(rejects.stderr.splitlines()[-1])
    assert rejects.exit_code == error["exit_code"] == 1 and "22.2% of the rows" in error["text"]
