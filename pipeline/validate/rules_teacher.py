"""Rules on the teacher rows and on the targets: DESIGN §3 in numbers.

Row t of the teacher columns is the target model's distribution of x_{t+1}. The targets are
computed anew here, and not with the code that wrote them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.validate.group import BoolArray, Group
from pipeline.validate.report import NotChecked, Problem, Rule

NO_TARGET = -100
TOLERANCE = 1e-4  # absolute, of probabilities and log-probabilities


def logprobs_sorted(group: Group) -> Iterator[Problem]:
    logprobs = group.array("teacher_top_logprobs")
    rising = np.zeros(logprobs.shape, dtype=np.bool_)
    rising[:, 1:] = logprobs[:, 1:] > logprobs[:, :-1]
    yield from group.places(
        "teacher_top_logprobs",
        rising,
        found=lambda at: f"{logprobs[at]:g} after {logprobs[at[0], at[1] - 1]:g}",
        expected="falling log-probabilities",
    )


def logprobs_negative(group: Group) -> Iterator[Problem]:
    for name in ("teacher_top_logprobs", "token_logprobs"):
        values = group.array(name)
        yield from group.places(
            name,
            values > 0,
            found=lambda at, values=values: f"{values[at]:g}",  # type: ignore[misc]
            expected="a log-probability, at most 0",
        )


def ties_to_lower_id(group: Group) -> Iterator[Problem]:
    logprobs, ids = group.array("teacher_top_logprobs"), group.array("teacher_top_ids")
    broken = np.zeros(ids.shape, dtype=np.bool_)
    broken[:, 1:] = (logprobs[:, 1:] == logprobs[:, :-1]) & (ids[:, 1:] < ids[:, :-1])
    yield from group.places(
        "teacher_top_ids",
        broken,
        found=lambda at: f"id {ids[at]} after {ids[at[0], at[1] - 1]} at the same log-probability",
        expected="the lower id first",
    )


def top_ids_unique(group: Group) -> Iterator[Problem]:
    ids = group.array("teacher_top_ids")
    ordered = np.sort(ids, axis=1)
    broken = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    yield from group.places(
        "teacher_top_ids",
        broken,
        found=lambda at: f"{ids.shape[1] - len(np.unique(ids[at]))} repeated ids",
        expected="different ids",
    )


def top_ids_in_vocab(group: Group) -> Iterator[Problem]:
    ids, size = group.array("teacher_top_ids"), group.file.need_footer().geometry.vocab_size
    yield from group.places(
        "teacher_top_ids",
        (ids < 0) | (ids >= size),
        found=lambda at: str(ids[at]),
        expected=f"an id in [0, {size})",
    )


def mass_is_one(group: Group) -> Iterator[Problem]:
    """|sum(exp(top)) + tail - 1| <= TOLERANCE, and the tail is no negative mass."""
    logprobs, tail = group.array("teacher_top_logprobs"), group.array("teacher_tail_mass")
    with np.errstate(over="ignore", invalid="ignore"):  # numbers.finite names what is not finite
        top = np.exp(logprobs, dtype=np.float64).sum(axis=1)
        broken = (np.abs(top + tail - 1) > TOLERANCE) | (tail < 0)
    yield from group.places(
        "teacher_tail_mass",
        broken,
        found=lambda at: f"{tail[at]:.6g} beside a top-k mass of {top[at]:.6g}",
        expected="a sum of 1",
    )


def within_softcap(group: Group) -> Iterator[Problem]:
    """Logits lie in [-cap, cap], so two log-probabilities of a row differ by at most 2 cap."""
    cap = group.file.need_footer().geometry.logit_softcap
    if cap is None:
        raise NotChecked("the target model has no logit soft-cap")
    logprobs = group.array("teacher_top_logprobs")
    spread = logprobs[:, 0] - logprobs[:, -1]
    yield from group.places(
        "teacher_top_logprobs",
        spread > 2 * cap + TOLERANCE,
        found=lambda at: f"log-probabilities {spread[at]:g} apart",
        expected=f"at most {2 * cap:g}, twice the soft-cap",
    )


def first_token_logprob(group: Group) -> Iterator[Problem]:
    values = group.array("token_logprobs")
    broken = np.zeros(len(values), dtype=np.bool_)
    firsts = group.starts[:-1][group.lengths > 0]
    broken[firsts] = values[firsts] != 0
    yield from group.places(
        "token_logprobs",
        broken,
        found=lambda at: f"{values[at]:g}",
        expected="0, since nothing predicts the first token",
    )


def token_in_top(group: Group) -> Iterator[Problem]:
    """Where x_t is among the top ids of row t-1, its log-probability is the one there."""
    values, entry, in_top, _ = _tokens_and_teacher(group)
    yield from group.places(
        "token_logprobs",
        in_top & (np.abs(values - entry) > TOLERANCE),
        found=lambda at: f"{values[at]:g}",
        expected=lambda at: f"{entry[at]:g}, the entry of this token in teacher row t-1",
    )


def token_outside_top(group: Group) -> Iterator[Problem]:
    """Where it is not, its log-probability is at most the smallest one there."""
    values, entry, _, out_of_top = _tokens_and_teacher(group)
    yield from group.places(
        "token_logprobs",
        out_of_top & (values > entry + TOLERANCE),
        found=lambda at: f"{values[at]:g} of a token outside the top ids",
        expected=lambda at: f"at most {entry[at]:g}, the smallest entry of teacher row t-1",
    )


def _tokens_and_teacher(
    group: Group,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], BoolArray, BoolArray]:
    """token_logprobs [N]; the entry of row t-1 to compare with, float32 [N]; which tokens are
    among the top ids of row t-1, and which are not, bool [N], both unset on first tokens."""
    values, ids = group.array("token_logprobs"), group.array("input_ids")
    top_ids, top = group.array("teacher_top_ids"), group.array("teacher_top_logprobs")
    hits = top_ids[:-1] == ids[1:, None]
    hit, slot = hits.any(axis=1), hits.argmax(axis=1)
    entry = np.zeros_like(values)
    in_top, out_of_top = np.zeros((2, len(values)), dtype=np.bool_)
    entry[1:] = np.where(
        hit, np.take_along_axis(top[:-1], slot[:, None], axis=1)[:, 0], top[:-1, -1]
    )
    in_top[1:], out_of_top[1:] = hit & group.same_row, ~hit & group.same_row
    return values, entry, in_top, out_of_top


def targets_shifted(group: Group) -> Iterator[Problem]:
    """target_ids[t, k-1] is input_ids[t + k], and -100 past the end of the row."""
    ids, targets = group.array("input_ids"), group.array("target_ids")
    expected = np.full(targets.shape, NO_TARGET, dtype=np.int64)
    tokens = np.arange(len(ids))
    left = group.starts[1:][group.row_of] - tokens  # tokens from here to the row's end
    for k in range(1, targets.shape[1] + 1):
        there = np.flatnonzero(left > k)
        expected[there, k - 1] = ids[there + k]
    yield from group.places(
        "target_ids",
        targets != expected,
        found=lambda at: str(targets[at]),
        expected=lambda at: f"{expected[at]}, token t+{at[1] + 1} of the row",
    )


def targets_masked(group: Group) -> Iterator[Problem]:
    """1 iff token t+k exists, is supervised, and is of the same turn span as token t+1."""
    mask, targets = group.array("loss_mask") != 0, group.array("target_mask")
    starts = mask.copy()
    starts[1:] &= ~(mask[:-1] & group.same_row)
    span = np.where(mask, np.cumsum(starts), 0)  # 0: of no span; else unique over the row group
    expected = np.zeros(targets.shape, dtype=np.uint8)
    for k in range(1, min(targets.shape[1], len(mask) - 1) + 1):
        ahead, following = span[k:], span[1 : len(span) - k + 1]
        # A span never crosses a row's end, but x_{t+1} may be the first token of the next row.
        own = np.append(group.same_row, False)[: len(span) - k]
        expected[: len(span) - k, k - 1] = own & (ahead > 0) & (ahead == following)
    yield from group.places(
        "target_mask",
        targets != expected,
        found=lambda at: str(targets[at]),
        expected=lambda at: f"{expected[at]} for token t+{at[1] + 1}",
    )


_EXTRACT = "extract the file again; if it comes back, please report it"
TEACHER_RULES: tuple[Rule[Group], ...] = (
    Rule(
        id="teacher.sorted",
        requires="teacher_top_logprobs fall",
        remedy=_EXTRACT,
        check=logprobs_sorted,
    ),
    Rule(
        id="teacher.negative",
        requires="log-probabilities are at most 0",
        remedy=_EXTRACT,
        check=logprobs_negative,
    ),
    Rule(
        id="teacher.ties",
        requires="of equal log-probabilities the lower id comes first",
        remedy=_EXTRACT,
        check=ties_to_lower_id,
    ),
    Rule(
        id="teacher.unique",
        requires="the top ids of a row differ",
        remedy=_EXTRACT,
        check=top_ids_unique,
    ),
    Rule(
        id="teacher.vocab",
        requires="the top ids are ids of the vocabulary",
        remedy=_EXTRACT,
        check=top_ids_in_vocab,
    ),
    Rule(
        id="teacher.mass",
        requires=f"sum(exp(teacher_top_logprobs)) + teacher_tail_mass is 1 within {TOLERANCE:g}",
        remedy=_EXTRACT,
        check=mass_is_one,
    ),
    Rule(
        id="teacher.softcap",
        requires="log-probabilities of a row lie within twice the target's soft-cap",
        remedy="the soft-cap was lost: extract the file again, and please report it",
        check=within_softcap,
    ),
    Rule(
        id="teacher.first_token",
        requires="token_logprobs is 0 at the first token",
        remedy=_EXTRACT,
        check=first_token_logprob,
    ),
    Rule(
        id="teacher.token_in_top",
        requires=f"token_logprobs[t] is its entry in teacher row t-1 within {TOLERANCE:g}",
        remedy=_EXTRACT,
        check=token_in_top,
    ),
    Rule(
        id="teacher.token_outside",
        requires="a token outside the top ids of row t-1 is no likelier than the last of them",
        remedy=_EXTRACT,
        check=token_outside_top,
    ),
    Rule(
        id="targets.ids",
        requires="target_ids[t, k-1] is input_ids[t+k], -100 past the row's end",
        remedy=_EXTRACT,
        check=targets_shifted,
    ),
    Rule(
        id="targets.mask",
        requires="target_mask is 1 iff token t+k is supervised and of the span of token t+1",
        remedy=_EXTRACT,
        check=targets_masked,
    ),
)
