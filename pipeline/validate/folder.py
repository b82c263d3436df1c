"""What a validated directory holds: the run's own records and the files beside them. No torch.

Everything here is read from strangers' files: each part is parsed strictly, what cannot be read
is kept as the reason, and no path of a record is used unless it stays in data/ or rollouts/.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.geometry import Geometry
from pipeline.manifest import MANIFEST_VERSION, Commit
from pipeline.schema import FLOAT_DTYPES

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _check_geometry(geometry: Geometry) -> Geometry:
    """The dtypes are ours and the sizes are sizes; raises ValueError."""
    for dtype in (geometry.hidden_dtype, geometry.kv_dtype):
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"no dtype {dtype!r}")
    sizes = [geometry.hidden_size, geometry.vocab_size, geometry.context_length]
    for kv in geometry.shared_kv.values():
        sizes += [kv.kv_heads, kv.head_dim]
    if min(sizes) < 1:
        raise ValueError(f"a size of {min(sizes)}")
    return geometry


CheckedGeometry = Annotated[Geometry, pydantic.AfterValidator(_check_geometry)]
Kind = Literal["rollout", "shard"]
FOLDER_OF: dict[Kind, str] = {"rollout": "rollouts", "shard": "data"}
_DATA_FILE = re.compile(r"(rollouts|data)/[A-Za-z0-9_-][A-Za-z0-9._-]*\.parquet")


class Manifest(BaseModel):
    """The fields of manifest.json that the rules read; others may follow."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    manifest_version: int
    complete: bool
    fingerprint: Sha256
    fingerprint_fields: dict[str, Any]
    geometry: CheckedGeometry
    settings: dict[str, Any]
    rows_in: int = Field(ge=0)
    rows_out: int = Field(ge=0)
    tokens: int = Field(ge=0)
    rejected: dict[str, int]
    shards: list[dict[str, Any]]
    rollouts: list[dict[str, Any]]


class BadRecord(NamedTuple):
    """A record that cannot be used. outside: because its file is not in data/ or rollouts/."""

    source: str
    reason: str
    outside: bool


@dataclass(kw_only=True)
class RunView:
    """A directory to validate.

    root: OUT, or a directory with just shards. has_records: OUT has commits/ or a manifest; if
    not, `records` is empty and `loose` lists the files that are there.
    records: name -> commit record, from commits/ or else from the manifest's tables.
    """

    root: Path
    has_records: bool
    manifest: Manifest | None = None
    manifest_error: str | None = None
    commits: dict[str, Commit] | None = None
    listed: dict[str, Commit] | None = None
    bad_commits: list[BadRecord] = field(default_factory=list)
    bad_listed: list[BadRecord] = field(default_factory=list)
    loose: list[Path] = field(default_factory=list)

    @property
    def records(self) -> dict[str, Commit]:
        return (self.listed if self.commits is None else self.commits) or {}

    def of_kind(self, kind: Kind) -> list[Commit]:
        """Records of one kind by name, which is the order of their rows."""
        return sorted((c for c in self.records.values() if c.kind == kind), key=lambda c: c.name)

    def relative(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def open_run(out: str | Path) -> RunView:
    """Read what OUT, OUT/data or a directory with just shards says of itself.

    out: a directory, or a URL that fsspec knows. Raises PipelineError if it is neither.
    """
    path = _path_of(out)
    if not path.is_dir():
        raise PipelineError(f"{path}: no such directory; name OUT of a run, or one with shards")
    root = path.resolve()
    if root.name in FOLDER_OF.values() and _is_run(root.parent):
        root = root.parent
    if _is_run(root):
        run = RunView(root=root, has_records=True)
        _read_manifest(run)
        if (root / "commits").is_dir():
            _read_commits(run)
        return run
    loose = [p for folder in ("", "rollouts", "data") for p in parquet_files(root / folder)]
    if not loose:
        raise PipelineError(
            f"{path}: holds no manifest.json, no commits/ and no .parquet file; "
            "name OUT of a run, or a directory with shards"
        )
    return RunView(root=root, has_records=False, loose=loose)


def _path_of(out: str | Path) -> Path:
    """A local path; of a URL, one that behaves as such. Raises PipelineError."""
    if "://" not in str(out):
        return Path(out)
    from upath import UPath

    try:
        remote: Path = UPath(str(out), use_listings_cache=False)
    except (ImportError, ValueError) as error:
        raise PipelineError(f"{out}: {error}") from error
    return remote


def parquet_files(folder: Path) -> list[Path]:
    """The Parquet files of a folder that loaders see: dot-prefixed ones are none of them."""
    return sorted(p for p in folder.glob("*.parquet") if p.is_file() and p.name[0] != ".")


def first_error(error: pydantic.ValidationError) -> str:
    """The first complaint of pydantic as `key: what`."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{where}: {first['msg']}" if where else first["msg"]


def _is_run(path: Path) -> bool:
    return (path / "manifest.json").is_file() or (path / "commits").is_dir()


def _read_manifest(run: RunView) -> None:
    path = run.root / "manifest.json"
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        run.manifest_error = "no such file"
        return
    except OSError as error:
        run.manifest_error = str(error.strerror)
        return
    except pydantic.ValidationError as error:
        run.manifest_error = first_error(error)
        return
    if manifest.manifest_version != MANIFEST_VERSION:
        run.manifest_error = f"manifest_version {manifest.manifest_version}"
        return
    run.manifest = manifest
    run.listed = {}
    for table in ("shards", "rollouts"):
        for i, raw in enumerate(getattr(manifest, table)):
            record = _parse_record(raw, f"manifest.json: {table}[{i}]")
            if isinstance(record, BadRecord):
                run.bad_listed.append(record)
            else:
                run.listed[record.name] = record


def _read_commits(run: RunView) -> None:
    run.commits = {}
    for path in sorted((run.root / "commits").glob("*.json")):
        source = run.relative(path)
        try:
            raw = pydantic.TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
        except (pydantic.ValidationError, OSError) as error:
            reason = first_error(error) if isinstance(error, ValueError) else str(error)
            run.bad_commits.append(BadRecord(source, reason, outside=False))
            continue
        record = _parse_record(raw, source)
        if isinstance(record, Commit) and record.name != path.stem:
            record = BadRecord(source, f"is the record of {record.name}", outside=False)
        if isinstance(record, BadRecord):
            run.bad_commits.append(record)
        else:
            run.commits[record.name] = record


def _parse_record(raw: dict[str, Any], source: str) -> Commit | BadRecord:
    file = raw.get("file")
    if isinstance(file, str) and not _DATA_FILE.fullmatch(file):
        return BadRecord(source, file, outside=True)
    try:
        # A record's rejects are a JSON list and a tuple in Python, so not strict.
        return Commit.model_validate(raw)
    except pydantic.ValidationError as error:
        return BadRecord(source, first_error(error), outside=False)
