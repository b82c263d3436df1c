"""What a run will do, fixed before it starts: the accepted prompts as ids, and the fingerprint.

OUT/plan/part-00000.parquet holds the prompts of one rollout part, rendered and tokenised once:
`segments` are the fixed texts around the answers as ids; `given_mask` is set only where the input
gave the answers (--turns given): then there is one segment, the whole row.
OUT/plan/rejects.jsonl holds the rows that were not accepted; OUT/plan/plan.json comes last, and
without it there is no plan. Memory holds one part and a line a part, however many rows there are.
"""

import hashlib
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
from pydantic import BaseModel, ConfigDict

import pipeline
from pipeline.chat import ChatRenderer
from pipeline.errors import PipelineError, RowReject
from pipeline.layers import Layers
from pipeline.manifest import Reject, RunFolder
from pipeline.planned_rows import plan_row
from pipeline.prompts import PromptHasher, PromptRow
from pipeline.settings import Settings
from pipeline.shards import file_sha256

PLAN_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("segments", pa.list_(pa.list_(pa.int32()))),
        ("given_mask", pa.list_(pa.uint8())),
    ]
)


class PlanPart(BaseModel):
    """One part file: its size and digest, rows, and tokens of the segments in it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    prompt_tokens: int
    bytes: int
    sha256: str


class SourceShare(BaseModel):
    """What of the prompts one tag has; rows that planning accepted or rejected."""

    model_config = ConfigDict(extra="forbid")

    accepted: int = 0
    rejected: int = 0
    prompt_tokens: int = 0


class Plan(BaseModel):
    """What OUT/plan/plan.json says.

    fields: what the fingerprint is made of; sources: by tag, where prompts have tags.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fingerprint: str
    fields: dict[str, Any]
    rejected: dict[str, int]
    sources: dict[str, SourceShare] = {}
    parts: tuple[PlanPart, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def prompt_tokens(self) -> int:
        return sum(part.prompt_tokens for part in self.parts)


def part_name(index: int) -> str:
    return f"part-{index:05d}.parquet"


def fingerprint_fields(
    settings: Settings,
    *,
    target_sha256: str,
    tokenizer: Any,
    renderer: ChatRenderer,
    eos_ids: frozenset[int],
    backend: str,
    schemas: Mapping[str, str],
    layers: Layers,
) -> dict[str, Any]:
    """What decides the bytes of the data files, but for the prompts; schemas: ref -> digest."""
    return {
        "code": pipeline.__version__,
        "backend": backend,
        "generated_by": "endpoint" if settings.rollout_endpoint else backend,
        "target_sha256": target_sha256,
        "tokenizer_sha256": _text_sha256(tokenizer.backend_tokenizer.to_str()),
        "chat_template_sha256": _text_sha256(renderer.template),
        "eos_ids": sorted(eos_ids),
        "schemas": dict(schemas),
        "layers": {name: list(blocks) for name, blocks in layers.items()},
        "settings": settings.fingerprinted(),
    }


def fingerprint_of(fields: Mapping[str, Any]) -> str:
    return _text_sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")))


def prompts_sha256(settings: Settings) -> str:
    """The digest of the prompts' content, without rendering any."""
    hasher = PromptHasher()
    for row in settings.read():
        if isinstance(row, PromptRow):
            hasher.update(row)
    return hasher.hexdigest()


class _Written(NamedTuple):
    parts: list[PlanPart]
    rejected: dict[str, int]
    sources: dict[str, SourceShare]
    prompts_sha256: str


def write_parts(settings: Settings, renderer: ChatRenderer, longest: int, folder: Path) -> _Written:
    """Read, render and tokenise every prompt into part files and rejects.jsonl under `folder`.

    longest: tokens of the longest row. Raises PipelineError if no row is accepted.
    """
    hasher = PromptHasher()
    parts: list[PlanPart] = []
    pending: list[dict[str, Any]] = []
    rejected: Counter[str] = Counter()
    shares: defaultdict[str, SourceShare] = defaultdict(SourceShare)
    first_reject = ""

    def flush() -> None:
        if pending:
            parts.append(write_part(folder / part_name(len(parts)), pending))
            pending.clear()

    with (folder / "rejects.jsonl").open("w", encoding="utf-8") as rejects:
        for row in settings.read():
            try:
                if not isinstance(row, PromptRow):
                    raise RowReject(row.reason, row.detail)
                hasher.update(row)
                planned = {
                    "sample_id": row.sample_id,
                    "source": row.source,
                    **plan_row(row, renderer, settings, longest)._asdict(),
                }
            except RowReject as why:
                shares[row.tag].rejected += 1
                reject = Reject(
                    source=row.source,
                    sample_id=row.sample_id,
                    reason=why.reason,
                    detail=why.detail,
                )
                rejects.write(reject.model_dump_json() + "\n")
                rejected[why.reason] += 1
                first_reject = first_reject or f"; first reject: {row.source}: {why.detail}"
                continue
            shares[row.tag].accepted += 1
            shares[row.tag].prompt_tokens += sum(map(len, planned["segments"]))
            for sample in _samples(planned, settings.samples_per_prompt):
                pending.append(sample)
                if len(pending) == settings.rollout_rows:
                    flush()
        flush()
    if not parts:
        names = " ".join(settings.prompts)
        raise PipelineError(f"--prompts {names}: no usable row{first_reject}")
    sources = {tag: share for tag, share in sorted(shares.items()) if any(shares)}
    return _Written(parts, dict(sorted(rejected.items())), sources, hasher.hexdigest())


def write_part(path: Path, rows: list[dict[str, Any]]) -> PlanPart:
    """Write planned rows as one part file."""
    pq.write_table(pa.Table.from_pylist(rows, schema=PLAN_SCHEMA), path, compression="zstd")
    return PlanPart(
        rows=len(rows),
        prompt_tokens=sum(len(ids) for row in rows for ids in row["segments"]),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _samples(planned: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """The rows of one prompt: itself, or `count` of them with ids of their own, so other seeds."""
    if count == 1:
        yield planned
        return
    for i in range(count):  # ids stay unique: all rows of the run have the suffix
        yield {**planned, "sample_id": f"{planned['sample_id']}/{i}"}


def make_plan(
    settings: Settings,
    *,
    folder: RunFolder,
    renderer: ChatRenderer,
    longest: int,
    fields: Mapping[str, Any],
) -> Plan:
    """Plan a new run into OUT/plan, or check that OUT/plan is the plan of this very run.

    longest: tokens of the longest row; fields: the fingerprint's fields but `prompts_sha256`,
    which comes from reading the prompts.
    Raises PipelineError naming each field in which a run that is already there differs.
    """
    there = read_plan(folder) if "plan.json" in folder.storage.list("plan") else None
    if there is not None:
        known = there.fields.get("prompts_sha256")
        _refuse_other(there.fields, {**fields, "prompts_sha256": known}, folder.url)
        now = {**fields, "prompts_sha256": prompts_sha256(settings)}
        _refuse_other(there.fields, now, folder.url)
        sizes = folder.storage.list("plan")
        if all(sizes.get(part_name(i)) == part.bytes for i, part in enumerate(there.parts)):
            return there
    scratch = folder.storage.scratch() / "plan"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        written = write_parts(settings, renderer, longest, scratch)
    except PipelineError:
        shutil.rmtree(scratch)
        raise
    all_fields = {**fields, "prompts_sha256": written.prompts_sha256}
    plan = Plan(
        fingerprint=fingerprint_of(all_fields),
        fields=all_fields,
        rejected=written.rejected,
        sources=written.sources,
        parts=tuple(written.parts),
    )
    if there is not None and plan != there:
        raise PipelineError(
            f"--out {folder.url}: files of its plan are missing, and planning again gives another "
            "plan; name a new directory"
        )
    for index, part in enumerate(plan.parts):
        folder.storage.put(scratch / part_name(index), f"plan/{part_name(index)}", part.sha256)
    rejects = scratch / "rejects.jsonl"
    folder.storage.put(rejects, "plan/rejects.jsonl", file_sha256(rejects))
    shutil.rmtree(scratch)
    folder.write_text("plan/plan.json", plan.model_dump_json(indent=1) + "\n")
    return plan


def read_plan(folder: RunFolder) -> Plan:
    """The plan in OUT. Raises PipelineError if it cannot be read."""
    try:
        return Plan.model_validate(folder.read_json("plan/plan.json"))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PipelineError(
            f"{folder.url}/plan/plan.json: {where}: {first['msg']}; name a new directory"
        ) from error


def _refuse_other(old: Mapping[str, Any], new: Mapping[str, Any], out: str) -> None:
    """Raise PipelineError with every differing field and both values."""
    before, now = dict(_flat(old)), dict(_flat(new))
    differing = [
        f"  {name}: there {before.get(name)!r}, now {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if differing:
        raise PipelineError(
            f"--out {out}: holds another run, which differs in\n"
            + "\n".join(differing)
            + "\nrun it as before to resume, or name a new directory"
        )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
