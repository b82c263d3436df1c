"""`pipeline push` against a stand-in for the Hub (hub_server.py) that speaks what it uses."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from datasets import load_dataset
from hub_server import TOKEN, Hub, git_hash
from huggingface_hub import DatasetCard, constants
from typer.testing import CliRunner

from pipeline import push as push_module
from pipeline.card import _size_category, split_card
from pipeline.cli import app
from pipeline.errors import IncompleteError, PipelineError
from pipeline.push import plan_push
from pipeline.validate import validate

REPO = "me/features"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A stand-in, and huggingface_hub pointed at it; Xet off, for it speaks LFS only."""
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield hub
    hub.close()


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["push", *words])


def pushed(hub: Hub, where: Path) -> Path:
    """What the repository holds, as a folder."""
    for name, data in hub.files.items():
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_bytes(data)
    return where


def test_what_arrives_is_a_valid_run_that_load_dataset_reads(
    hub: Hub, tiny_run: Path, tmp_path: Path
) -> None:
    done = invoke(str(tiny_run), REPO, "--license", "apache-2.0", "--private")
    assert done.exit_code == 0, done.output
    assert f"done: {hub.url}/datasets/{REPO}" in done.output
    assert hub.private == {REPO}
    copy = pushed(hub, tmp_path / "copy")
    report = validate(copy)
    assert report.ok and report.rows == 7
    assert not [rule.id for rule in report.rules if rule.id.startswith("plan") and rule.not_checked]
    rows = load_dataset(str(copy), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows.num_rows == 7
    # Local matters stay here: locks, unfinished files, paths of this machine in run.yaml.
    assert not {name.split("/")[0] for name in hub.files} & {".lock", ".staging", "run.yaml"}
    assert set(hub.lfs) == {n for n in hub.files if n.endswith(".parquet")}
    # The card comes with the last commit, its license as asked for; the local one is as it was.
    assert [("README.md" in names) for _, names in hub.commits] == [False, True]
    assert DatasetCard(hub.files["README.md"].decode()).data.license == "apache-2.0"
    assert DatasetCard((tiny_run / "README.md").read_text()).data.license == "unknown"


def test_the_same_push_again_sends_nothing(hub: Hub, tiny_run: Path) -> None:
    assert invoke(str(tiny_run), REPO).exit_code == 0
    uploads, commits = list(hub.uploads), list(hub.commits)
    again = invoke(str(tiny_run), REPO)
    assert again.exit_code == 0 and again.output.count("there already") == 2
    assert (hub.uploads, hub.commits) == (uploads, commits)
    # A changed card alone goes up alone.
    assert invoke(str(tiny_run), REPO, "--license", "mit").exit_code == 0
    assert hub.uploads == uploads and hub.commits[-1][1] == ["README.md"]


@pytest.mark.parametrize("killed_at", [1, 3])
def test_a_push_that_is_killed_goes_on(
    hub: Hub, tiny_run: Path, tmp_path: Path, killed_at: int
) -> None:
    """SIGKILL while an upload is under way; what had arrived is not sent again."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    program = [sys.executable, "-m", "pipeline.cli", "push", str(tiny_run), REPO]
    process: subprocess.Popen[bytes] | None = None

    def kill(count: int) -> int:
        if count < killed_at or process is None:
            return 200
        process.send_signal(signal.SIGKILL)
        process.wait()
        return 503

    hub.on_upload = kill
    process = subprocess.Popen(program, env=env, stdout=subprocess.DEVNULL)
    assert process.wait() == -signal.SIGKILL
    assert "README.md" not in hub.files
    assert len(hub.uploads) >= killed_at - 1
    hub.on_upload = lambda count: 200
    assert invoke(str(tiny_run), REPO).exit_code == 0
    assert len(hub.uploads) == len(set(hub.uploads)) == 4 + len(list_plan(tiny_run))
    assert validate(pushed(hub, tmp_path / "copy")).ok


def list_plan(run: Path) -> list[Path]:
    return sorted((run / "plan").glob("*.parquet"))


def test_a_failing_upload_is_told_and_whole_commits_stay(
    hub: Hub, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "COMMIT_FILES", 2)  # a shard and its record
    hub.on_upload = lambda count: 507 if count > 2 else 200
    failed = invoke(str(tiny_run), REPO)
    assert isinstance(failed.exception, IncompleteError)
    assert "the push did not come to its end (HfHubHTTPError: " in str(failed.exception)
    assert "507" in str(failed.exception)
    assert len(hub.commits) == 2
    assert all(len(names) == 2 and names[1].startswith("commits/") for _, names in hub.commits)
    hub.on_upload = lambda count: 200
    again = invoke(str(tiny_run), REPO)
    assert again.exit_code == 0 and again.output.count("there already") == 2
    assert len(hub.commits) == 5


def test_no_token_and_another_runs_repository(
    hub: Hub, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused = invoke(str(tiny_run), REPO)
    assert isinstance(refused.exception, PipelineError)
    assert "not allowed" in str(refused.exception) and "HF_TOKEN" in str(refused.exception)
    assert "hf_wrong" not in str(refused.exception)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos.add(REPO)
    hub.files["data/train-00000-of-00001-abc.parquet"] = b"other"
    other = invoke(str(tiny_run), REPO)
    assert f"{REPO} holds data/train-00000-of-00001-abc.parquet" in str(other.exception)
    assert hub.commits == []


def test_dry_run_needs_no_network_and_names_every_file(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = invoke(str(tiny_run), REPO, "--dry-run")
    assert done.exit_code == 0 and done.output.endswith("dry run: nothing was sent\n")
    assert "the card says license: unknown; --license ID" in done.output
    for folder in ("data", "rollouts", "commits", "plan"):
        for path in (tiny_run / folder).iterdir():
            assert f"  {folder}/{path.name}  " in done.output
    assert (
        "license: unknown"
        not in invoke(str(tiny_run), REPO, "--dry-run", "--license", "mit").output
    )


def test_what_is_not_fit_is_refused(tiny_run: Path, tmp_path: Path, hub: Hub) -> None:
    copy = tmp_path / "out"
    shutil.copytree(tiny_run, copy)

    def refused(*words: str) -> str:
        result = invoke(*words)
        assert isinstance(result.exception, PipelineError), result.output
        return str(result.exception)

    assert "must be owner/name" in refused(str(copy), "features")
    assert "--license MIT License: name it as the Hub does" in refused(
        str(copy), REPO, "--license", "MIT License"
    )
    shard = next((copy / "data").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert "damaged, its sha256 is not its record's" in refused(str(copy), REPO)
    assert hub.uploads == []
    shard.write_bytes(data[:-1])
    assert "is not there whole" in refused(str(copy), REPO)
    (copy / "manifest.json").write_text(
        (copy / "manifest.json").read_text().replace('"complete": true', '"complete": false')
    )
    assert "holds no finished run" in refused(str(copy), REPO)


def test_shards_are_split_into_commits_by_size(
    tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "COMMIT_BYTES", 1)
    commits = plan_push(tiny_run)
    assert [len(files) for files in commits[:-1]] == [2, 2, 2, 2]
    assert commits[-1][-1].name == "README.md"


def test_the_card_says_all_that_the_hub_shows(tiny_run: Path) -> None:
    text = (tiny_run / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "unknown" and head["size_categories"] == ["n<1K"]
    assert head["task_categories"] == ["text-generation"]
    assert {c["config_name"] for c in head["configs"]} == {"default", "rollouts"}
    for section in ("How to load", "How it was made", "How the columns line up", "Columns"):
        assert f"\n## {section}\n" in text
    for fact in ("temperature 1.0", "transformers", "| seed | 7 |", "fingerprint", "torch 2."):
        assert fact in text, fact
    cells = [line.count("|") for line in text.splitlines() if line.startswith("|")]
    assert set(cells) <= {3, 5}  # two tables, no cell that breaks them
    assert [_size_category(n) for n in (999, 1000, 10**6, 10**9)] == [
        *("n<1K", "1K<n<10K", "1M<n<10M", "n>1B")
    ]


def test_shards_suit_the_hubs_viewer(tiny_run: Path) -> None:
    """Scalars before arrays, and row groups that a viewer can take."""
    for path in (tiny_run / "data").iterdir():
        file = pq.ParquetFile(path)
        arrays = [
            "list" in str(field.type) or "extension" in str(field.type)
            for field in file.schema_arrow
        ]
        assert file.schema_arrow.names[0] == "sample_id"
        assert arrays == sorted(arrays)
        for i in range(file.num_row_groups):
            assert file.metadata.row_group(i).total_byte_size <= 256 * 2**20


def test_the_stand_in_hashes_as_git_does(tmp_path: Path) -> None:
    """Guards the skipping of files by git's hash."""
    (tmp_path / "f").write_bytes(b"hello\n")
    command = ["git", "hash-object", str(tmp_path / "f")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert git_hash(b"hello\n") == said


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("[" * 5000, "README.md: its YAML cannot be read"),  # deeper than the parser goes
        ("license: [", "README.md: its YAML cannot be read"),
        ("day: 2026-13-45", "README.md: its YAML cannot be read"),
        ("just words", "README.md: does not begin with YAML"),
    ],
)
def test_a_card_with_broken_yaml_is_refused(
    head: str, said: str, tiny_run: Path, tmp_path: Path
) -> None:
    card = f"---\n{head}\n---\ntext\n"
    with pytest.raises(PipelineError, match=said):
        split_card(card, "README.md")
    out = shutil.copytree(tiny_run, tmp_path / "out")
    (out / "README.md").write_text(card)
    (found,) = (f for f in validate(out, quick=True).findings if f.rule == "card.files")
    assert said in found.found
