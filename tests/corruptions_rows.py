"""One corruption a rule, continued: rows, masks, numbers, teacher rows and targets."""

from collections.abc import Callable

import numpy as np
from corruptions import CORRUPTIONS, corrupts, edit_footer, flip_a_byte
from tampering import Row, Tampered, retarget

from pipeline.answers import is_degenerate

__all__ = ["CORRUPTIONS", "flip_a_byte"]

VOCAB = 259
END = 258  # the id of <|im_end|>


# Rows against their records, the rollouts and the plan.


@corrupts("rows.recorded")
def _(run: Tampered) -> None:
    run.record("train-00000", supervised_tokens=1)


@corrupts("rows.ids_sha256")
def _(run: Tampered) -> None:
    run.record("train-00000", ids_sha256="0" * 64)


@corrupts("rows.unique")
def _(run: Tampered) -> None:
    rows = run.rows("train-00000")
    run.write("train-00001", [*run.rows("train-00001"), rows[0]])
    run.edit_json("manifest.json", rows_in=run.json("manifest.json")["rows_in"] + 1)


@corrupts("rows.order")
def _(run: Tampered) -> None:
    rows = run.rows("train-00000")
    run.write("train-00000", [rows[1], rows[0], *rows[2:]])


@corrupts("rows.rollout")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(source="elsewhere:1"))


@corrupts("rows.plan")
def _(run: Tampered) -> None:
    rows = run.plan_rows(0)
    run.write_plan(0, [rows[1], rows[0], *rows[2:]])


@corrupts("rows.prompt")
def _(run: Tampered) -> None:
    def supervise_the_header(row: Row) -> None:
        row["loss_mask"][int(np.argmax(row["loss_mask"])) - 1] = 1
        retarget(row)

    run.edit_row(supervise_the_header, row=of_finish(run, "stop"), rollout=True)


@corrupts("rows.turns")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(finish_reason="given", on_policy=0), rollout=True)


# Values. An edit that a rollout shares is made in both, so that rows.rollout stays quiet.


def of_finish(run: Tampered, reason: str) -> str:
    names = ("train-00000", "train-00001")
    rows = [row for name in names for row in run.rows(name)]
    return str(next(row["sample_id"] for row in rows if row["finish_reason"] == reason))


@corrupts("rows.values")
def _(run: Tampered) -> None:
    run.edit_column("train-00000", "source", lambda rows: rows.__setitem__(0, None))


@corrupts("rows.sizes")
def _(run: Tampered) -> None:
    run.edit_column("train-00000", "target_mask", lambda rows: rows[0][3].pop())


@corrupts("rows.num_tokens")
def _(run: Tampered) -> None:
    run.edit_column("train-00000", "token_logprobs", lambda rows: rows[1].pop())


@corrupts("rows.empty")
def _(run: Tampered) -> None:
    def empty(row: Row) -> None:
        arrays = {k: v[:0] for k, v in row.items() if isinstance(v, np.ndarray)}
        row.update(arrays, num_tokens=0)

    run.edit_row(empty, rollout=True)


@corrupts("rows.finish_reason")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(finish_reason="eos"), rollout=True)


@corrupts("rows.degenerate")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(degenerate=1 - row["degenerate"]), rollout=True)


@corrupts("rows.on_policy")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(on_policy=0), rollout=True)


@corrupts("tokens.vocab")
def _(run: Tampered) -> None:
    def beyond(row: Row) -> None:
        row["input_ids"][-1] = VOCAB
        if "token_logprobs" in row:
            row["token_logprobs"][-1] = -50
        retarget(row)

    run.edit_row(beyond, row=of_finish(run, "length"), rollout=True)


@corrupts("positions.context")
def _(run: Tampered) -> None:
    # One past the last offset that fits: the row's last token would sit at position 1024.
    run.edit_row(lambda row: row.update(position_offset=1024 - row["num_tokens"] + 1))


@corrupts("masks.binary")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["loss_mask"].__imul__(2), rollout=True)


def set_mask(value: int) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        row["loss_mask"][:] = value
        retarget(row)

    return change


@corrupts("masks.none")
def _(run: Tampered) -> None:
    run.edit_row(set_mask(0), rollout=True)


@corrupts("masks.all")
def _(run: Tampered) -> None:
    def all_answer(row: Row) -> None:
        set_mask(1)(row)
        row["degenerate"] = int(is_degenerate(row["input_ids"], "length"))

    run.edit_row(all_answer, row=of_finish(run, "length"), rollout=True)


@corrupts("masks.terminator")
def _(run: Tampered) -> None:
    row = of_finish(run, "length")
    run.edit_row(lambda row: row.update(finish_reason="stop"), row=row, rollout=True)


@corrupts("numbers.finite")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["final_hidden"].__setitem__((5, 3), np.nan))


@corrupts("numbers.zero")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["full_key"].__setitem__((5, 1), -0.0))


@corrupts("numbers.dtype")
def _(run: Tampered) -> None:
    def nudge(row: Row) -> None:
        row["full_value"][7, 0, 2] = np.nextafter(row["full_value"][7, 0, 2], np.float32(9))

    run.edit_row(nudge)


# Teacher rows: the last row of a sequence predicts no stored token, so nothing else sees it.


@corrupts("teacher.sorted")
def _(run: Tampered) -> None:
    def swap(row: Row) -> None:
        for name in ("teacher_top_ids", "teacher_top_logprobs"):
            row[name][-1, [0, 1]] = row[name][-1, [1, 0]]

    run.edit_row(swap)


@corrupts("teacher.negative")
def _(run: Tampered) -> None:
    def certain(row: Row) -> None:
        row["teacher_top_logprobs"][-1] = [3e-5, *np.arange(-200, -263, -1)]
        row["teacher_tail_mass"][-1] = 0

    run.edit_row(certain)


@corrupts("teacher.ties")
def _(run: Tampered) -> None:
    def tie(row: Row) -> None:
        logprobs, ids = row["teacher_top_logprobs"][-1], row["teacher_top_ids"][-1]
        row["teacher_tail_mass"][-1] += np.exp(logprobs[1]) - np.exp(logprobs[0])
        logprobs[0] = logprobs[1]
        row["teacher_tail_mass"][-1] = 1 - np.exp(logprobs).sum()
        ids[:2] = sorted(ids[:2], reverse=True)

    run.edit_row(tie)


@corrupts("teacher.unique")
def _(run: Tampered) -> None:
    def repeat(row: Row) -> None:
        row["teacher_top_ids"][-1, 5] = row["teacher_top_ids"][-1, 9]

    run.edit_row(repeat)


@corrupts("teacher.vocab")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["teacher_top_ids"].__setitem__((-1, -1), VOCAB))


@corrupts("teacher.mass")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.001))


@corrupts("teacher.softcap")
def _(run: Tampered) -> None:
    for name in ("rollout-00000", "rollout-00001", "train-00000", "train-00001"):
        geometry = {**run.footer(name)["geometry"], "logit_softcap": 0.5}
        semantics = {**run.footer(name)["semantics"], "logit_softcap": 0.5}
        edit_footer(run, name, geometry=geometry, semantics=semantics)
    run.edit_json("manifest.json", geometry=geometry, semantics=semantics)


@corrupts("teacher.first_token")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row["token_logprobs"].__setitem__(0, -1))


def first_token(row: Row, *, in_top: bool) -> int:
    """The first t >= 1 whose token is, or is not, among the top ids of teacher row t-1."""
    hits = (row["teacher_top_ids"][:-1] == row["input_ids"][1:, None]).any(axis=1)
    return 1 + int(np.flatnonzero(hits == in_top)[0])


@corrupts("teacher.token_in_top")
def _(run: Tampered) -> None:
    def lower(row: Row) -> None:
        row["token_logprobs"][first_token(row, in_top=True)] -= 0.001

    run.edit_row(lower)


@corrupts("teacher.token_outside")
def _(run: Tampered) -> None:
    def raise_above(row: Row) -> None:
        t = first_token(row, in_top=False)
        row["token_logprobs"][t] = row["teacher_top_logprobs"][t - 1, -1] + 0.001

    run.edit_row(raise_above)


@corrupts("targets.ids")
def _(run: Tampered) -> None:
    def shift(row: Row) -> None:
        row["target_ids"] = np.roll(row["target_ids"], 1, axis=0)

    run.edit_row(shift)


@corrupts("targets.mask")
def _(run: Tampered) -> None:
    def drop_first(row: Row) -> None:
        # The last prompt position, which a drafter meets first when it serves.
        row["target_mask"][int(np.argmax(row["loss_mask"])) - 1] = 0

    run.edit_row(drop_first)


# States and positions.


@corrupts("positions.drawn")
def _(run: Tampered) -> None:
    run.edit_row(lambda row: row.update(position_offset=row["position_offset"] ^ 1))


@corrupts("masks.end")
def _(run: Tampered) -> None:
    def end_early(row: Row) -> None:
        t = int(np.flatnonzero(row["loss_mask"])[2])
        row["input_ids"][t] = END
        if "teacher_top_ids" in row:
            known = row["teacher_top_logprobs"][t - 1][row["teacher_top_ids"][t - 1] == END]
            row["token_logprobs"][t] = known[0] if known.size else -50
        retarget(row)

    run.edit_row(end_early, rollout=True)


@corrupts("masks.length")
def _(run: Tampered) -> None:
    """The first token of an answer that was cut by length counts as the prompt's last."""
    name = of_finish(run, "length")

    def shorten(row: Row) -> None:
        row["loss_mask"][int(np.argmax(row["loss_mask"]))] = 0
        retarget(row)

    run.edit_row(shorten, row=name, rollout=True)
    for index in (0, 1):
        rollouts = {row["sample_id"]: row for row in run.rows(f"rollout-{index:05d}")}
        planned = run.plan_rows(index)
        for plan in planned:
            if plan["sample_id"] == name:
                row = rollouts[name]
                plan["segments"][0] = row["input_ids"][: int(np.argmax(row["loss_mask"]))].tolist()
                run.write_plan(index, planned)


@corrupts("numbers.constant")
def _(run: Tampered) -> None:
    def freeze(row: Row) -> None:
        row["final_hidden"][:] = row["final_hidden"][0]

    run.edit_row(freeze)
