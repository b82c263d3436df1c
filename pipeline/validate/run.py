"""`validate`: every rule over a run's folder, one row group in memory at a time."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.validate.folder import open_run
from pipeline.validate.reading import read_group
from pipeline.validate.report import Recorder, Report, Rule, Worst
from pipeline.validate.rules_files import FILE_SET_RULES
from pipeline.validate.rules_format import FILE_RULES, READ_RULES, ReadFile
from pipeline.validate.rules_records import RECORD_RULES
from pipeline.validate.rules_rows import ROW_RULES
from pipeline.validate.rules_run import RUN_RULES, ReadRun
from pipeline.validate.rules_states import STATE_RULES
from pipeline.validate.rules_teacher import TEACHER_RULES
from pipeline.validate.shard import ShardFile, files_of
from pipeline.validate.summary import FileSummary, Summarizer

GROUP_RULES = (*ROW_RULES, *STATE_RULES, *TEACHER_RULES)
# In the order of the report; the id is the rule's name for good.
RULES: tuple[Rule[Any], ...] = (
    *RECORD_RULES,
    *FILE_SET_RULES,
    *FILE_RULES,
    *READ_RULES,
    *RUN_RULES,
    *GROUP_RULES,
)
# Takes bytes done and bytes in all.
Progress = Callable[[int, int], None]


class Replay(NamedTuple):
    """Rows to take through the target model again: how many, through what, drawn by which seed."""

    rows: int
    target: str
    seed: int = 0


def validate(
    out: Path, *, on_progress: Progress | None = None, replay: Replay | None = None
) -> Report:
    """Check a run's folder OUT, OUT/data, or a directory with just shards.

    Lists every finding; what cannot be checked is reported as skipped with the reason. Raises
    PipelineError where `out` is no such directory.
    """
    started = time.monotonic()
    run = open_run(out)
    replay_rules: tuple[Rule[Any], ...] = ()
    if replay is not None:
        from pipeline.validate.replay import REPLAY_RULES, replay_rows  # torch

        replay_rules = REPLAY_RULES
    recorder = Recorder((*RULES, *replay_rules))
    recorder.run((*RECORD_RULES, *FILE_SET_RULES), run)
    files = files_of(run)
    if not files:
        recorder.skip((*FILE_RULES, *READ_RULES, *GROUP_RULES), "there is no file to read")
    sizes = [file.path.stat().st_size for file in files]
    summaries = []
    for i, file in enumerate(files):

        def progress(share: float, i: int = i) -> None:
            if on_progress is not None:
                on_progress(sum(sizes[:i]) + round(share * sizes[i]), sum(sizes))

        summaries.append(_check_file(file, recorder, progress))
    recorder.run(RUN_RULES, ReadRun(run=run, summaries=tuple(summaries)))
    worst: dict[str, Worst] = {}
    if replay is not None:
        for row in replay_rows(out, replay.target, replay.rows, replay.seed):
            recorder.run(replay_rules, row)
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
    )


def _check_file(
    file: ShardFile, recorder: Recorder, progress: Callable[[float], None]
) -> FileSummary:
    """All rules on one file; progress takes the share of its row groups that are done."""
    # Hashing runs beside the decoding: both mostly leave the interpreter alone.
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(file.sha256)
        file.open()
        recorder.run(FILE_RULES, file)
        summarizer = Summarizer(file, digest.result)
        if file.layout is None or file.parquet is None:
            recorder.skip(GROUP_RULES, f"{file.name} has no footer that says what it holds")
        else:
            metadata, first_row = file.parquet.metadata, 0
            if metadata.num_rows == 0:
                recorder.skip(GROUP_RULES, f"{file.name} has no rows")
            for index in range(metadata.num_row_groups):
                if rows := metadata.row_group(index).num_rows:
                    group = read_group(file, index, first_row)
                    recorder.run(GROUP_RULES, group)
                    summarizer.add(group)
                    first_row += rows
                    del group  # or two row groups would be in memory at once
                progress((index + 1) / metadata.num_row_groups)
        file.close()
        summary = summarizer.finish()
        recorder.run(READ_RULES, ReadFile(file=file, summary=summary))
    progress(1.0)
    return summary
