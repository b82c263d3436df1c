"""The documents' commands, run page by page in a folder that has what they name.

The target model is gemma4-nano whatever a page calls it, answers are cut at a few tokens, and jobs
run in this process without Ray; the slow test runs the README's job as it stands.
"""

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import typer
import zstandard
from docs_commands import PAGES, ROOT, block_commands, blocks, job_app
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.config_file import merged
from pipeline.execute import LocalWorker, dry_run, execute
from pipeline.progress import RunProgress
from pipeline.settings import Settings
from pipeline.validate import validate

ANSWER = 8  # tokens
TARGETS = {
    "/models/model-Q4_K_M.gguf",
    "model-Q4_K_M.gguf",
    "gemma-4-E4B-it-Q4_K_M.gguf",
    "m.gguf",
    "T",
    "smollm2-135m",
}
# Beginnings of commands that are not run, and why.
NOT_RUN = {
    "python3 -m venv": "tests/test_infra.py installs in a clean environment",
    ". .venv/bin/activate": "the same",
    "pip install": "the same",
    "export RAY_AUTH_MODE": "tests/test_jobs.py runs clusters and `ray job submit`",
    "ray ": "the same",
    "docker build": "no docker here",
    "python -m pipeline.bench": "takes minutes; tests/test_bench.py runs its parts",
    "python jobs/bench_gpu.py": "wants a GPU; tests/test_bench_gpu.py runs it on the CPU",
    "aws s3api": "tests/test_infra.py puts the rule on a server",
    "hf auth": "needs the Hub",
    "pipeline push OUT me/my-features --license": "the same; tests/test_push.py has a stand-in",
    "pipeline --install-completion": "changes the shell's files",
    "pipeline --show-completion": "wants a shell; tests/test_cli.py asks for its script",
}
LINES = (ROOT / "pipeline/data/gemma4-nano/held-out.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture(scope="module")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, all of whose settings stand in its run.yaml."""
    base = tmp_path_factory.mktemp("docs")
    (base / "prompts.jsonl").write_text("".join(LINES[:3]))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(base / "prompts.jsonl"),
        out=str(base / "out"),
        max_new_tokens=ANSWER,
    )
    execute(settings, LocalWorker)
    return base / "out"


@pytest.fixture
def folder(tmp_path: Path, base_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's commands run: its prompt files, and OUT and OTHER as finished runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    text = "".join(LINES[:2])
    demo = tmp_path / "pipeline" / "data" / "demo_prompts.jsonl"
    for path in (demo, tmp_path / "maths" / "a.jsonl", tmp_path / "data" / "x"):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    for name in ("prompts.jsonl", "chats.jsonl", "ja.jsonl"):
        (tmp_path / name).write_text(text)
    (tmp_path / "chats.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "code.jsonl.zst").write_bytes(zstandard.compress("".join(LINES[2:4]).encode()))
    pq.write_table(pa.table({"prompt": ["def f():", "x = 1"]}), tmp_path / "code.parquet")
    ids = {"sample_id": ["a"], "input_ids": [[2, 6, 7, 8]], "loss_mask": [[0, 0, 1, 1]]}
    pq.write_table(pa.table(ids), tmp_path / "given.parquet")
    for name in ("OUT", "OTHER"):
        shutil.copytree(base_run, tmp_path / name)
        config = tmp_path / name / "run.yaml"
        config.write_text(config.read_text().replace(str(base_run), str(tmp_path / name)))
    return tmp_path


def here(word: str, folder: Path) -> str:
    """A page's word as it stands in the folder."""
    if word in TARGETS:
        return "gemma4-nano"
    if word == "cuda":
        return "cpu"
    for start in ("/data", "/abs"):
        if word == start or word.startswith(start + "/"):
            return f"{folder}{word}"
    return word


def run_job(words: list[str]) -> None:
    """What jobs/extract_mtp.py does with these words, in this process; answers cut short."""
    command: Any = typer.main.get_command(job_app("jobs/extract_mtp.py"))
    context = command.make_context("extract_mtp.py", words)
    given = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    config, assignments = given.pop("config", None), given.pop("set", [])
    values = merged(config=config, assignments=assignments, command_line=given, model=Settings)
    settings = Settings.check(**{**values, "max_new_tokens": ANSWER})
    if settings.dry_run:
        told = dry_run(settings, LocalWorker, RunProgress(quiet=True))
        assert told["rows"] > 0 and not Path(settings.out).exists()
        return
    manifest = execute(settings, LocalWorker)
    assert manifest["complete"] and manifest["rows_out"] > 0
    assert validate(settings.out).ok


def run_line(words: list[str]) -> None:
    line = " ".join(words)
    if words[0] == "pipeline":
        done = CliRunner().invoke(app, words[1:])
        expected = (0, 1) if words[1] == "doctor" else (0,)  # 1: something of this machine is wrong
        assert done.exit_code in expected, f"{line}\n{done.output}\n{done.exception!r}"
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    else:
        assert words[:2] == ["python", "jobs/extract_mtp.py"], line
        run_job(words[2:])


@pytest.mark.parametrize("page", [page for page in PAGES if block_commands(page)])
def test_a_pages_commands_run_one_after_the_other(page: str, folder: Path) -> None:
    commands = [" ".join(c.words) for c in block_commands(page)]
    if any("jobs/extract_mtp.py" in line and line.endswith(" --out OUT") for line in commands) or (
        "--out OUT --" in " ".join(commands)
    ):
        shutil.rmtree(folder / "OUT")  # it is made there
    for number, text in enumerate(blocks(page, "yaml")):
        assert number == 0, "one configuration a page"
        words = [here(word, folder) for word in text.split(" ")]
        again = " ".join(words).replace("/models/model-Q4_K_M.gguf", "gemma4-nano")
        (folder / "run.yaml").write_text(again.replace("out: /data", f"out: {folder}/data"))
    for command in block_commands(page):
        line = " ".join(command.words)
        if not any(line.startswith(start) for start in NOT_RUN):
            run_line([here(word, folder) for word in command.words])


def test_what_is_not_run_is_there_and_is_little() -> None:
    lines = [" ".join(c.words) for page in PAGES for c in block_commands(page)]
    left = [line for line in lines if any(line.startswith(start) for start in NOT_RUN)]
    assert all(any(line.startswith(start) for line in left) for start in NOT_RUN)
    assert len(lines) - len(left) >= 20


def test_the_loading_pages_code_runs(folder: Path) -> None:
    (code,) = blocks("docs/loading.md", "python")
    names: dict[str, Any] = {"rank": 0, "world": 1, "generator": torch.Generator()}
    exec(code, names)
    assert len(names["rows"]) == 3 and names["window"] == 64
    assert names["batch"].label_ids.shape[0] == 1 and names["batch"].label_ids.shape[2] == 3


@pytest.mark.slow
def test_the_readmes_job_runs_as_it_stands(folder: Path) -> None:
    """With its own private Ray, in a process of its own."""
    (command,) = [
        c for c in block_commands("README.md") if c.words[0] == "python" and "OUT" in c.words
    ]
    shutil.rmtree(folder / "OUT")
    words = [here(word, folder) for word in command.words]
    words[:2] = [sys.executable, str(ROOT / "jobs" / "extract_mtp.py")]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    short = ["--max-new-tokens", str(ANSWER), "--workers", "1"]
    done = subprocess.run([*words, *short], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "2 rows in = 2 out + 0 rejected" in done.stdout
    assert validate(folder / "OUT").ok
