"""Split a finished run into shard sets, and put shard sets of one run together again.

A shard set is a run's folder with all of its records and some of its data files, so
`pipeline validate --allow-missing` checks it in full; sets belong together iff their fingerprints
are equal. Files are hard-linked where that is possible, else copied.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.errors import PipelineError
from pipeline.manifest import Commit
from pipeline.new_folder import new_folder
from pipeline.shards import file_sha256
from pipeline.validate.folder import RunView, open_run

_RECORDS = ("rejects.jsonl", "README.md", "manifest.json")  # the manifest last: it says complete


def split_run(directory: Path, parts: int, out: Path) -> list[Path]:
    """Deal the files of a run to `parts` new folders OUT/set-0, OUT/set-1, … of like size.

    Shards and rollouts are dealt apart, each file to the set with the fewest bytes so far. Raises
    PipelineError for an unfinished run, a missing file, fewer shards than parts, or if OUT exists.
    """
    run = finished_run(directory)
    missing = [c.file for c in run.records.values() if not (run.root / c.file).is_file()]
    if missing:
        raise PipelineError(f"{directory}: {missing[0]} is missing; split a whole run")
    shards = run.of_kind("shard")
    if not 1 <= parts <= len(shards):
        raise PipelineError(f"--parts {parts}: the run has {len(shards)} shards")
    dealt: list[list[Commit]] = [[] for _ in range(parts)]
    for records in (shards, run.of_kind("rollout")):
        sizes = [0] * parts
        for record in records:
            least = sizes.index(min(sizes))
            dealt[least].append(record)
            sizes[least] += record.bytes
    with new_folder(out) as staged:
        for number, records in enumerate(dealt):
            target = staged / f"set-{number}"
            _place(((run.root / c.file, c.file) for c in records), target)
            _place_records(run, target)
    return [out / f"set-{number}" for number in range(parts)]


def merge_sets(directories: Sequence[Path], out: Path) -> int:
    """Put shard sets of one run together in the new folder `out`; returns the number of files.

    Every file is checked against its record; of several copies a good one is taken. Raises
    PipelineError if fingerprints or records differ, or a file is nowhere or damaged everywhere.
    """
    runs = [finished_run(directory) for directory in directories]
    first = runs[0]
    for run in runs[1:]:
        if _fingerprint(run) != _fingerprint(first):
            raise PipelineError(
                f"{run.root}: its fingerprint is {_fingerprint(run)[:12]}, that of {first.root} "
                f"{_fingerprint(first)[:12]}; only sets of the same run can be merged"
            )
        if run.records != first.records:
            raise PipelineError(f"{run.root}: has other commit records than {first.root}")
    found = [(_good_copy(record, runs), record.file) for record in first.records.values()]
    with new_folder(out) as staged:
        _place(found, staged)
        _place_records(first, staged)
    return len(found)


def finished_run(directory: Path) -> RunView:
    """A complete run with records that can be read. Raises PipelineError."""
    run = open_run(directory)
    if run.manifest is None or not run.manifest.complete:
        raise PipelineError(f"{directory}: holds no finished run")
    if run.bad_commits or run.bad_listed:
        bad = (*run.bad_commits, *run.bad_listed)[0]
        raise PipelineError(f"{directory}: {bad.source}: {bad.reason}")
    return run


def _fingerprint(run: RunView) -> str:
    assert run.manifest is not None  # finished_run has seen to it
    return run.manifest.fingerprint


def _good_copy(record: Commit, runs: Iterable[RunView]) -> Path:
    copies = [run.root / record.file for run in runs if (run.root / record.file).is_file()]
    for copy in copies:
        if copy.stat().st_size == record.bytes and file_sha256(copy) == record.sha256:
            return copy
    where = f"damaged in {copies[0].parent.parent}" if copies else "in none of the sets"
    raise PipelineError(f"{record.file}: {where}; nothing was merged")


def _place(files: Iterable[tuple[Path, str]], target: Path) -> None:
    for source, name in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, place)
        except OSError:  # another file system, or one without links
            shutil.copy2(source, place)


def _place_records(run: RunView, target: Path) -> None:
    folders = [p for folder in ("plan", "commits") for p in sorted((run.root / folder).glob("*"))]
    files = [*folders, *(run.root / name for name in _RECORDS)]
    # Copies: records may be written anew in place, which a link would carry into the other folder.
    for source in files:
        if source.is_file():
            place = target / source.relative_to(run.root)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place)
