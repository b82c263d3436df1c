"""Stage 1, one part: planned prompts in, the target model's answers as ids out."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipeline.conversation import Conversation
from pipeline.features import row_seed
from pipeline.geometry import Geometry
from pipeline.manifest import Commit, Reject, RunFolder, make_commit
from pipeline.models.base import Prompt, Sampling, TargetModel
from pipeline.schema import Layout
from pipeline.settings import Settings
from pipeline.shards import Row, ShardWriter, ids_sha256


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    index: int

    @property
    def name(self) -> str:
        return f"rollout-{self.index:05d}"

    @property
    def plan_file(self) -> str:
        return f"plan/part-{self.index:05d}.parquet"


def longest_row(settings: Settings, geometry: Geometry) -> int:
    """Tokens of the longest row, prompt plus answers."""
    return min(settings.max_length, geometry.context_length)


def sampling_of(settings: Settings) -> Sampling:
    """The effective sampling; the target's own generation config has no say in it."""
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.sampling_top_k,
    )


def roll_out_part(
    task: RolloutTask,
    *,
    target: TargetModel,
    tokenizer: Any,
    layout: Layout,
    settings: Settings,
    folder: RunFolder,
    footer: dict[str, Any],
) -> Commit:
    """Answer every open turn of a part's conversations and publish the file.

    Turns of a conversation are answered in order, each with the answers before it as context.
    """
    started = time.monotonic()
    planned = pq.read_table(folder.out / task.plan_file).to_pylist()
    rows: list[Row] = []
    rejects: list[Reject] = []
    if settings.turns == "given":
        rows = [_given_row(row) for row in planned]
    else:
        conversations = [
            Conversation(
                [np.array(ids, dtype=np.int32) for ids in row["segments"]], eos_ids=target.eos_ids
            )
            for row in planned
        ]
        too_long = _answer_all(conversations, planned, target, settings)
        for i, (row, conversation) in enumerate(zip(planned, conversations, strict=True)):
            if i in too_long:
                rejects.append(_too_long(row, too_long[i], longest_row(settings, target.geometry)))
            else:
                rows.append(_answered_row(row, conversation))
    rows = [
        {**row, "text": tokenizer.decode(row["input_ids"], skip_special_tokens=False)}
        for row in rows
    ]
    staged = folder.stage(task.name)
    with ShardWriter(staged, layout, {**footer, "part": task.name}) as writer:
        if rows:
            writer.write(rows)
    commit = make_commit(
        staged,
        folder="rollouts",
        stem=f"part-{task.index:05d}",
        name=task.name,
        kind="rollout",
        rows=len(rows),
        tokens=sum(len(row["input_ids"]) for row in rows),
        supervised_tokens=int(sum(np.sum(row["loss_mask"]) for row in rows)),
        ids_sha256=ids_sha256([row["sample_id"] for row in rows]),
        fingerprint=footer["fingerprint"],
        rejects=tuple(rejects),
        seconds=round(time.monotonic() - started, 3),
    )
    return folder.publish(staged, commit)


def _answer_all(
    conversations: list[Conversation],
    planned: list[dict[str, Any]],
    target: TargetModel,
    settings: Settings,
) -> dict[int, int]:
    """Answer turn by turn, all conversations together.

    Returns, by index, the length of a context that an earlier answer made too long.
    """
    too_long: dict[int, int] = {}
    turn = 0
    while True:
        prompts: dict[int, Prompt] = {}
        for i, conversation in enumerate(conversations):
            ids = None if i in too_long else conversation.next_prompt()
            if ids is None:
                continue
            if len(ids) >= longest_row(settings, target.geometry):
                too_long[i] = len(ids)
                continue
            seed = row_seed(settings.seed, f"turn {turn}", planned[i]["sample_id"])
            prompts[i] = Prompt(ids, seed)
        if not prompts:
            return too_long
        answers = target.generate(list(prompts.values()), sampling_of(settings))
        for i, answer in zip(prompts, answers, strict=True):
            conversations[i].add_answer(answer.ids, answer.finish_reason)
        turn += 1


def _answered_row(row: dict[str, Any], conversation: Conversation) -> Row:
    return {
        "sample_id": row["sample_id"],
        "source": row["source"],
        "num_tokens": len(conversation.ids),
        "finish_reason": conversation.finish_reason,
        "on_policy": 1,
        "input_ids": conversation.ids,
        "loss_mask": conversation.loss_mask,
    }


def _given_row(row: dict[str, Any]) -> Row:
    return {
        "sample_id": row["sample_id"],
        "source": row["source"],
        "num_tokens": len(row["segments"][0]),
        "finish_reason": "given",
        "on_policy": 0,
        "input_ids": np.array(row["segments"][0], dtype=np.int32),
        "loss_mask": np.array(row["given_mask"], dtype=np.uint8),
    }


def _too_long(row: dict[str, Any], length: int, longest: int) -> Reject:
    return Reject(
        source=row["source"],
        sample_id=row["sample_id"],
        reason="too_long",
        detail=f"a later turn starts after {length} tokens, and a row holds {longest}",
    )
