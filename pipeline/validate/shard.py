"""One Parquet file under validation: its footer, and what its own footer says it must hold."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pydantic
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.geometry import feature_layout
from pipeline.manifest import Commit
from pipeline.schema import FOOTER_KEY, BoundColumn, Layout, bind, load_schema
from pipeline.semantics import Semantics, unknown
from pipeline.shards import file_sha256
from pipeline.validate.folder import FOLDER_OF, CheckedGeometry, Kind, RunView, Sha256, first_error
from pipeline.validate.report import NotChecked

READ_BYTES = 2**20  # of a column chunk of a local file at a time


class Footer(BaseModel):
    """What every file of a run says of itself under `FOOTER_KEY`; further keys may follow.

    said: its semantics as they stand there; `semantics` are those that this version knows.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    fingerprint: Sha256
    geometry: CheckedGeometry
    features: str
    top_k: int = Field(ge=1)
    depth: int = Field(ge=1)
    schemas: dict[str, str]
    said: Any = Field(None, alias="semantics")

    @cached_property
    def semantics(self) -> Semantics:
        """What it says the columns mean. Raises pydantic.ValidationError for what is not known."""
        return Semantics.model_validate(self.said)

    @property
    def kind(self) -> Kind:
        return "rollout" if any(ref.startswith("rollout/") for ref in self.schemas) else "shard"

    def layout(self) -> Layout:
        """The columns that its schemas and geometry give. Raises PipelineError for no schema."""
        if self.kind == "rollout":
            schemas = [load_schema(ref) for ref in self.schemas]
            return bind(schemas, sizes={}, dtypes={}, layer_metadata={})
        newest = {ref.partition("/")[0]: ref for ref in sorted(self.schemas)}
        wanted = [newest.get(name, name) for name in self.features.split(",")]
        return feature_layout(
            self.geometry,
            wanted,
            top_k=self.top_k,
            depth=self.depth,
            layers=self.semantics.layers,
        )


@dataclass(kw_only=True)
class ShardFile:
    """A file that is part of the run. Where something could not be read, its error says why.

    name: path under the validated directory; record: None where the run has no records;
    broken: columns of which a row group could not be read.
    """

    run: RunView
    name: str
    path: Path
    kind: Kind
    record: Commit | None
    parquet: pq.ParquetFile | None = None
    parquet_error: str = ""
    footer: Footer | None = None
    footer_error: str = ""
    semantics_error: str = ""
    layout: Layout | None = None
    layout_error: str = ""
    broken: set[str] = field(default_factory=set)

    def open(self) -> None:
        """Read the footer of the file, and from it the layout that the file must have."""
        try:
            local = type(self.path) is type(Path())
            source = self.path if local else self.path.open("rb")
            parquet = pq.ParquetFile(
                source,
                page_checksum_verification=True,
                # Fetching a row group's bytes first spares round trips; a disk has none, and the
                # bytes would only be in memory longer.
                pre_buffer=not local,
                buffer_size=READ_BYTES if local else 0,
            )
            raw = (parquet.schema_arrow.metadata or {}).get(FOOTER_KEY)
            self.parquet = parquet
        except Exception as error:
            # Arrow parses a damaged footer with the extension types' own Python code, which may
            # raise anything (datasets: JSONDecodeError, UnicodeDecodeError, TypeError, …).
            self.parquet_error = f"{type(error).__name__}: {first_line(error)}"
            return
        if raw is None:
            self.footer_error = f"no {FOOTER_KEY.decode()} key"
            return
        try:
            self.footer = Footer.model_validate_json(raw)
        except pydantic.ValidationError as error:
            self.footer_error = first_error(error)
            return
        self.kind = self.footer.kind if self.record is None else self.kind
        try:
            _ = self.footer.semantics
        except pydantic.ValidationError as error:
            self.semantics_error = unknown(error)
            self.layout_error = f"{self.semantics_error}, which this version does not know"
            return
        try:
            self.layout = self.footer.layout()
        except (PipelineError, KeyError) as error:
            self.layout_error = str(error)

    def close(self) -> None:
        if self.parquet is not None:
            self.parquet.close()

    def sha256(self) -> str:
        return file_sha256(self.path)

    def columns(self) -> Iterator[tuple[BoundColumn, bool]]:
        """Every column of the layout; whether the file has it, stored as the layout says."""
        fields = {f.name: f for f in self.need_parquet().schema_arrow}
        expected = {f.name: f.type for f in self.need_layout().arrow_schema({})}
        for column in self.need_layout().columns:
            there = fields.get(column.name)
            yield column, there is not None and there.type == expected[column.name]

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Path and pyarrow metadata of each leaf in each row group, of columns that were read.

        Only after reading: on a damaged footer these objects do not raise, they abort the
        process, while reading the same column raises.
        """
        metadata = self.need_parquet().metadata
        good = {column.name for column, there in self.columns() if there} - self.broken
        paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        wanted = [i for i, path in enumerate(paths) if path.partition(".")[0] in good]
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            if group.num_rows:
                yield from ((paths[i], group.column(i)) for i in wanted)

    def need_record(self) -> Commit:
        if self.record is None:
            raise NotChecked("the directory has no commits/ and no manifest.json")
        return self.record

    def need_parquet(self) -> pq.ParquetFile:
        if self.parquet is None:
            raise NotChecked(f"{self.name} cannot be opened")
        return self.parquet

    def need_footer(self) -> Footer:
        self.need_parquet()
        if self.footer is None:
            raise NotChecked(f"{self.name} has no readable {FOOTER_KEY.decode()} footer")
        return self.footer

    def need_layout(self) -> Layout:
        self.need_footer()
        if self.layout is None:
            raise NotChecked(f"{self.name}: the columns it must have are unknown")
        return self.layout


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def files_of(run: RunView) -> list[ShardFile]:
    """The files to read: those with a record that exist, rollouts first; or all loose ones."""
    if not run.has_records:
        return [
            ShardFile(run=run, name=run.relative(p), path=p, kind="shard", record=None)
            for p in run.loose
        ]
    records = [record for kind in FOLDER_OF for record in run.of_kind(kind)]
    return [
        ShardFile(run=run, name=r.file, path=run.root / r.file, kind=r.kind, record=r)
        for r in records
        if (run.root / r.file).is_file()
    ]
