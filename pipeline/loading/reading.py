"""Which rows a run has and where they lie, and a row group as torch tensors."""

import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from pipeline.errors import PipelineError
from pipeline.features import TORCH_DTYPES
from pipeline.schema import Layout
from pipeline.semantics import Semantics
from pipeline.shards import file_sha256, row_arrays
from pipeline.validate.folder import open_run
from pipeline.validate.shard import ShardFile, files_of

# Arrow's memory is read-only; every tensor given out is a copy of it.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
# One row: scalars as int or str, arrays as tensors [T, …] in their logical dtype.
Row = dict[str, Any]
_FOOTER_READERS = 16


class RowGroup(NamedTuple):
    """One row group of one file: the unit that is read. first_row: its place among all rows."""

    file: int
    group: int
    rows: int
    first_row: int


class FeatureIndex:
    """The committed shards of a run: their row groups, columns and meaning, from the footers.

    Attributes:
        layout: all columns of the run. columns: those that rows will have, in the layout's order.
        semantics: what they mean. settings: of the run, from the manifest. groups: in row order.
        sliding_window: the window of the target's sliding layers, None without such layers.
    """

    def __init__(
        self,
        out: str | Path,
        columns: Collection[str] | None = None,
        *,
        verify_sha256: bool = False,
        allow_incomplete: bool = False,
        allow_missing: bool = False,
    ) -> None:
        """out: OUT of a run, a path or URL. columns: those to read, all by default.

        verify_sha256: read every file once and check it against its record; pages have their own
        checksums, which are always verified. allow_incomplete: take a run that is not finished.
        allow_missing: take the files that are there, of a shard set or a partial download.

        Raises PipelineError for an unfinished run, a missing or foreign file, an unknown schema
        or meaning (naming it), or a column the run does not have.
        """
        run = open_run(out)
        if run.manifest is None:
            raise PipelineError(f"{out}: no usable manifest.json ({run.manifest_error})")
        if not (run.manifest.complete or allow_incomplete):
            raise PipelineError(
                f"{out}: the run is not finished; finish it, or pass allow_incomplete=True"
            )
        self.out = str(out)
        self.fingerprint = run.manifest.fingerprint
        self.settings = run.manifest.settings
        self._records = run.of_kind("shard")
        self._files = [file for file in files_of(run) if file.kind == "shard"]
        there = {file.name for file in self._files}
        for record in self._records:
            if record.file not in there and not allow_missing:
                raise PipelineError(f"{out}: {record.file} is missing; download it again")
        if not self._files:
            raise PipelineError(f"{out}: no shards")
        with ThreadPoolExecutor(_FOOTER_READERS) as pool:
            rows = list(pool.map(lambda file: self._open(file, verify_sha256), self._files))
        layout, footer = self._files[0].layout, self._files[0].footer
        assert layout is not None and footer is not None  # _open has seen to it
        self.layout: Layout = layout
        self.semantics: Semantics = footer.semantics
        self.sliding_window = footer.geometry.sliding_window
        self.columns = self._chosen(columns)
        self.groups: list[RowGroup] = []
        total = 0
        for number, counts in enumerate(rows):
            for group, count in enumerate(counts):
                if count:
                    self.groups.append(RowGroup(number, group, count, total))
                    total += count
        self.rows = total

    def _open(self, file: ShardFile, verify_sha256: bool) -> list[int]:
        """Check a file's footer and close it; the rows of its row groups."""
        record = file.need_record()
        if verify_sha256 and file_sha256(file.path) != record.sha256:
            raise PipelineError(f"{self.out}: {file.name} is damaged; download it again")
        file.open()
        trouble = file.parquet_error or file.footer_error or file.layout_error
        if trouble:
            raise PipelineError(
                f"{self.out}: {file.name}: {trouble}; `pipeline validate {self.out}` says more"
            )
        if file.need_footer().fingerprint != self.fingerprint:
            raise PipelineError(f"{self.out}: {file.name} is of another run")
        metadata = file.need_parquet().metadata
        if metadata.num_rows != record.rows:
            raise PipelineError(
                f"{self.out}: {file.name} has {metadata.num_rows} rows, recorded {record.rows}"
            )
        counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        file.close()
        file.parquet = None
        return counts

    def _chosen(self, columns: Collection[str] | None) -> list[Any]:
        known = [column.name for column in self.layout.columns]
        for name in columns or ():
            if name not in known:
                raise PipelineError(f"{self.out}: no column {name!r}; there are {', '.join(known)}")
        return [c for c in self.layout.columns if columns is None or c.name in columns]

    def read(self, group: RowGroup) -> list[Row]:
        """The rows of a row group; page checksums verified. Raises PipelineError naming the file.

        Arrays of bfloat16 and float16 columns are converted back, which is exact.
        """
        file = self._files[group.file]
        try:
            with self._parquet(file) as parquet:
                table = parquet.read_row_group(group.group, columns=[c.name for c in self.columns])
        except (OSError, pa.ArrowException) as error:
            raise PipelineError(
                f"{self.out}: {file.name}: row group {group.group} cannot be read: {error}"
            ) from error
        values = [row_arrays(table[c.name], c) for c in self.columns]
        return [
            {c.name: _tensor(v[i], c.dtype) for c, v in zip(self.columns, values, strict=True)}
            for i in range(group.rows)
        ]

    @staticmethod
    def _parquet(file: ShardFile) -> Any:
        local = type(file.path) is type(Path())
        source = file.path if local else file.path.open("rb")
        return pq.ParquetFile(source, page_checksum_verification=True)


def _tensor(value: Any, dtype: str) -> Any:
    if isinstance(value, int | str):
        return value
    tensor = torch.from_numpy(value)
    return tensor.to(TORCH_DTYPES[dtype], copy=True) if dtype in TORCH_DTYPES else tensor.clone()
