"""Schemas: `schemas/NAME/vN.toml` -> Arrow schema, Hugging Face features, column table, digest.

The TOML is the only place where a column is described; everything here derives from it.
A schema names its axes (`T`, `hidden`, …) and may leave a dtype open (`hidden_dtype`); `bind`
fixes both for one target model and gives the layout of a run's shards. No torch here.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa

from pipeline.errors import PipelineError

# Logical dtype -> how it is stored. The three float types are stored as float32: exact, and the
# unused low byte planes vanish under BYTE_STREAM_SPLIT + zstd (DESIGN §4).
STORED_AS = {
    "string": "string",
    "int32": "int32",
    "uint8": "uint8",
    "float32": "float32",
    "float16": "float32",
    "bfloat16": "float32",
}
FLOAT_DTYPES = frozenset({"float32", "float16", "bfloat16"})
DTYPE_SYMBOLS = frozenset({"hidden_dtype", "kv_dtype"})
# Of the field metadata `block`.
BLOCK_OUTPUT = "output of the 0-based decoder block"
# The key in a Parquet footer that holds what the run says of its shards, as JSON.
FOOTER_KEY = b"drafter_features"
# Beside the package in a checkout, inside it in an installed wheel (pyproject.toml).
_HERE = Path(__file__).parent
SCHEMA_ROOT = _HERE / "schemas" if (_HERE / "schemas").is_dir() else _HERE.parent / "schemas"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column as the TOML states it.

    layer_type: it exists only in targets with such layers (sliding, full); "block": it stands for
    one column for each chosen decoder block, `{i}` in its name being the block.
    """

    name: str
    dtype: str
    shape: tuple[str, ...]
    meaning: str
    transformers: str
    llamacpp: str
    layer_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class Schema:
    name: str
    version: int
    summary: str
    columns: tuple[Column, ...]
    digest: str = field(compare=False)

    @property
    def ref(self) -> str:
        return f"{self.name}/v{self.version}"


@dataclass(frozen=True, kw_only=True)
class BoundColumn:
    """One column of a run. shape: None for T, a number for every other axis."""

    name: str
    dtype: str
    axes: tuple[str, ...]
    shape: tuple[int | None, ...]
    meaning: str
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored_as(self) -> str:
        return STORED_AS[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's values in the logical dtype; 0 for columns without a T axis."""
        if not self.shape:
            return 0
        size = {"bfloat16": 2, "float16": 2, "uint8": 1}.get(self.dtype, 4)
        return size * math.prod(self.inner_shape)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The fixed axes after T."""
        return cast(tuple[int, ...], self.shape[1:])

    def hf_feature(self) -> Any:
        """The `datasets` feature: a Value, a List, or a shaped Array2D / Array3D."""
        if not self.shape:
            return datasets.Value(self.stored_as)
        if len(self.shape) == 1:
            return datasets.List(datasets.Value(self.stored_as))
        array = {2: datasets.Array2D, 3: datasets.Array3D}[len(self.shape)]
        return array(shape=self.shape, dtype=self.stored_as)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The columns of one run's files, in order: the union of its schemas, each column once."""

    schemas: tuple[Schema, ...]
    columns: tuple[BoundColumn, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(column.bytes_per_token for column in self.columns)

    @property
    def block_layers(self) -> tuple[int, ...]:
        """The 0-based blocks whose outputs it holds, rising."""
        return tuple(int(c.metadata["block"]) for c in self.columns if "block" in c.metadata)

    @property
    def stored_bytes_per_token(self) -> int:
        """Bytes of one token before compression, as stored (the float types take 4 each)."""
        return sum(
            column.bytes_per_token * (2 if column.dtype in ("bfloat16", "float16") else 1)
            for column in self.columns
        )

    def digests(self) -> dict[str, str]:
        return {schema.ref: schema.digest for schema in self.schemas}

    def features(self) -> Any:
        return datasets.Features({c.name: c.hf_feature() for c in self.columns})

    def arrow_schema(self, footer: Mapping[str, Any]) -> pa.Schema:
        """The Arrow schema of a file; `footer` is stored as JSON under `FOOTER_KEY`."""
        features = self.features()
        fields = [
            pa.field(
                c.name,
                features[c.name]() if len(c.shape) > 1 else storage_type(c),
                metadata={"logical_dtype": c.dtype, "axes": ",".join(c.axes), **c.metadata},
            )
            for c in self.columns
        ]
        # The same JSON as Features.arrow_schema writes: load_dataset takes shapes from it.
        hf = features.arrow_schema.metadata[b"huggingface"]
        own = json.dumps(footer, sort_keys=True).encode()
        return pa.schema(fields, metadata={b"huggingface": hf, FOOTER_KEY: own})

    def leaf_paths(self, *, floats: bool) -> list[str]:
        """Parquet paths of the array leaves: the float ones, or all others."""
        return [
            c.name + ".list.element" * len(c.shape)
            for c in self.columns
            if c.shape and (c.dtype in FLOAT_DTYPES) == floats
        ]


def storage_type(column: BoundColumn) -> pa.DataType:
    """The plain Arrow type under a column: nested lists, one level per axis."""
    arrow: pa.DataType = getattr(pa, column.stored_as)()
    for _ in column.shape:
        arrow = pa.list_(arrow)
    return arrow


def schema_refs() -> list[str]:
    """Every shipped schema as NAME/vN, sorted."""
    return sorted(f"{file.parent.name}/{file.stem}" for file in SCHEMA_ROOT.glob("*/v*.toml"))


def load_schema(ref: str) -> Schema:
    """Read `NAME` (its newest version) or `NAME/vN`. Raises PipelineError if there is none."""
    refs = schema_refs()
    if "/" not in ref:
        versions = [r for r in refs if r.split("/")[0] == ref]
        ref = max(versions, key=lambda r: int(r.split("/v")[1]), default=ref)
    if ref not in refs:
        raise PipelineError(f"no schema {ref!r}; there are: {', '.join(refs)}")
    raw = tomllib.loads((SCHEMA_ROOT / f"{ref}.toml").read_text(encoding="utf-8"))
    columns = tuple(
        Column(**{**column, "shape": tuple(column["shape"])}) for column in raw["columns"]
    )
    # The digest covers what the TOML says, not how it is laid out: comments do not count.
    canonical = json.dumps(raw, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return Schema(
        name=raw["name"],
        version=raw["version"],
        summary=raw["summary"],
        columns=columns,
        digest=hashlib.sha256(canonical.encode()).hexdigest(),
    )


def bind(
    schemas: Sequence[Schema],
    *,
    sizes: Mapping[str, int],
    dtypes: Mapping[str, str],
    layer_metadata: Mapping[str, Mapping[str, str]],
    block_layers: Sequence[int] = (),
) -> Layout:
    """Fix the open axes and dtypes of some schemas for one run.

    sizes: axis name -> length; dtypes: `hidden_dtype` and `kv_dtype` -> logical dtype;
    layer_metadata: layer type the target has -> field metadata of its columns (layer, RoPE state).
    block_layers: the blocks, rising, that each "block" column stands for.
    Scalars and short columns come first, so that viewers and projections find them at once.
    Raises PipelineError if two schemas disagree on a column.
    """
    columns: dict[str, Column] = {}
    for schema in schemas:
        for column in schema.columns:
            if columns.setdefault(column.name, column) != column:
                raise PipelineError(f"column {column.name!r} of {schema.ref} is defined otherwise")
    single = [part for c in columns.values() for part in _single(c, block_layers, layer_metadata)]
    bound = [
        BoundColumn(
            name=c.name,
            dtype=dtypes[c.dtype] if c.dtype in DTYPE_SYMBOLS else c.dtype,
            axes=c.shape,
            shape=tuple(None if axis == "T" else sizes[axis] for axis in c.shape),
            meaning=c.meaning,
            metadata=metadata,
        )
        for c, metadata in single
    ]
    bound.sort(key=lambda c: len(c.shape))
    return Layout(schemas=tuple(schemas), columns=tuple(bound))


def _single(
    column: Column, block_layers: Sequence[int], layer_metadata: Mapping[str, Mapping[str, str]]
) -> list[tuple[Column, Mapping[str, str]]]:
    """The columns of a run that one of the TOML stands for, with their field metadata."""
    if column.layer_type is None:
        return [(column, {})]
    if column.layer_type != "block":
        metadata = layer_metadata.get(column.layer_type)
        return [] if metadata is None else [(column, metadata)]
    return [
        (
            replace(
                column,
                name=column.name.replace("{i}", str(i)),
                meaning=column.meaning.replace("block i", f"block {i}"),
            ),
            {"block": str(i), "layer_convention": BLOCK_OUTPUT},
        )
        for i in block_layers
    ]


def column_table(schema: Schema) -> list[dict[str, str]]:
    """The columns of a schema as text cells, for the CLI and the dataset card."""
    rows = []
    for column in schema.columns:
        cells = {k: v for k, v in asdict(column).items() if k != "layer_type"}
        cells["shape"] = "[" + ", ".join(column.shape) + "]" if column.shape else "scalar"
        rows.append(cells)
    return rows
