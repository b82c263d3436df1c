"""Rows of Hugging Face datasets: folders saved with `save_to_disk`, or anything that
`datasets.load_dataset` finds."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.prompt_parquet import (
    refuse_extension_name,
    refuse_extension_types,
    without_nulls,
)
from pipeline.prompt_rows import ColumnNames, SourceRow

_SCHEMA_BYTES = 16 * 2**20
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def open_dataset(path: str, columns: ColumnNames) -> Iterator[SourceRow]:
    """Rows of a dataset folder or name, streamed; `NAME:SPLIT` chooses among several splits.

    Raises PipelineError when there is no such folder or name, it cannot be loaded, or it has
    several splits and none is named.
    """
    place, split = Path(path), ""
    if not place.exists() and ":" in path:
        front, _, split = path.rpartition(":")
        place = Path(front)
    if place.is_dir():
        dataset: Any = _load_folder(place)
    else:
        if not _NAME.fullmatch(path) or place.suffix in (".jsonl", ".json", ".parquet"):
            raise PipelineError(f"There is no prompt file or folder {path!r}; check the path")
        dataset = _load(str(place), path)
    if isinstance(dataset, dict):
        dataset = _choose_split(dataset, split, path)
    elif split:
        raise PipelineError(f"{str(place)!r} has no splits; leave out :{split}")
    return _dataset_rows(dataset, place.name, columns)


def _load_folder(folder: Path) -> Any:
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    for file in sorted(folder.rglob("*.parquet")):
        refuse_extension_types(file)
    for file in sorted(folder.rglob("*.arrow")):
        with file.open("rb") as stream:  # the schema opens an Arrow file, as plain bytes
            refuse_extension_name(stream.read(_SCHEMA_BYTES), file)
    if not saved:
        return _load(str(folder), str(folder))
    from datasets import load_from_disk

    try:
        return load_from_disk(str(folder))
    except Exception as error:  # the loader raises whatever its file formats do
        raise PipelineError(f"Saved dataset {folder.name!r} cannot be loaded: {error}") from None


def _load(name: str, given: str) -> Any:
    # Slow to import, and most runs read a file.
    from datasets import load_dataset

    try:
        # Streaming: no second copy in the cache, and memory stays bounded.
        return load_dataset(name, streaming=True)
    except Exception as error:  # anything from a missing name to a refused connection
        raise PipelineError(
            f"There is no local file or folder {given!r}, or it holds no dataset, and "
            f"datasets.load_dataset could not load it: {error}"
            if not Path(name).exists()
            else f"datasets.load_dataset could not load the folder {given!r}: {error}"
        ) from None


def _choose_split(splits: dict[str, Any], wanted: str, path: str) -> Any:
    names = ", ".join(sorted(map(str, splits)))
    if wanted:
        if wanted not in splits:
            raise PipelineError(f"{path!r}: there is no split {wanted!r}, only: {names}")
        return splits[wanted]
    if len(splits) != 1:
        raise PipelineError(f"{path!r} has the splits {names}; name one, as {path}:SPLIT")
    return next(iter(splits.values()))


def _dataset_rows(dataset: Any, name: str, columns: ColumnNames) -> Iterator[SourceRow]:
    known = dataset.column_names  # None when a stream cannot tell before it is read
    if known is not None:
        columns.check(f"Dataset {name!r}", known)
        dataset = dataset.select_columns(columns.wanted(known))
    number = 0
    rows = iter(dataset)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the files behind a stream are opened only now
            raise PipelineError(
                f"Dataset {name!r} cannot be read past row {number}: {error}"
            ) from None
        number += 1
        yield SourceRow(f"{name}:{number}", without_nulls(dict(row)))
