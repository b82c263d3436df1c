"""What every prompt reader yields, and the names it looks for in a row."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import PipelineError, RowReject

TURNS = ("messages", "conversations")  # where a row's turns are
PAIRS = ("instruction", "prompt")  # or its question
INPUT_KEY = "input"  # what an instruction works on
ANSWER_KEYS = {"instruction": ("output",), "prompt": ("completion", "response")}
RENDERED = ("text", "input_ids")  # or the prompt as the target model reads it
MASK_KEY = "loss_mask"  # which of the input_ids are answers
TOOL_KEYS = ("tools", "functions")

# The only columns read from Parquet and datasets; others may hold images or gigabytes.
COLUMNS = (
    *("id", "sample_id", "system", *TOOL_KEYS, INPUT_KEY, MASK_KEY),
    *TURNS,
    *PAIRS,
    *RENDERED,
    *(key for keys in ANSWER_KEYS.values() for key in keys),
)


class SourceRow(NamedTuple):
    """source: `file.jsonl:12` (1-based); row: the values, or why there are none."""

    source: str
    row: dict[str, Any] | RowReject


class NumberText(str):
    """A JSON number as it is written: a 23-digit id stays exact, and is no text content."""

    __slots__ = ()


class ColumnNames:
    """Which of a source's columns holds what: our names, or others given in their place."""

    def __init__(self, text: str | None = None) -> None:
        """
        text: `prompt=question,id=uid`: ours=theirs, with commas.

        Raises PipelineError: not of that form, a name that is none of COLUMNS, or one twice.
        """
        self._theirs: dict[str, str] = {}
        for pair in text.split(",") if text else ():
            ours, equals, theirs = (part.strip() for part in pair.partition("="))
            if not (equals and theirs):
                raise PipelineError(f"--columns {text}: {pair!r} must be OURS=THEIRS, as id=uid")
            if ours not in COLUMNS:
                known = ", ".join(sorted(COLUMNS))
                raise PipelineError(f"--columns {text}: {ours!r} is none of {known}")
            if ours in self._theirs:
                raise PipelineError(f"--columns {text}: {ours!r} is named twice")
            self._theirs[ours] = theirs

    def wanted(self, there: Collection[str]) -> list[str]:
        """The columns to read among those that are there."""
        names = [self._theirs.get(name, name) for name in COLUMNS]
        return [name for name in dict.fromkeys(names) if name in there]

    def check(self, what: str, there: Collection[str]) -> None:
        """Raise PipelineError if no column can hold a conversation, or a named one is missing."""
        missing = [name for name in self._theirs.values() if name not in there]
        names = ", ".join(map(quote, there))
        if missing:
            raise PipelineError(f"--columns: {what} has no column {missing[0]!r}, only: {names}")
        ours = (*TURNS, *PAIRS, *RENDERED)
        if not {self._theirs.get(name, name) for name in ours} & set(there):
            raise PipelineError(
                f"{what} has none of the columns {', '.join(ours)}, only: {names}; --columns "
                "prompt=NAME names another"
            )

    def renamed(self, row: SourceRow) -> SourceRow:
        """The row under our names. A column that stands in for another hides that one."""
        if isinstance(row.row, RowReject) or not self._theirs:
            return row
        ours = {name: row.row.get(theirs) for name, theirs in self._theirs.items()}
        return SourceRow(row.source, {**row.row, **ours})


def source_group(source: str) -> str:
    """What a row's source is counted under: its tag (`code` of `code:a.jsonl:12`), or without one
    its file or dataset."""
    name, _, number = source.rpartition(":")
    return (name if name and number.isdecimal() else source).partition(":")[0]


def printable_name(path: Path) -> str:
    """A relative path, or the last part of one, as valid text: names need not be UTF-8."""
    return path.as_posix().encode("utf-8", "backslashreplace").decode("utf-8")


def quote(value: object, limit: int = 60) -> str:
    """A value in quotes for a message: short, on one line, without lone surrogates."""
    text = repr(str(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"
