"""What a run will do, fixed before it starts: the accepted prompts as ids, and the fingerprint.

OUT/plan/part-00000.parquet holds the prompts of one rollout part, rendered and tokenised once:
`segments` are the fixed texts around the answers as ids; `given_mask` is set only where the input
gave the answers (--turns given): then there is one segment, the whole row.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import pipeline
from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.errors import PipelineError, RowReject
from pipeline.extract import RowRange, ShardTask
from pipeline.manifest import Commit, Reject, RunFolder
from pipeline.prompts import PromptHasher, PromptRow, read_prompts
from pipeline.schema import Layout
from pipeline.settings import Settings
from pipeline.shards import row_arrays

PLAN_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("source", pa.string()),
        ("segments", pa.list_(pa.list_(pa.int32()))),
        ("given_mask", pa.list_(pa.uint8())),
    ]
)


class Plan(NamedTuple):
    """parts: rows of each rollout part; fields: what the fingerprint is made of."""

    parts: tuple[int, ...]
    rejects: tuple[Reject, ...]
    fields: dict[str, Any]
    fingerprint: str

    @property
    def rows(self) -> int:
        return sum(self.parts)


def fingerprint_fields(
    settings: Settings,
    *,
    target_sha256: str,
    tokenizer: Any,
    renderer: ChatRenderer,
    eos_ids: frozenset[int],
    backend: str,
    schemas: Mapping[str, str],
) -> dict[str, Any]:
    """What decides the bytes of the data files, but for the prompts; schemas: ref -> digest."""
    return {
        "code": pipeline.__version__,
        "backend": backend,
        "target_sha256": target_sha256,
        "tokenizer_sha256": _text_sha256(tokenizer.backend_tokenizer.to_str()),
        "chat_template_sha256": _text_sha256(renderer.template),
        "eos_ids": sorted(eos_ids),
        "schemas": dict(schemas),
        "settings": settings.fingerprinted(),
    }


def fingerprint_of(fields: Mapping[str, Any]) -> str:
    return _text_sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")))


def write_parts(
    settings: Settings, renderer: ChatRenderer, longest: int, folder: Path
) -> tuple[list[int], list[Reject], str]:
    """Read, render and tokenise every prompt into part files under `folder`.

    Returns rows of each part, rejects in input order, and the digest of the prompts' content.
    Raises PipelineError if no row is accepted.
    """
    hasher = PromptHasher()
    rejects: list[Reject] = []
    parts: list[int] = []
    pending: list[dict[str, Any]] = []

    def flush() -> None:
        if pending:
            table = pa.Table.from_pylist(pending, schema=PLAN_SCHEMA)
            pq.write_table(table, folder / f"part-{len(parts):05d}.parquet", compression="zstd")
            parts.append(len(pending))
            pending.clear()

    for row in read_prompts(settings.prompts, limit=settings.limit):
        if not isinstance(row, PromptRow):
            rejects.append(Reject(**row._asdict()))
            continue
        hasher.update(row)
        try:
            pending.append(_planned(row, renderer, settings, longest))
        except RowReject as reject:
            rejects.append(
                Reject(
                    source=row.source,
                    sample_id=row.sample_id,
                    reason=reject.reason,
                    detail=reject.detail,
                )
            )
        if len(pending) == settings.rollout_rows:
            flush()
    flush()
    if not parts:
        why = f"; first reject: {rejects[0].source}: {rejects[0].detail}" if rejects else ""
        raise PipelineError(f"--prompts {settings.prompts}: no usable row{why}")
    return parts, rejects, hasher.hexdigest()


def _planned(
    row: PromptRow, renderer: ChatRenderer, settings: Settings, longest: int
) -> dict[str, Any]:
    """One row of a part file. Raises RowReject."""
    mask = None
    if settings.turns == "given":
        given = renderer.given_row(row.messages)
        segments, mask, room = [given.ids.tolist()], given.loss_mask.tolist(), 0
    else:
        start = Conversation.all_turns if settings.turns == "all" else Conversation.last_turn
        conversation = start(renderer, row.messages)
        segments, room = [ids.tolist() for ids in conversation.segments], 1
    if len(segments[0]) + room > longest:
        raise RowReject(
            "too_long", f"{len(segments[0])} tokens, and a row holds {longest} (--max-length)"
        )
    return {
        "sample_id": row.sample_id,
        "source": row.source,
        "segments": segments,
        "given_mask": mask,
    }


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
    scratch = folder.staging / "plan"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    parts, rejects, prompts_sha256 = write_parts(settings, renderer, longest, scratch)
    all_fields = {**fields, "prompts_sha256": prompts_sha256}
    plan = Plan(tuple(parts), tuple(rejects), all_fields, fingerprint_of(all_fields))
    if folder.plan.is_dir():
        there = folder.read_json("plan/plan.json").get("fields")
        if not isinstance(there, dict):
            raise PipelineError(f"{folder.plan}/plan.json: has no fields; name a new directory")
        _refuse_other(there, all_fields, folder.out)
        shutil.rmtree(scratch)
    else:
        described = {
            "fingerprint": plan.fingerprint,
            "fields": all_fields,
            "parts": parts,
            "rejects": len(rejects),
        }
        (scratch / "plan.json").write_text(json.dumps(described, indent=1) + "\n")
        scratch.rename(folder.plan)
    return plan


def _refuse_other(old: Mapping[str, Any], new: Mapping[str, Any], out: Path) -> None:
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


def plan_shards(
    rollouts: list[Commit],
    *,
    folder: RunFolder,
    rollout_layout: Layout,
    bytes_per_token: int,
    shard_bytes: int,
) -> list[ShardTask]:
    """Cut all rollout rows, in order, into shards of about even token counts.

    bytes_per_token: of the features in their logical dtypes. Lengths are known now, so sizes are
    even; a shard holds at least one row.
    """
    rows: list[tuple[str, int, int]] = []  # file, row in it, tokens
    lengths = next(c for c in rollout_layout.columns if c.name == "num_tokens")
    for commit in rollouts:
        table = pq.read_table(folder.out / commit.file, columns=["num_tokens"])
        counts = row_arrays(table["num_tokens"], lengths)
        rows += [(commit.file, i, count) for i, count in enumerate(counts)]
    total = sum(tokens for _, _, tokens in rows)
    wanted = max(1, round(total * bytes_per_token / shard_bytes))
    shards: dict[int, list[RowRange]] = {}
    before = 0
    for file, i, tokens in rows:
        # The shard that the row's middle falls into.
        ranges = shards.setdefault((before + tokens // 2) * wanted // max(1, total), [])
        before += tokens
        if ranges and ranges[-1].file == file:
            ranges[-1] = ranges[-1]._replace(stop=i + 1)
        else:
            ranges.append(RowRange(file, i, i + 1))
    return [
        ShardTask(index=index, total=len(shards), ranges=tuple(ranges))
        for index, ranges in enumerate(shards.values())
    ]


def _text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
