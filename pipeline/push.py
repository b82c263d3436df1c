"""`pipeline push`: a finished run as a dataset repository on the Hub, resumable.

Shards go up in commits of bounded size, each with its records; the card, whose YAML names the
files that load_dataset reads, goes last. So whatever ends a push, the repository never promises a
file that is not there, and the same command goes on: what is there already is not sent again.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.card import split_card
from pipeline.errors import IncompleteError, PipelineError
from pipeline.shard_sets import finished_run
from pipeline.shards import file_sha256
from pipeline.units import size_text

COMMIT_BYTES = 5 * 10**9  # a commit's data: what a killed push may have to begin again
COMMIT_FILES = 50
_OURS = ("data/", "rollouts/", "commits/")
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PushFile:
    """A file of the repository; content: its bytes, or where they lie; sha256: as recorded."""

    name: str
    content: Path | bytes
    size: int
    sha256: str | None = None


def plan_push(directory: Path, *, license_id: str | None = None) -> list[list[PushFile]]:
    """What to send, commit by commit. Raises PipelineError for a run that is not fit for it."""
    run = finished_run(directory)
    card = run.root / "README.md"
    if not card.is_file():
        raise PipelineError(f"{directory}: has no dataset card README.md")
    last = [_file(run.root, name) for name in ("manifest.json", "rejects.jsonl")]
    last += [_file(run.root, f"plan/{p.name}") for p in sorted((run.root / "plan").glob("*"))]
    text = card.read_text(encoding="utf-8")
    data = (_licensed(text, license_id, card) if license_id else text).encode()
    last.append(PushFile(name="README.md", content=data, size=len(data)))
    commits: list[list[PushFile]] = [[]]
    for record in run.records.values():
        path = run.root / record.file
        if not path.is_file() or path.stat().st_size != record.bytes:
            raise PipelineError(f"{path}: is not there whole; `pipeline validate` says more")
        shard = PushFile(name=record.file, content=path, size=record.bytes, sha256=record.sha256)
        full = sum(f.size for f in commits[-1]) + record.bytes > COMMIT_BYTES
        if commits[-1] and (full or len(commits[-1]) + 2 > COMMIT_FILES):
            commits.append([])
        commits[-1] += [shard, _file(run.root, f"commits/{record.name}.json")]
    return [*filter(None, commits), last]


def card_license(card: bytes) -> str:
    """The license that the card's YAML states. Raises PipelineError for a card without YAML."""
    head, _ = split_card(card.decode("utf-8"), "README.md")
    return str(head.get("license", "unknown"))


def push(
    commits: list[list[PushFile]],
    repo: str,
    *,
    private: bool,
    say: Callable[[str], None],
) -> str:
    """Send what the repository does not have, and return its address.

    Raises PipelineError for a repository that cannot be used or holds other shards, IncompleteError
    where the connection fails: what has arrived stays, and the same call goes on.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi()
    with _hub_errors(repo):
        url = api.create_repo(repo, repo_type="dataset", private=private or None, exist_ok=True)
        there = _remote_files(api, repo)
    wanted = {file.name for files in commits for file in files}
    for name in sorted(there):
        if name.startswith(_OURS) and name not in wanted:
            raise PipelineError(
                f"{repo} holds {name}, which is not of this run; push to another repository, or "
                "remove it there first"
            )
    for number, files in enumerate(commits, start=1):
        missing = [file for file in files if not _is_there(file, there)]
        what = f"commit {number} of {len(commits)}"
        if not missing:
            say(f"{what}: there already")
            continue
        _verify(missing)
        say(f"{what}: {len(missing)} files, {size_text(sum(f.size for f in missing))}")
        with _hub_errors(repo):
            api.create_commit(
                repo,
                [CommitOperationAdd(file.name, _source(file)) for file in missing],
                commit_message=_message(missing),
                repo_type="dataset",
            )
    return str(url)


def _message(files: Iterable[PushFile]) -> str:
    shards = [file.name for file in files if file.name.endswith(".parquet")]
    return f"{len(shards)} files from {shards[0]}" if shards else "Card and manifest"


def _source(file: PushFile) -> str | bytes:
    return file.content if isinstance(file.content, bytes) else str(file.content)


def _remote_files(api: Any, repo: str) -> dict[str, Any]:
    from huggingface_hub import RepoFile

    entries = api.list_repo_tree(repo, repo_type="dataset", recursive=True)
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _is_there(file: PushFile, there: dict[str, Any]) -> bool:
    """Whether the repository has just these bytes: by sha256 of a large file, else git's hash."""
    remote = there.get(file.name)
    if remote is None or remote.size != file.size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == (file.sha256 or hashlib.sha256(_bytes(file)).hexdigest()))
    data = _bytes(file)
    return bool(remote.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest())


def _bytes(file: PushFile) -> bytes:
    return file.content if isinstance(file.content, bytes) else file.content.read_bytes()


def _verify(files: Iterable[PushFile]) -> None:
    """Raise PipelineError for a file that is not what its record says."""
    for file in files:
        if file.sha256 is None or isinstance(file.content, bytes):
            continue
        if file_sha256(file.content) != file.sha256:
            raise PipelineError(
                f"{file.content}: damaged, its sha256 is not its record's; it was not sent"
            )


def _file(root: Path, name: str) -> PushFile:
    path = root / name
    if not path.is_file():
        raise PipelineError(f"{path}: is not there; `pipeline validate {root}` says more")
    return PushFile(name=name, content=path, size=path.stat().st_size)


def _licensed(text: str, license_id: str, card: Path) -> str:
    if not _LICENSE.fullmatch(license_id):
        raise PipelineError(f"--license {license_id}: name it as the Hub does: apache-2.0, other")
    head, body = split_card(text, str(card))
    return f"---\n{yaml.safe_dump({**head, 'license': license_id}, sort_keys=False)}---\n{body}"


@contextlib.contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Around calls of huggingface_hub: its many errors as ours."""
    try:
        yield
    except Exception as caught:
        # A failed upload is wrapped; what the server said is its cause.
        error = caught.__cause__ if isinstance(caught.__cause__, Exception) else caught
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
        if status in (401, 403) or "Token" in type(error).__name__:
            raise PipelineError(
                f"{repo}: not allowed ({said}); `hf auth login`, or set HF_TOKEN to a token that "
                "may write there"
            ) from caught
        if isinstance(error, ValueError):  # a name or card that the Hub does not take
            raise PipelineError(f"{repo}: {said}") from caught
        raise IncompleteError(
            f"{repo}: the push did not come to its end ({said}); what has arrived stays, and the "
            "same command goes on from it"
        ) from caught
