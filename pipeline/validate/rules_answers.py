"""Rules on prompts and answers, by the plan: what was asked, and what may be supervised.

A shard and its rollout changed alike agree with each other; only the plan, which was written before
either, tells where an answer may begin.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.plan import PLAN_SCHEMA
from pipeline.validate.group import Group
from pipeline.validate.report import NotChecked, Problem, Rule
from pipeline.validate.rules_plan import plan_part, read_planned

Array = npt.NDArray[Any]
Wrong = tuple[int, str, str] | None  # token index in the row, found, expected


def answers_planned(group: Group) -> Iterator[Problem]:
    """A rollout is its planned prompts and, between them, answers; those alone are supervised."""
    if group.file.kind != "rollout":
        raise NotChecked("shards are compared with their rollouts, by rows.rollout")
    record = group.file.need_record()
    try:
        rows = read_planned(group.file.run, record, PLAN_SCHEMA.names)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise NotChecked(f"{plan_part(record)} cannot be read") from error
    planned = {row["sample_id"]: row for row in rows}
    ids, mask = group.array("input_ids"), group.array("loss_mask")
    sources, reasons = group.scalar("source"), group.scalar("finish_reason")
    for row, name in enumerate(group.scalar("sample_id")):
        mine = slice(int(group.starts[row]), int(group.starts[row + 1]))
        plan = planned.get(name)
        # Rows that are not planned, and masks that are no masks, have rules of their own.
        if plan is None or not _is_mask(mask[mine]):
            continue
        if sources[row] != plan["source"]:
            yield Problem(
                file=group.file.name,
                row=group.row_ids[row],
                column="source",
                found=sources[row],
                expected=f"{plan['source']}, as planned",
            )
        if plan["given_mask"] is not None:
            wrong = _given(ids[mine], mask[mine], plan["segments"][0], plan["given_mask"])
        else:
            stopped = reasons[row] == "stop"
            wrong = _generated(ids[mine], mask[mine], plan["segments"], stopped)
        if wrong is not None:
            at, found, expected = wrong
            yield Problem(
                file=group.file.name,
                row=group.row_ids[row],
                column="input_ids",
                index=(at,),
                found=found,
                expected=expected,
            )


def _is_mask(mask: Array) -> bool:
    return bool(np.isin(mask, (0, 1)).all() and mask.any() and not mask.all())


def _given(ids: Array, mask: Array, tokens: list[int], supervised: list[int]) -> Wrong:
    """What is wrong with a row whose answers the input gave."""
    for what, values, wanted in (("token", ids, tokens), ("loss_mask", mask, supervised)):
        at = _first_difference(values, wanted)
        if at is not None:
            return at, f"{what} {_at(values, at)}", f"{_at(wanted, at)}, as planned"
    return None


def _generated(ids: Array, mask: Array, segments: list[list[int]], stopped: bool) -> Wrong:
    """What is wrong with a row that was answered: prompt, answer, prompt, answer, …

    An answer that ends with the first token of the next prompt takes its place, and only then is
    there a next one (pipeline/conversation.py). stopped: the last answer has its terminator.
    """
    at = answers = 0
    while answers < len(segments):
        prompt = segments[answers]
        if answers:
            if at == len(ids) or ids[at - 1] != prompt[0]:
                break
            prompt = prompt[1:]
        end = at + len(prompt)
        different = _first_difference(ids[at:end], prompt)
        if different is not None:
            found = f"token {_at(ids, at + different)}"
            return at + different, found, f"{prompt[different]}, of the planned prompt"
        if mask[at:end].any():
            first = at + int(np.argmax(mask[at:end]))
            return first, "a supervised token of the prompt", "loss_mask 0"
        unsupervised = np.flatnonzero(mask[end:] == 0)
        at = end + int(unsupervised[0]) if unsupervised.size else len(ids)
        if at == end:
            return end - 1, "no supervised token after this prompt", "an answer"
        answers += 1
    if at < len(ids):
        return at, f"token {ids[at]}, not supervised", "the row's end, after its last answer"
    if stopped and answers < len(segments) and ids[-1] == segments[answers][0]:
        return at - 1, f"{answers} answers", "another planned prompt after this one"
    return None


def _first_difference(values: Array, wanted: list[int]) -> int | None:
    """Where two lists first differ; one that ends early differs there."""
    both = min(len(values), len(wanted))
    differing = np.flatnonzero(values[:both] != np.array(wanted[:both], dtype=np.int64))
    if differing.size:
        return int(differing[0])
    return None if len(values) == len(wanted) else both


def _at(values: Any, index: int) -> str:
    return str(values[index]) if index < len(values) else "nothing"


def turns_as_set(group: Group) -> Iterator[Problem]:
    """finish_reason is given in a run with --turns given, and in no other."""
    manifest = group.file.run.manifest
    turns = None if manifest is None else manifest.settings.get("turns")
    if not isinstance(turns, str):
        raise NotChecked("no manifest.json that says which turns were answered")
    reasons = group.scalar("finish_reason")
    wrong = [(reason == "given") != (turns == "given") for reason in reasons]
    yield from group.row_problems(
        "finish_reason",
        np.array(wrong, dtype=np.bool_),
        found=lambda r: str(reasons[r]),
        expected=f"what --turns {turns} gives",
    )


def end_tokens_end(group: Group) -> Iterator[Problem]:
    """Within an answer that was generated there is no end token: it would have ended there."""
    manifest = group.file.run.manifest
    eos = None if manifest is None else manifest.fingerprint_fields.get("eos_ids")
    if not isinstance(eos, list) or not all(isinstance(i, int) for i in eos):
        raise NotChecked("no manifest.json that lists eos_ids")
    ids, mask = group.array("input_ids"), group.array("loss_mask")
    reasons = group.scalar("finish_reason")
    if not len(ids):
        return
    answered = np.zeros(group.rows, dtype=np.bool_)
    answered[group.row_of[mask != 1]] = True  # a row without such a token has its own rule
    answered &= np.array([reason != "given" for reason in reasons], dtype=np.bool_)
    goes_on = np.zeros(len(ids), dtype=np.bool_)
    goes_on[:-1] = (mask[:-1] == 1) & (mask[1:] == 1) & group.same_row
    yield from group.places(
        "input_ids",
        goes_on & np.isin(ids, eos) & answered[group.row_of],
        found=lambda at: f"end token {ids[at]}, and the answer goes on",
        expected="no end token but an answer's last",
    )


_EXTRACT = "the rollouts are not what the run made; extract again into a new directory"
ANSWER_RULES: tuple[Rule[Group], ...] = (
    Rule(
        id="rows.prompt",
        requires="a rollout is its planned prompt and answers, and only answers are supervised",
        remedy=_EXTRACT,
        check=answers_planned,
    ),
    Rule(
        id="rows.turns",
        requires="answers are given in a run with --turns given, and in no other",
        remedy=_EXTRACT,
        check=turns_as_set,
    ),
    Rule(
        id="masks.end",
        requires="a generated answer goes on after no end token",
        remedy=_EXTRACT,
        check=end_tokens_end,
    ),
)
