"""Stage 1, one part: planned prompts in, the target model's answers as ids out."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.answers import StopStrings, is_degenerate
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


def sampling_of(settings: Settings, stops: StopStrings | None = None) -> Sampling:
    """The effective sampling; the target's own generation config has no say in it.

    stops: of --stop, where there are any.
    """
    return Sampling(
        ended=stops,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.sampling_top_k,
    )


def sampling_record(settings: Settings) -> dict[str, Any]:
    """What the manifest says of sampling: the effective values."""
    sampling = sampling_of(settings)
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop": settings.stop,
    }


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
    stops = StopStrings(settings.stop, tokenizer) if settings.stop else None
    rows, new_faults = answer_rows(open_rows, generate, eos_ids, longest, settings, stops)
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
    stops: StopStrings | None = None,
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
        answers = generate(list(prompts.values()), sampling_of(settings, stops))
        for i, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, RowReject):
                faults[i] = RowFault(answer.reason, answer.detail)
            else:
                conversations[i].add_answer(answer.ids, answer.finish_reason)
        turn += 1
    answered: list[Row] = []
    for i, conversation in conversations.items():
        if i in faults:
            continue
        row = _answered_row(planned[i], conversation, stops)
        fault = _unwanted(row, settings)
        if fault is None:
            answered.append(row)
        else:
            faults[i] = fault
    return answered, faults


def _unwanted(row: Row, settings: Settings) -> RowFault | None:
    """Why the user does not want an answered row."""
    if settings.drop_degenerate and row["degenerate"]:
        return RowFault("degenerate", "the last answer loops until it is cut (--drop-degenerate)")
    if settings.drop_unfinished and row["finish_reason"] == "length":
        tokens = int(np.sum(row["loss_mask"]))
        return RowFault(
            "unfinished", f"cut by the length limit after {tokens} tokens (--drop-unfinished)"
        )
    return None


def _answered_row(
    row: dict[str, Any], conversation: Conversation, stops: StopStrings | None
) -> Row:
    answer, reason = conversation.answer, conversation.finish_reason
    ended = stops is not None and reason == "stop_string"
    return {
        "sample_id": row["sample_id"],
        "source": row["source"],
        "num_tokens": len(conversation.ids),
        "finish_reason": reason,
        "stop_string_start": stops.start(answer.tolist()) if ended and stops else -1,
        "degenerate": int(is_degenerate(answer, reason or "")),
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
        "stop_string_start": -1,
        "degenerate": 0,
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
