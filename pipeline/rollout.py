"""Stage 1, one part: planned prompts in, the target model's answers as ids out."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.conversation import Conversation
from pipeline.errors import RowReject
from pipeline.geometry import Geometry
from pipeline.manifest import Commit, Reject, RunFolder, make_commit
from pipeline.memory import halving
from pipeline.models.base import Generation, Prompt, Sampling, TargetModel
from pipeline.schema import Layout
from pipeline.seeds import row_seed
from pipeline.settings import Settings
from pipeline.shards import Row, ShardWriter, ids_sha256
from pipeline.tasks import RolloutTask, RowFault

# Answers in the order of the prompts; a prompt that cannot be answered gets a RowReject.
Generate = Callable[[Sequence[Prompt], Sampling], Sequence[Generation | RowReject]]


def generate_with(target: TargetModel) -> Generate:
    """Generation by a loaded target model; where memory runs out, by fewer prompts at once."""

    def generate(prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation | RowReject]:
        return halving(lambda some: target.generate(some, sampling), prompts)

    return generate


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
    generate: Generate,
    eos_ids: frozenset[int],
    longest: int,
    tokenizer: Any,
    layout: Layout,
    settings: Settings,
    folder: RunFolder,
    footer: dict[str, Any],
) -> Commit:
    """Answer every open turn of a part's conversations and publish the file.

    Turns of a conversation are answered in order, each with the answers before it as context.
    longest: tokens of the longest row.
    """
    started = time.monotonic()
    planned = read_planned(task, folder)
    faults = dict(task.faults)
    open_rows = {i: row for i, row in enumerate(planned) if i not in faults}
    rows, new_faults = answer_rows(open_rows, generate, eos_ids, longest, settings)
    faults.update(new_faults)
    rejects = [_reject(planned[i], faults[i]) for i in sorted(faults)]
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
        inputs_sha256=task.inputs_sha256,
        attempt=task.attempt,
        fingerprint=footer["fingerprint"],
        rejects=tuple(rejects),
        seconds=round(time.monotonic() - started, 3),
    )
    return folder.publish(staged, commit)


def read_planned(task: RolloutTask, folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of the task's plan part."""
    planned: list[dict[str, Any]] = folder.read_table(task.plan_file).to_pylist()
    return planned


def answer_rows(
    planned: Mapping[int, dict[str, Any]],
    generate: Generate,
    eos_ids: frozenset[int],
    longest: int,
    settings: Settings,
) -> tuple[list[Row], dict[int, RowFault]]:
    """Rows of a rollout file (without text) in the order of `planned`, and by key what failed."""
    if settings.turns == "given":
        return [_given_row(row) for row in planned.values()], {}
    conversations = {
        i: Conversation([np.array(ids, dtype=np.int32) for ids in row["segments"]], eos_ids=eos_ids)
        for i, row in planned.items()
    }
    faults: dict[int, RowFault] = {}
    turn = 0
    while True:
        prompts: dict[int, Prompt] = {}
        for i, conversation in conversations.items():
            ids = None if i in faults else conversation.next_prompt()
            if ids is None:
                continue
            if len(ids) >= longest:
                detail = f"a later turn starts after {len(ids)} tokens, and a row holds {longest}"
                faults[i] = RowFault("too_long", detail)
                continue
            seed = row_seed(settings.seed, f"turn {turn}", planned[i]["sample_id"])
            prompts[i] = Prompt(ids, seed)
        if not prompts:
            break
        answers = generate(list(prompts.values()), sampling_of(settings))
        for i, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, RowReject):
                faults[i] = RowFault(answer.reason, answer.detail)
            else:
                conversations[i].add_answer(answer.ids, answer.finish_reason)
        turn += 1
    answered = [_answered_row(planned[i], c) for i, c in conversations.items() if i not in faults]
    return answered, faults


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


def _reject(row: dict[str, Any], fault: RowFault) -> Reject:
    return Reject(
        source=row["source"],
        sample_id=row["sample_id"],
        reason=fault.reason,
        detail=fault.detail,
    )
