"""Rules on what files say their columns mean: known here, true to themselves, the same in all."""

from collections.abc import Iterator
from typing import Any

from pipeline.layers import LAYERED_SETS
from pipeline.semantics import of_geometry
from pipeline.validate.report import NotChecked, Problem, Rule
from pipeline.validate.rules_run import ReadRun
from pipeline.validate.shard import Footer, ShardFile

# The keys of a column's metadata that say which block it is of.
LAYER_KEYS = frozenset({b"layer", b"block", b"layer_convention"})


def need_semantics(file: ShardFile) -> Footer:
    """The footer of a file whose semantics are known. Raises NotChecked."""
    footer = file.need_footer()
    if file.semantics_error:
        raise NotChecked(f"{file.name}: {file.semantics_error}")
    return footer


def semantics_known(file: ShardFile) -> Iterator[Problem]:
    file.need_footer()
    if file.semantics_error:
        yield Problem(
            file=file.name,
            column="footer",
            found=file.semantics_error,
            expected="semantics that this version knows",
        )


def semantics_of_model(file: ShardFile) -> Iterator[Problem]:
    """RoPE, embedding scale, soft-cap and scorer stand twice in a footer."""
    footer = need_semantics(file)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(footer.semantics, name), value)
        for name, value in of_geometry(footer.geometry).items()
    }
    backend = (footer.model_extra or {}).get("backend")
    if backend is not None:
        pairs["scored_by"] = (footer.semantics.scored_by, backend)
    for name, (found, expected) in pairs.items():
        if found != expected:
            yield Problem(
                file=file.name,
                column=f"footer semantics.{name}",
                found=str(found),
                expected=f"{expected}, as the footer's geometry and backend say",
            )


def layers_named(file: ShardFile) -> Iterator[Problem]:
    """The blocks are the target model's, and each column's metadata is of the block it is named."""
    footer = need_semantics(file)
    sets = [name for name in footer.features.split(",") if name in LAYERED_SETS]
    if sorted(footer.semantics.layers) != sorted(sets):
        yield Problem(
            file=file.name,
            column="footer semantics.layers",
            found=f"blocks of {', '.join(sorted(footer.semantics.layers)) or 'no set'}",
            expected=f"of {', '.join(sets) or 'none'}, its feature sets that hold blocks",
        )
    last = footer.geometry.num_layers - 1
    for name, blocks in footer.semantics.layers.items():
        if sorted(set(blocks)) != list(blocks) or not all(0 <= i <= last for i in blocks):
            yield Problem(
                file=file.name,
                column=f"footer semantics.layers.{name}",
                found=", ".join(map(str, blocks)),
                expected=f"blocks from 0 to {last}, rising",
            )
    wanted = {column.name: column.metadata for column in file.need_layout().columns}
    for field in file.need_parquet().schema_arrow:
        expected = {k.encode(): v.encode() for k, v in wanted.get(field.name, {}).items()}
        there = field.metadata or {}
        for key in sorted(LAYER_KEYS):
            if there.get(key) != expected.get(key):
                yield Problem(
                    file=file.name,
                    column=f"{field.name} metadata {key.decode()}",
                    found=there.get(key, b"nothing").decode(errors="replace"),
                    expected=expected.get(key, b"nothing").decode(),
                )


def semantics_same(read: ReadRun) -> Iterator[Problem]:
    """All files say the same, also where there is no manifest to compare them with."""
    known = [summary for summary in read.summaries if summary.semantics is not None]
    if not known:
        raise NotChecked("no file has semantics that are known")
    first = known[0]
    told = first.semantics or {}
    for summary in known[1:]:
        own = summary.semantics or {}
        for name in sorted(told.keys() | own.keys()):
            if own.get(name) != told.get(name):
                yield Problem(
                    file=summary.file.name,
                    column=f"footer semantics.{name}",
                    found=str(own.get(name, "nothing")),
                    expected=f"{told.get(name, 'nothing')}, as in {first.file.name}",
                )


_UNKNOWN = "read these files with the version of drafter-features that wrote them"
_REWRITTEN = "something else rewrote the file; extract it again"
SEMANTICS_RULES: tuple[Rule[ShardFile], ...] = (
    Rule(
        id="semantics.known",
        requires="what its footer says the columns mean is known here, and nothing is left unsaid",
        remedy=_UNKNOWN,
        check=semantics_known,
    ),
    Rule(
        id="semantics.model",
        requires="RoPE, embedding scale, soft-cap and scorer are those of its geometry and backend",
        remedy=_REWRITTEN,
        check=semantics_of_model,
    ),
    Rule(
        id="semantics.layers",
        requires="its blocks are the target model's, and a column's layer metadata is of the block "
        "in its name",
        remedy=_REWRITTEN,
        check=layers_named,
    ),
)
SAME_RULES: tuple[Rule[ReadRun], ...] = (
    Rule(
        id="semantics.same",
        requires="all files say the same of what their columns mean",
        remedy="files of two runs are mixed; take them apart",
        check=semantics_same,
    ),
)
