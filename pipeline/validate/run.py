"""`validate`: every rule over a run's folder, one row group in memory at a time."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.validate.folder import open_run
from pipeline.validate.reading import read_group
from pipeline.validate.report import Recorder, Report, Rule, Tally, Worst
from pipeline.validate.rules_answers import ANSWER_RULES
from pipeline.validate.rules_files import FILE_SET_RULES
from pipeline.validate.rules_format import FILE_RULES, HASH_RULES, READ_RULES, ReadFile
from pipeline.validate.rules_plan import PLAN_RULES
from pipeline.validate.rules_records import RECORD_RULES
from pipeline.validate.rules_rows import ROW_RULES
from pipeline.validate.rules_run import RUN_RULES, ReadRun
from pipeline.validate.rules_semantics import SAME_RULES, SEMANTICS_RULES
from pipeline.validate.rules_states import STATE_RULES
from pipeline.validate.rules_teacher import TEACHER_RULES
from pipeline.validate.shard import ShardFile, files_of
from pipeline.validate.summary import FileSummary, Summarizer

ALL_FILE_RULES = (*FILE_RULES, *SEMANTICS_RULES)
GROUP_RULES = (*ROW_RULES, *ANSWER_RULES, *STATE_RULES, *TEACHER_RULES)
# In the order of the report; the id is the rule's name for good.
RULES: tuple[Rule[Any], ...] = (
    *RECORD_RULES,
    *PLAN_RULES,
    *FILE_SET_RULES,
    *ALL_FILE_RULES,
    *READ_RULES,
    *RUN_RULES,
    *SAME_RULES,
    *GROUP_RULES,
)
# What a copy without some files cannot keep to.
NEED_ALL_FILES = frozenset({"files.missing", "plan.files", "rows.order"})
# One process decodes on all cores already; of less than this, others would only start.
PARALLEL_BYTES = 10**9
# Takes bytes done and bytes in all.
Progress = Callable[[int, int], None]


class Replay(NamedTuple):
    """Rows to take through the target model again: how many, through what, drawn by which seed."""

    rows: int
    target: str
    seed: int = 0


def validate(
    out: str | Path,
    *,
    on_progress: Progress | None = None,
    replay: Replay | None = None,
    quick: bool = False,
    allow_missing: bool = False,
    processes: int | None = None,
) -> Report:
    """Check a run's folder OUT, OUT/data, or a directory with just shards.

    Lists every finding; what cannot be checked is reported as skipped with the reason.
    quick: records, footers and hashes only; allow_missing: a copy that lacks files is fine;
    processes: how many files are read at once, by default one a core where there is much to read.
    Raises PipelineError where `out` is no such directory.
    """
    started = time.monotonic()
    run = open_run(out)
    replay_rules: tuple[Rule[Any], ...] = ()
    if replay is not None:
        from pipeline.validate.replay import REPLAY_RULES, replay_rows  # torch

        replay_rules = REPLAY_RULES
    recorder = Recorder((*RULES, *replay_rules))
    files = files_of(run)
    partial = allow_missing and len(files) < len(run.records)
    not_here = NEED_ALL_FILES if partial else frozenset()
    recorder.run(_without(not_here, (*RECORD_RULES, *PLAN_RULES, *FILE_SET_RULES)), run)
    if not files:
        recorder.skip((*ALL_FILE_RULES, *READ_RULES, *GROUP_RULES), "there is no file to read")
    sizes = [file.path.stat().st_size for file in files]
    summaries = _check_files(out, files, sizes, recorder, quick, processes, on_progress)
    read = ReadRun(run=run, summaries=tuple(summaries))
    recorder.run(SAME_RULES, read)
    if quick:
        rest = tuple(rule for rule in READ_RULES if rule not in HASH_RULES)
        recorder.skip((*rest, *GROUP_RULES, *RUN_RULES), "--quick reads no rows")
    else:
        recorder.run(_without(not_here, RUN_RULES), read)
    if not_here:
        missing = len(run.records) - len(files)
        left_out: list[Rule[Any]] = [r for r in RULES if r.id in not_here]
        recorder.skip(left_out, f"{missing} files are not here (--allow-missing)")
    worst: dict[str, Worst] = {}
    drawn: list[str] = []
    if replay is not None:
        for row in replay_rows(out, replay.target, replay.rows, replay.seed):
            recorder.run(replay_rules, row)
            if row.drawn:
                drawn.append(row.row_id)
            for column, found in row.worst.items():
                worst[column] = max(found, worst.get(column, found))
    shards = [s for s in summaries if s.file.kind == "shard"]
    return Report(
        path=str(out),
        rules=recorder.results(),
        findings=recorder.findings(),
        files=len(files),
        rows=sum(s.rows for s in shards),
        tokens=sum(s.tokens for s in shards),
        bytes=sum(sizes),
        seconds=round(time.monotonic() - started, 3),
        replay=worst,
        drawn=tuple(drawn),
        replay_seed=replay.seed if replay else None,
    )


def _without(ids: frozenset[str], rules: Iterable[Rule[Any]]) -> list[Rule[Any]]:
    return [rule for rule in rules if rule.id not in ids]


def _check_files(
    out: str | Path,
    files: list[ShardFile],
    sizes: list[int],
    recorder: Recorder,
    quick: bool,
    processes: int | None,
    on_progress: Progress | None,
) -> list[FileSummary]:
    """The rules on each file, in this process or in several; the report is the same."""
    total, done = sum(sizes), 0

    def progress(bytes_done: int) -> None:
        if on_progress is not None:
            on_progress(bytes_done, total)

    if processes is None:
        processes = _cores() if total >= PARALLEL_BYTES else 1
    processes = min(processes, len(files))
    summaries: list[FileSummary] = []
    if processes <= 1:
        for file, size in zip(files, sizes, strict=True):
            start = done
            summaries.append(
                _check_file(
                    file,
                    recorder,
                    quick,
                    lambda s, a=start, b=size: progress(a + round(s * b)),  # type: ignore[misc]
                )
            )
            done += size
        return summaries
    spawn = multiprocessing.get_context("spawn")  # forking a process with threads may hang it
    with ProcessPoolExecutor(processes, spawn, _open_in_process, (str(out), quick)) as pool:
        for i, (tallies, summary) in enumerate(pool.map(_check_in_process, range(len(files)))):
            summary.file = files[i]
            recorder.merge(tallies)
            summaries.append(summary)
            done += sizes[i]
            progress(done)
    return summaries


_here: tuple[list[ShardFile], bool]  # of a process that checks files: all of them, and `quick`


def _open_in_process(out: str, quick: bool) -> None:
    global _here
    pa.set_cpu_count(1)
    _here = files_of(open_run(out)), quick


def _check_in_process(index: int) -> tuple[dict[str, Tally], FileSummary]:
    files, quick = _here
    recorder = Recorder(RULES)
    summary = _check_file(files[index], recorder, quick, lambda share: None)
    # The file knows the whole run, which the other side has.
    return recorder.tallies, replace(summary, file=None)  # type: ignore[arg-type]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_file(
    file: ShardFile, recorder: Recorder, quick: bool, progress: Callable[[float], None]
) -> FileSummary:
    """All rules on one file; progress takes the share of its row groups that are done."""
    # Hashing runs beside the decoding: both mostly leave the interpreter alone.
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(file.sha256)
        file.open()
        recorder.run(ALL_FILE_RULES, file)
        summarizer = Summarizer(file, digest.result)
        if not quick:
            _check_groups(file, recorder, summarizer, progress)
        file.close()
        summary = summarizer.finish()
        rules = HASH_RULES if quick else READ_RULES
        recorder.run(rules, ReadFile(file=file, summary=summary))
    progress(1.0)
    return summary


def _check_groups(
    file: ShardFile,
    recorder: Recorder,
    summarizer: Summarizer,
    progress: Callable[[float], None],
) -> None:
    if file.layout is None or file.parquet is None:
        recorder.skip(GROUP_RULES, f"{file.name} has no footer that says what it holds")
        return
    metadata = file.parquet.metadata
    if metadata.num_rows == 0:
        recorder.skip(GROUP_RULES, f"{file.name} has no rows")
    first_row = 0
    # Reading one ahead was tried: with a second row group alive Arrow's allocator takes fresh pages
    # all the time, which costs as much as it saves.
    for index in range(metadata.num_row_groups):
        if rows := metadata.row_group(index).num_rows:
            group = read_group(file, index, first_row)
            recorder.run(GROUP_RULES, group)
            summarizer.add(group)
            first_row += rows
            del group
        progress((index + 1) / metadata.num_row_groups)
