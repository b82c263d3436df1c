"""Rules on which files a run has: each record has its file, each file its record."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.validate.folder import FOLDER_OF, RunView
from pipeline.validate.report import Problem, Rule
from pipeline.validate.rules_records import CHANGED, need_run


def paths_inside(run: RunView) -> Iterator[Problem]:
    need_run(run)
    for bad in [*run.bad_commits, *run.bad_listed]:
        if bad.outside:
            yield Problem(
                file=bad.source,
                column="file",
                found=repr(bad.reason),
                expected="a .parquet file in data/ or rollouts/",
            )


def names_match(run: RunView) -> Iterator[Problem]:
    """A file's name carries its kind, its record's number and the start of its sha256."""
    need_run(run)
    stems = {"shard": ("data/", "train-"), "rollout": ("rollouts/", "part-")}
    for record in run.records.values():
        folder, stem = stems[record.kind]
        start = f"{folder}{stem}{record.name.rpartition('-')[2]}"
        end = f"-{record.sha256[:12]}.parquet"
        if not (record.file.startswith(start) and record.file.endswith(end)):
            yield Problem(file=record.file, found="this name", expected=f"{start}…{end}")


def files_referenced(run: RunView) -> Iterator[Problem]:
    """Nothing lies in data/ or rollouts/ that no record names; loaders would read it."""
    need_run(run)
    known = {record.file for record in run.records.values()}
    for folder in FOLDER_OF.values():
        for path in sorted((run.root / folder).rglob("*")):
            name = run.relative(path)
            if path.is_file() and name not in known and not _hidden(path, run.root):
                yield Problem(file=name, found="a file without a record", expected="no such file")


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def files_exist(run: RunView) -> Iterator[Problem]:
    need_run(run)
    for name, record in sorted(run.records.items()):
        if not (run.root / record.file).is_file():
            yield Problem(file=record.file, found="no such file", expected=f"the file of {name}")


FILE_SET_RULES: tuple[Rule[RunView], ...] = (
    Rule(
        id="files.inside",
        requires="the files of all records lie in data/ and rollouts/",
        remedy="do not use this folder: its records point elsewhere",
        check=paths_inside,
    ),
    Rule(
        id="files.name",
        requires="a file's name carries its kind, number and sha256",
        remedy=CHANGED,
        check=names_match,
    ),
    Rule(
        id="files.unreferenced",
        requires="every file in data/ and rollouts/ has a record",
        remedy="remove the file, or move it out: loaders would read it as data",
        check=files_referenced,
    ),
    Rule(
        id="files.missing",
        requires="every record has its file",
        remedy="download it again, or run the same command again: it resumes",
        check=files_exist,
    ),
)
