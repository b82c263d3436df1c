"""Rules on one file as a whole: bytes, footer, schema and physical form."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import PipelineError
from pipeline.schema import FOOTER_KEY, load_schema
from pipeline.validate.report import NotChecked, Problem, Rule
from pipeline.validate.rules_semantics import LAYER_KEYS
from pipeline.validate.shard import ShardFile
from pipeline.validate.summary import FileSummary

ROW_GROUP_LIMIT = 256 * 2**20  # uncompressed bytes; readers hold a whole row group
FOOTER_FREE = 256 * 2**10  # a footer this small is fine in any file, past it 1 % is the limit


def size_recorded(file: ShardFile) -> Iterator[Problem]:
    size, recorded = file.path.stat().st_size, file.need_record().bytes
    if size != recorded:
        yield Problem(file=file.name, found=f"{size} bytes", expected=f"{recorded}, as recorded")


def parquet_readable(file: ShardFile) -> Iterator[Problem]:
    if file.parquet is None:
        yield Problem(file=file.name, found=file.parquet_error, expected="a Parquet file")


def footer_readable(file: ShardFile) -> Iterator[Problem]:
    file.need_parquet()
    if file.footer is None:
        yield Problem(
            file=file.name,
            column=f"footer {FOOTER_KEY.decode()}",
            found=file.footer_error,
            expected="the JSON that every file of a run carries",
        )
    elif file.record is not None and file.footer.kind != file.kind:
        yield Problem(
            file=file.name,
            column="footer schemas",
            found=f"a {file.footer.kind} file",
            expected=f"a {file.kind} file, as recorded",
        )


def footer_fingerprint(file: ShardFile) -> Iterator[Problem]:
    found, recorded = file.need_footer().fingerprint, file.need_record().fingerprint
    if found != recorded:
        yield Problem(
            file=file.name,
            column="fingerprint",
            found=found,
            expected=f"{recorded}, as recorded",
        )


def footer_settings(file: ShardFile) -> Iterator[Problem]:
    """Geometry, feature sets, top_k and depth are those of the manifest."""
    footer, manifest = file.need_footer(), file.run.manifest
    if manifest is None:
        raise NotChecked("the directory has no readable manifest.json")
    settings = manifest.settings
    pairs: dict[str, tuple[Any, Any]] = {
        "features": (footer.features, settings.get("features")),
        "top_k": (footer.top_k, settings.get("topk")),
        "depth": (footer.depth, settings.get("depth")),
    }
    if not file.semantics_error:
        pairs["semantics"] = (footer.said, (manifest.model_extra or {}).get("semantics"))
    told = manifest.geometry.as_dict()
    for key, value in footer.geometry.as_dict().items():
        pairs[f"geometry.{key}"] = (value, told[key])
    for key, (found, expected) in pairs.items():
        if found != expected:
            yield Problem(
                file=file.name,
                column=f"footer {key}",
                found=str(found),
                expected=f"{expected}, as in manifest.json",
            )


def schema_digests(file: ShardFile) -> Iterator[Problem]:
    """The schemas it names are shipped here, unchanged, and make up its layout."""
    footer = file.need_footer()
    for ref, digest in sorted(footer.schemas.items()):
        try:
            shipped = load_schema(ref).digest
        except PipelineError as error:
            yield Problem(file=file.name, column=ref, found=str(error), expected="a known schema")
            continue
        if digest != shipped:
            yield Problem(
                file=file.name, column=ref, found=f"digest {digest}", expected=f"{shipped}"
            )
    if file.layout is None and not file.semantics_error:
        yield Problem(
            file=file.name, column="footer", found=file.layout_error, expected="known schemas"
        )
    elif file.layout and (missing := sorted(file.layout.digests().keys() ^ footer.schemas.keys())):
        yield Problem(
            file=file.name,
            column="footer schemas",
            found=", ".join(sorted(footer.schemas)),
            expected=f"{', '.join(sorted(file.layout.digests()))} ({missing[0]} differs)",
        )


def arrow_schema(file: ShardFile) -> Iterator[Problem]:
    """Names, order, types, field metadata and HF features are those of the layout.

    What the metadata says of layers, `semantics.layers` compares.
    """
    found = file.need_parquet().schema_arrow
    expected = file.need_layout().arrow_schema({})
    for there, wanted in itertools.zip_longest(found, expected):
        if wanted is None or there is None or there.name != wanted.name:
            what = "no further column" if there is None else f"column {there.name}"
            name = "no further column" if wanted is None else wanted.name
            yield Problem(file=file.name, found=what, expected=f"{name} in its place")
            return  # what follows is only shifted
        if there.type != wanted.type or there.nullable != wanted.nullable:
            yield Problem(
                file=file.name,
                column=there.name,
                found=_type_text(there),
                expected=_type_text(wanted),
            )
        told, metadata = dict(there.metadata or {}), dict(wanted.metadata or {})
        for key in sorted((told.keys() | metadata.keys()) - LAYER_KEYS):
            if told.get(key) != metadata.get(key):
                yield Problem(
                    file=file.name,
                    column=f"{there.name} metadata {key.decode(errors='replace')}",
                    found=_bytes_text(told.get(key)),
                    expected=_bytes_text(metadata.get(key)),
                )
    if found.metadata.get(b"huggingface") != expected.metadata[b"huggingface"]:
        yield Problem(
            file=file.name,
            column="huggingface",
            found="other features than the columns'",
            expected="the features that load_dataset takes shapes from",
        )


def _type_text(field: Any) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def _bytes_text(value: bytes | None) -> str:
    return "nothing" if value is None else value.decode(errors="replace")


def row_group_size(file: ShardFile) -> Iterator[Problem]:
    metadata = file.need_parquet().metadata
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if group.total_byte_size > ROW_GROUP_LIMIT and group.num_rows > 1:
            yield Problem(
                file=file.name,
                found=f"row group {index}: {group.total_byte_size} bytes in {group.num_rows} rows",
                expected=f"at most {ROW_GROUP_LIMIT}, or a single row",
            )


def footer_size(file: ShardFile) -> Iterator[Problem]:
    size = file.need_parquet().metadata.serialized_size
    limit = max(FOOTER_FREE, file.path.stat().st_size // 100)
    if size > limit:
        yield Problem(file=file.name, found=f"a footer of {size} bytes", expected=f"<= {limit}")


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """A file after its rows were read."""

    file: ShardFile
    summary: FileSummary

    def need_summary(self) -> FileSummary:
        if not self.summary.whole:
            raise NotChecked(f"{self.file.name} could not be read whole")
        return self.summary


def compression(read: ReadFile) -> Iterator[Problem]:
    for path, leaf in read.file.leaves():
        if leaf.compression != "ZSTD":
            yield _leaf_problem(read, path, leaf.compression, "zstd")


def float_encoding(read: ReadFile) -> Iterator[Problem]:
    floats = set(read.file.need_layout().leaf_paths(floats=True))
    for path, leaf in read.file.leaves():
        other = {"PLAIN", "RLE_DICTIONARY", "PLAIN_DICTIONARY"} & set(leaf.encodings)
        if path in floats and leaf.num_values and other:
            yield _leaf_problem(read, path, ", ".join(sorted(leaf.encodings)), "BYTE_STREAM_SPLIT")


def no_statistics(read: ReadFile) -> Iterator[Problem]:
    layout = read.file.need_layout()
    arrays = {*layout.leaf_paths(floats=True), *layout.leaf_paths(floats=False)}
    for path, leaf in read.file.leaves():
        if path in arrays and leaf.is_stats_set:
            yield _leaf_problem(read, path, "statistics", "none on array columns")


def _leaf_problem(read: ReadFile, path: str, found: str, expected: str) -> Problem:
    return Problem(file=read.file.name, column=path, found=found, expected=expected)


def sha256_recorded(read: ReadFile) -> Iterator[Problem]:
    recorded = read.file.need_record().sha256
    if (found := read.summary.sha256) != recorded:
        yield Problem(
            file=read.file.name, found=f"sha256 {found}", expected=f"{recorded}, as recorded"
        )


def counts_recorded(read: ReadFile) -> Iterator[Problem]:
    record, summary = read.file.need_record(), read.need_summary()
    for key in ("rows", "tokens", "supervised_tokens"):
        found, expected = getattr(summary, key), getattr(record, key)
        if found != expected:
            yield Problem(
                file=read.file.name, column=key, found=str(found), expected=f"{expected}, recorded"
            )


def ids_recorded(read: ReadFile) -> Iterator[Problem]:
    recorded = read.file.need_record().ids_sha256
    if (found := read.need_summary().ids_sha256) != recorded:
        yield Problem(
            file=read.file.name,
            column="sample_id",
            found=f"ids_sha256 {found}",
            expected=f"{recorded}, as recorded",
        )


_DAMAGED = "the file is damaged: download it again or extract it again"
_OTHER_WRITER = "something else rewrote the file; extract it again"
_MIXED = "files of two runs are mixed; extract again into a new directory"


def _file_rule(id: str, requires: str, remedy: str, check: Any) -> Rule[Any]:
    return Rule(id=id, requires=requires, remedy=remedy, check=check)


FILE_RULES: tuple[Rule[ShardFile], ...] = (
    _file_rule("files.size", "a file has its recorded size", _DAMAGED, size_recorded),
    _file_rule("parquet.readable", "every file opens as Parquet", _DAMAGED, parquet_readable),
    _file_rule(
        "footer.readable", "the footer says what run and kind", _OTHER_WRITER, footer_readable
    ),
    _file_rule("footer.fingerprint", "a file is of its record's run", _MIXED, footer_fingerprint),
    _file_rule(
        "footer.settings", "geometry and settings are the manifest's", _MIXED, footer_settings
    ),
    _file_rule(
        "schema.digest",
        "its schemas are known here and unchanged",
        "install the version of drafter-features that wrote it",
        schema_digests,
    ),
    _file_rule(
        "schema.arrow",
        "columns, order, types and metadata are its schemas'",
        _OTHER_WRITER,
        arrow_schema,
    ),
    _file_rule(
        "encoding.row_group",
        "row groups hold at most 256 MiB, or one row",
        _OTHER_WRITER,
        row_group_size,
    ),
    _file_rule("encoding.footer", "the footer is small", _OTHER_WRITER, footer_size),
)
# Of the rules on a file that was read, those that need no row of it.
HASH_RULES: tuple[Rule[ReadFile], ...] = (
    _file_rule("files.sha256", "a file has its recorded sha256", _DAMAGED, sha256_recorded),
)
READ_RULES: tuple[Rule[ReadFile], ...] = (
    _file_rule("encoding.compression", "all columns are zstd", _OTHER_WRITER, compression),
    _file_rule(
        "encoding.floats", "float arrays are BYTE_STREAM_SPLIT", _OTHER_WRITER, float_encoding
    ),
    _file_rule(
        "encoding.statistics", "array columns have no statistics", _OTHER_WRITER, no_statistics
    ),
    *HASH_RULES,
    _file_rule("rows.recorded", "rows and tokens are as recorded", _OTHER_WRITER, counts_recorded),
    _file_rule("rows.ids_sha256", "the ids in order are as recorded", _OTHER_WRITER, ids_recorded),
)
