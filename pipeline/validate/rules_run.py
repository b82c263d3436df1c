"""Rules across files: ids unique over the run, shards made of exactly the rollouts' rows."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.validate.folder import Kind, RunView
from pipeline.validate.report import NotChecked, Problem, Rule, quoted
from pipeline.validate.rules_plan import plan_part, read_planned
from pipeline.validate.summary import FileSummary, UInt64Array, id_digest


@dataclass(frozen=True, kw_only=True)
class ReadRun:
    """The run after all its files were read, in the order of their rows."""

    run: RunView
    summaries: tuple[FileSummary, ...]

    def of_kind(self, kind: Kind) -> list[FileSummary]:
        return [s for s in self.summaries if s.file.kind == kind]

    def need_whole(self, kind: Kind) -> list[FileSummary]:
        """All files of a kind. Raises NotChecked if one is missing or not read whole."""
        if not self.run.has_records:
            raise NotChecked("the directory has no commits/ and no manifest.json")
        if self.run.manifest is not None and not self.run.manifest.complete:
            raise NotChecked("the run is not finished")
        found = self.of_kind(kind)
        for record in self.run.of_kind(kind):
            if all(s.file.name != record.file for s in found):
                raise NotChecked(f"{record.file} is missing")
        for summary in found:
            if not summary.whole:
                raise NotChecked(f"{summary.file.name} could not be read whole")
        return found


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of several files in order. file: which of them each row is in; row: its place there."""

    files: tuple[FileSummary, ...]
    ids: UInt64Array
    content: UInt64Array

    @classmethod
    def of(cls, files: list[FileSummary]) -> "Rows":
        none = [np.zeros(0, dtype=np.uint64)]
        return cls(
            files=tuple(files),
            ids=np.concatenate([s.ids for s in files] or none),
            content=np.concatenate([s.content for s in files] or none),
        )

    def place(self, index: int) -> tuple[FileSummary, str]:
        """The file of a row, and its sample id, read from there."""
        for summary in self.files:
            if index < len(summary.ids):
                break
            index -= len(summary.ids)
        column = pq.read_table(summary.file.path, columns=["sample_id"])["sample_id"]
        return summary, str(column[index].as_py())

    def problem(self, index: int, found: str, expected: str) -> Problem:
        summary, sample_id = self.place(index)
        return Problem(file=summary.file.name, row=sample_id, found=found, expected=expected)


def unique_ids(read: ReadRun) -> Iterator[Problem]:
    """No sample id comes twice among the shards, nor among the rollouts."""
    checked = False
    for kind in ("rollout", "shard"):
        files = [s for s in read.of_kind(kind) if s.whole]
        rows = Rows.of(files)
        checked |= bool(files)
        order = np.argsort(rows.ids, kind="stable")
        ids = rows.ids[order]
        for at in (np.flatnonzero(ids[1:] == ids[:-1]) + 1).tolist():
            first, again = rows.place(int(order[at - 1])), rows.place(int(order[at]))
            if first[1] == again[1]:  # 64 bits may collide in a very large run
                yield rows.problem(int(order[at]), f"also in {first[0].file.name}", "one such row")
    if not checked:
        raise NotChecked("no file could be read whole")


def rollout_order(read: ReadRun) -> Iterator[Problem]:
    """The shards' rows are the rollouts' rows in order, without those rejected in between."""
    shards, rollouts = read.need_whole("shard"), read.need_whole("rollout")
    rejected = {
        id_digest(reject.sample_id)
        for summary in shards
        for reject in summary.file.need_record().rejects
        if reject.sample_id is not None
    }
    source, rows = Rows.of(rollouts), Rows.of(shards)
    kept = ~np.isin(source.ids, np.array(sorted(rejected), dtype=np.uint64))
    missing = np.flatnonzero(kept & ~np.isin(source.ids, rows.ids))
    extra = np.flatnonzero(~np.isin(rows.ids, source.ids[kept]))
    for index in missing.tolist():
        yield source.problem(index, "in no shard and not rejected", "one row in a shard")
    for index in extra.tolist():
        yield rows.problem(index, "in no rollout, or rejected", "a row of the rollouts")
    if missing.size or extra.size:
        return
    wanted, there = _first_seen(source.ids[kept]), _first_seen(rows.ids)
    differing = np.flatnonzero(wanted != there)
    if differing.size:
        at = int(np.flatnonzero(rows.ids == there[differing[0]])[0])
        due = int(np.flatnonzero(source.ids == wanted[differing[0]])[0])
        yield rows.problem(
            at, "out of order", f"row {quoted(source.place(due)[1])} here, as in the rollouts"
        )


def _first_seen(ids: UInt64Array) -> UInt64Array:
    """Without repeats, which `rows.unique` names."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]


def rollout_content(read: ReadRun) -> Iterator[Problem]:
    """A shard's row has the ids, mask, source, finish and policy of its rollout row."""
    shards, rollouts = Rows.of(read.need_whole("shard")), Rows.of(read.need_whole("rollout"))
    if not len(rollouts.ids):
        raise NotChecked("there are no rollouts")
    order = np.argsort(rollouts.ids, kind="stable")
    at = order[np.minimum(np.searchsorted(rollouts.ids[order], shards.ids), len(order) - 1)]
    same_id = rollouts.ids[at] == shards.ids
    for index in np.flatnonzero(same_id & (rollouts.content[at] != shards.content)).tolist():
        yield shards.problem(
            index,
            "ids, mask, source, finish_reason, degenerate or on_policy differ from its rollout",
            "those of the rollout",
        )


def planned_rows(read: ReadRun) -> Iterator[Problem]:
    """The rollouts' rows are the planned prompts in order, without those rejected."""
    rollouts = read.need_whole("rollout")
    for summary in rollouts:
        record = summary.file.need_record()
        part = plan_part(record)
        try:
            rows = read_planned(read.run, record, ["sample_id"])
            planned = [str(row["sample_id"]) for row in rows]
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            yield Problem(file=part, found=f"unreadable ({error})", expected="the planned prompts")
            continue
        rejected = {reject.sample_id for reject in record.rejects}
        wanted = np.array([id_digest(i) for i in planned if i not in rejected], dtype=np.uint64)
        if not np.array_equal(wanted, summary.ids):
            yield Problem(
                file=summary.file.name,
                column="sample_id",
                found=f"{len(summary.ids)} rows that are not the planned ones in order",
                expected=f"the {len(wanted)} rows of {part} that were not rejected",
            )


_CHANGED = "the shards are not what the run made; extract again into a new directory"
RUN_RULES: tuple[Rule[ReadRun], ...] = (
    Rule(
        id="rows.unique",
        requires="a sample_id comes once among the shards, and once among the rollouts",
        remedy=_CHANGED,
        check=unique_ids,
    ),
    Rule(
        id="rows.order",
        requires="the shards' rows are the rollouts' in order, less the rejected ones",
        remedy=_CHANGED,
        check=rollout_order,
    ),
    Rule(
        id="rows.rollout",
        requires="a shard's row has the tokens, mask and policy of its rollout",
        remedy=_CHANGED,
        check=rollout_content,
    ),
    Rule(
        id="rows.plan",
        requires="the rollouts' rows are the planned prompts in order, less the rejected ones",
        remedy=_CHANGED,
        check=planned_rows,
    ),
)
