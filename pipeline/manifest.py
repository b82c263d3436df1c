"""What a run's folder holds, and how a file comes to be part of it.

    OUT/plan/        the accepted prompts as token ids, and plan.json: settings and fingerprint
    OUT/rollouts/    stage 1, one Parquet file a part
    OUT/data/        stage 2, the shards
    OUT/commits/     one JSON record a finished file: a file without a record does not exist
    OUT/manifest.json, rejects.jsonl, README.md    written by the driver from the above
    OUT/.staging/    unfinished files; dot-prefixed, so no loader takes them for data

A file's name carries the start of its sha256 and its record is created at most once, so a late
worker can neither replace a file that a record points at nor add one beside it. No torch here.
"""

import contextlib
import fcntl
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.errors import PipelineError
from pipeline.shards import file_sha256

MANIFEST_VERSION = 1
_FILE_NAME = re.compile(r"(plan|rollouts|data)/[A-Za-z0-9._-]+\.parquet")
_SHA256 = r"^[0-9a-f]{64}$"


class Reject(BaseModel):
    """One input row that did not make it, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    sample_id: str | None
    reason: str
    detail: str


class Commit(BaseModel):
    """The record of one finished file; the file exists for readers only once this does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z]+-[0-9]{5,}$")
    kind: Literal["rollout", "shard"]
    file: str
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    supervised_tokens: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_SHA256)
    ids_sha256: str = Field(pattern=_SHA256)
    fingerprint: str = Field(pattern=_SHA256)
    rejects: tuple[Reject, ...] = ()
    seconds: float = Field(ge=0)

    @field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        if not _FILE_NAME.fullmatch(file):
            raise ValueError("must be a .parquet file in plan/, rollouts/ or data/")
        return file


class RunFolder:
    """The paths of a run and the two ways to write into it: `publish` and `write_json`."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.plan = self.out / "plan"
        self.commits = self.out / "commits"
        self.staging = self.out / ".staging"

    def create(self) -> None:
        """Make the folders. Raises PipelineError where OUT holds something else."""
        own = ("rollouts", "data", "commits", ".staging")
        try:
            if self.out.is_dir() and not self.plan.is_dir():
                # Empty folders of ours are what a run leaves that failed before its plan stood.
                strangers = [
                    path.name
                    for path in self.out.iterdir()
                    if path.name != ".lock"
                    and (path.name not in own or not path.is_dir() or any(path.glob("*.*")))
                ]
                if strangers:
                    raise PipelineError(
                        f"--out {self.out}: not empty ({strangers[0]}) and not a run of this "
                        "pipeline; name a new directory"
                    )
            for name in own:
                (self.out / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(f"--out {self.out}: {error.strerror}") from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one driver; the lock dies with its process.

        Raises PipelineError naming the process that holds it.
        """
        with (self.out / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise PipelineError(
                    f"--out {self.out}: another run is writing here ({file.read().strip()})"
                ) from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            yield

    def stage(self, name: str) -> Path:
        """A fresh path for an unfinished file; no two workers get the same."""
        self.staging.mkdir(exist_ok=True)
        return self.staging / f"{name}.{uuid.uuid4().hex}.parquet"

    def publish(self, staged: Path, commit: Commit) -> Commit:
        """Move a finished file to where its record says and create that record.

        Returns the record that counts: if another worker was first, its own, and our file goes.
        """
        final = self.out / commit.file
        _fsync(staged)
        staged.replace(final)
        _fsync(final.parent)
        record = self.staging / f"{commit.name}.{uuid.uuid4().hex}.json"
        record.write_text(commit.model_dump_json(indent=1) + "\n")
        _fsync(record)
        try:
            # Unlike a rename, a link never replaces a record that is already there.
            os.link(record, self.commits / f"{commit.name}.json")
        except FileExistsError:
            first = self.read_commit(self.commits / f"{commit.name}.json")
            if first.file != commit.file:
                final.unlink(missing_ok=True)
            return first
        finally:
            record.unlink(missing_ok=True)
        _fsync(self.commits)
        return commit

    def read_commit(self, path: Path) -> Commit:
        try:
            commit = Commit.model_validate_json(path.read_bytes())
        except (pydantic.ValidationError, OSError) as error:
            raise PipelineError(f"{path}: not a commit record: {error}") from error
        if path.stem != commit.name:
            raise PipelineError(f"{path}: is the record of {commit.name}")
        return commit

    def read_commits(self) -> dict[str, Commit]:
        """All records, by name. Raises PipelineError for one that cannot be read."""
        found = [self.read_commit(path) for path in sorted(self.commits.glob("*.json"))]
        return {commit.name: commit for commit in found}

    def drop_broken(self) -> list[str]:
        """Take back records whose file is missing or has another size; returns what was wrong."""
        broken = []
        for name, commit in self.read_commits().items():
            path = self.out / commit.file
            size = path.stat().st_size if path.is_file() else None
            if size != commit.bytes:
                found = "missing" if size is None else f"{size} bytes, recorded {commit.bytes}"
                broken.append(f"{commit.file}: {found}")
                (self.commits / f"{name}.json").unlink()
                path.unlink(missing_ok=True)
        return broken

    def sweep(self) -> None:
        """Remove unfinished files and data files without a record."""
        known = {commit.file for commit in self.read_commits().values()}
        for path in self.staging.glob("*"):
            path.unlink()
        for folder in ("rollouts", "data"):
            for path in (self.out / folder).glob("*.parquet"):
                if f"{folder}/{path.name}" not in known:
                    path.unlink()

    def write_json(self, name: str, value: Any) -> None:
        """Replace OUT/name in one step."""
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        self.staging.mkdir(exist_ok=True)
        part = self.staging / f"{uuid.uuid4().hex}.tmp"
        part.write_text(text, encoding="utf-8")
        _fsync(part)
        part.replace(self.out / name)

    def read_json(self, name: str) -> dict[str, Any]:
        """Read OUT/name. Raises PipelineError if it is not there or not a JSON object."""
        path = self.out / name
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise PipelineError(f"{self.out}: no {name}, so not the folder of a run") from None
        except (OSError, ValueError) as error:
            raise PipelineError(f"{path}: {error}") from error
        if not isinstance(value, dict):
            raise PipelineError(f"{path}: not a JSON object")
        return value


def make_commit(staged: Path, *, folder: str, stem: str, **fields: Any) -> Commit:
    """The record of a staged file: its size, digest and the name they give it."""
    sha256 = file_sha256(staged)
    return Commit(
        file=f"{folder}/{stem}-{sha256[:12]}.parquet",
        bytes=staged.stat().st_size,
        sha256=sha256,
        **fields,
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
