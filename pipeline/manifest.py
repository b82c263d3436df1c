"""What a run's folder holds, and how a file comes to be part of it.

    OUT/plan/        the accepted prompts as token ids, and plan.json: settings and fingerprint
    OUT/rollouts/    stage 1, one Parquet file a part
    OUT/data/        stage 2, the shards
    OUT/commits/     one JSON record a finished file: a file without a record does not exist
    OUT/manifest.json, rejects.jsonl, README.md    written by the driver from the above
    OUT/.staging/    unfinished files; dot-prefixed, so no loader takes them for data. Where OUT is
                     object storage they lie on the local disk until they are uploaded

A file's name carries the start of its sha256 and its record is created at most once, so a late
worker can neither replace a file that a record points at nor add one beside it. A record also has
the digest of what its file was made from: a file made from something else is made again. No torch
here.
"""

import contextlib
import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.errors import PipelineError, StorageError
from pipeline.shards import check_readable, file_sha256
from pipeline.storage import LOCK_NAME, open_storage

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
    inputs_sha256: str = Field(pattern=_SHA256)
    attempt: int = Field(1, ge=1)  # 2 and up: earlier ones failed or lost their worker
    rejects: tuple[Reject, ...] = ()
    seconds: float = Field(ge=0)

    @field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        if not _FILE_NAME.fullmatch(file):
            raise ValueError("must be a .parquet file in plan/, rollouts/ or data/")
        return file


class RunFolder:
    """The files of a run: `publish` adds finished ones, `write_json` and `write_text` the rest."""

    def __init__(self, out: str | Path) -> None:
        """out: a directory or a URL; see `pipeline.storage`."""
        self.storage = open_storage(out)
        self.url = self.storage.url

    def create(self) -> None:
        """Check that OUT is usable. Raises PipelineError where it holds something else."""
        try:
            there = [name for name in self.storage.list("") if name != LOCK_NAME]
            for folder in ("data", "rollouts", "commits"):
                there += [f"{folder}/{name}" for name in self.storage.list(folder)]
            if there and "plan.json" not in self.storage.list("plan"):
                raise PipelineError(
                    f"--out {self.url}: not empty ({there[0]}) and not a run of this "
                    "pipeline; name a new directory"
                )
            self.storage.scratch()
        except OSError as error:
            raise PipelineError(f"--out {self.url}: {error.strerror or error}") from error

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Hold the folder for one driver. Raises PipelineError naming who holds it."""
        return self.storage.locked()

    def open(self, name: str) -> IO[bytes]:
        """A file of the run, to read from."""
        return self.storage.open(name)

    def read_table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """A Parquet file of the run, checksums verified. Raises StorageError if it is damaged."""
        try:
            with self.open(name) as file:
                return pq.read_table(file, columns=columns, page_checksum_verification=True)
        except (OSError, pa.ArrowException) as error:
            raise StorageError(f"{self.url}/{name}: cannot be read ({error})") from error

    def stage(self, name: str) -> Path:
        """A fresh local path for an unfinished file; no two workers get the same."""
        return self.storage.scratch() / f"{name}.{uuid.uuid4().hex}.parquet"

    def publish(self, staged: Path, commit: Commit) -> Commit:
        """Move a finished file to where its record says and create that record.

        Returns the record that counts: if another worker was first, its own, and our file goes.
        """
        self.storage.put(staged, commit.file, commit.sha256)
        record = f"commits/{commit.name}.json"
        if self.storage.create(record, f"{commit.model_dump_json(indent=1)}\n".encode()):
            return commit
        first = parse_commit(record, self.storage.read(record))
        if first.file != commit.file:
            self.storage.remove(commit.file)
        return first

    def read_commits(self) -> dict[str, Commit]:
        """All records, by name. Raises PipelineError for one that cannot be read."""
        found = self.storage.read_all("commits", ".json").items()
        commits = [parse_commit(f"{self.url}/commits/{name}", data) for name, data in found]
        return {commit.name: commit for commit in commits}

    def take_back(self, commit: Commit) -> None:
        """Remove a record and its file; the record first, so it never points at nothing."""
        self.storage.remove(f"commits/{commit.name}.json")
        self.storage.remove(commit.file)

    def drop_broken(
        self, commits: Mapping[str, Commit], *, verify: bool, say: Callable[[str], None]
    ) -> dict[str, Commit]:
        """Take back records whose file is missing or has another size; returns the sound ones.

        verify: also read each file and compare its sha256.
        """
        sizes = {
            f"{folder}/{name}": size
            for folder in ("rollouts", "data")
            for name, size in self.storage.list(folder).items()
        }
        sound = {}
        for name, commit in commits.items():
            size = sizes.get(commit.file)
            found = "missing" if size is None else f"{size} bytes, recorded {commit.bytes}"
            if size == commit.bytes:
                if not verify or self._sha256(commit.file) == commit.sha256:
                    sound[name] = commit
                    continue
                found = "its sha256 is not the recorded one"
            say(f"{commit.file}: {found}; it will be made again")
            self.take_back(commit)
        return sound

    def _sha256(self, name: str) -> str:
        with self.open(name) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]

    def sweep(self, commits: Iterable[Commit]) -> None:
        """Remove unfinished files and data files that none of the records names."""
        known = {commit.file for commit in commits}
        self.storage.sweep_scratch()
        for folder in ("rollouts", "data"):
            for name in self.storage.list(folder):
                if name.endswith(".parquet") and f"{folder}/{name}" not in known:
                    self.storage.remove(f"{folder}/{name}")

    def write_json(self, name: str, value: Any) -> None:
        """Replace OUT/name in one step."""
        self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        self.storage.replace(name, text.encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read OUT/name. Raises PipelineError if it is not there or not a JSON object."""
        try:
            value = json.loads(self.storage.read(name))
        except FileNotFoundError:
            raise PipelineError(f"{self.url}: no {name}, so not the folder of a run") from None
        except (OSError, ValueError, RecursionError) as error:
            raise PipelineError(f"{self.url}/{name}: {error}") from error
        if not isinstance(value, dict):
            raise PipelineError(f"{self.url}/{name}: not a JSON object")
        return value


def parse_commit(where: str, data: bytes) -> Commit:
    """The record in the file `where`. Raises PipelineError naming that file."""
    try:
        commit = Commit.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise PipelineError(f"{where}: not a commit record: {error}") from error
    if Path(where).stem != commit.name:
        raise PipelineError(f"{where}: is the record of {commit.name}")
    return commit


def make_commit(staged: Path, *, folder: str, stem: str, **fields: Any) -> Commit:
    """The record of a staged Parquet file: its size, digest and the name they give it.

    The file is read back first: only what can be read is recorded. Raises StorageError.
    """
    check_readable(staged)
    sha256 = file_sha256(staged)
    return Commit(
        file=f"{folder}/{stem}-{sha256[:12]}.parquet",
        bytes=staged.stat().st_size,
        sha256=sha256,
        **fields,
    )
