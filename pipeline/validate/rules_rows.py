"""Rules on the rows of a row group: that they could be read, lengths, ids, masks, positions."""

from collections.abc import Callable, Iterator

import numpy as np

from pipeline.answers import is_degenerate
from pipeline.validate.group import BoolArray, Group, IntArray
from pipeline.validate.report import NotChecked, Problem, Rule, quoted

FINISH_REASONS = ("stop", "stop_string", "length", "given")


def _trouble(rule: str) -> Callable[[Group], Iterator[Problem]]:
    """The problems that reading the row group came across."""

    def check(group: Group) -> Iterator[Problem]:
        yield from group.trouble.get(rule, [])

    return check


def not_empty(group: Group) -> Iterator[Problem]:
    yield from group.row_problems(
        "num_tokens", group.lengths == 0, found=lambda r: "0 tokens", expected="at least one token"
    )


def finish_reason(group: Group) -> Iterator[Problem]:
    reasons = group.scalar("finish_reason")
    broken = np.array([reason not in FINISH_REASONS for reason in reasons], dtype=np.bool_)
    yield from group.row_problems(
        "finish_reason",
        broken,
        found=lambda r: quoted(repr(reasons[r])),
        expected=f"one of {', '.join(FINISH_REASONS)}",
    )


def degenerate(group: Group) -> Iterator[Problem]:
    """The flag is a function of the last answer (pipeline/answers.py)."""
    flags, reasons = group.scalar("degenerate"), group.scalar("finish_reason")
    ids, mask = group.array("input_ids"), group.array("loss_mask") == 1
    expected = np.zeros(group.rows, dtype=np.int64)
    for row in [r for r, reason in enumerate(reasons) if reason == "length"]:
        start, end = int(group.starts[row]), int(group.starts[row + 1])
        gaps = np.flatnonzero(~mask[start:end])
        answer = ids[start + (int(gaps[-1]) + 1 if gaps.size else 0) : end]
        expected[row] = is_degenerate(answer, "length")
    yield from group.row_problems(
        "degenerate",
        flags != expected,
        found=lambda r: f"{flags[r]} with finish_reason {quoted(repr(reasons[r]))}",
        expected="1 for a last answer that loops until it is cut, else 0",
    )


def on_policy(group: Group) -> Iterator[Problem]:
    """1 where the target model generated, 0 exactly where the answers were given."""
    policy, reasons = group.scalar("on_policy"), group.scalar("finish_reason")
    given = np.array([reason == "given" for reason in reasons], dtype=np.bool_)
    yield from group.row_problems(
        "on_policy",
        policy != np.where(given, 0, 1),
        found=lambda r: f"{policy[r]} with finish_reason {quoted(repr(reasons[r]))}",
        expected="0 if the answers were given, else 1",
    )


def ids_in_vocab(group: Group) -> Iterator[Problem]:
    ids, size = group.array("input_ids"), group.file.need_footer().geometry.vocab_size
    yield from group.places(
        "input_ids",
        (ids < 0) | (ids >= size),
        found=lambda at: str(ids[at]),
        expected=f"an id in [0, {size})",
    )


def positions_in_context(group: Group) -> Iterator[Problem]:
    offsets = group.scalar("position_offset").astype(np.int64)
    context = group.file.need_footer().geometry.context_length
    ends = offsets + group.lengths
    yield from group.row_problems(
        "position_offset",
        (offsets < 0) | (ends > context),
        found=lambda r: f"positions {offsets[r]} to {ends[r] - 1}",
        expected=f"positions in [0, {context}), the trained context",
    )


def mask_binary(group: Group) -> Iterator[Problem]:
    mask = group.array("loss_mask")
    yield from group.places(
        "loss_mask", mask > 1, found=lambda at: str(mask[at]), expected="0 or 1"
    )


def mask_not_empty(group: Group) -> Iterator[Problem]:
    broken = (_supervised(group) == 0) & (group.lengths > 0)
    yield from group.row_problems(
        "loss_mask", broken, found=lambda r: "no token supervised", expected="an answer"
    )


def mask_not_full(group: Group) -> Iterator[Problem]:
    broken = (_supervised(group) == group.lengths) & (group.lengths > 0)
    yield from group.row_problems(
        "loss_mask", broken, found=lambda r: "every token supervised", expected="a prompt"
    )


def _supervised(group: Group) -> IntArray:
    """Supervised tokens of each row, int64 [R]."""
    flags = group.array("loss_mask") != 0
    sums = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    return np.diff(sums[group.starts])


def terminator(group: Group) -> Iterator[Problem]:
    """A row that stopped ends its answer with an end token, one cut at the limit does not."""
    manifest = group.file.run.manifest
    eos = None if manifest is None else manifest.fingerprint_fields.get("eos_ids")
    if not isinstance(eos, list) or not all(isinstance(i, int) for i in eos):
        raise NotChecked("no manifest.json that lists eos_ids")
    ids, reasons = group.array("input_ids"), group.scalar("finish_reason")
    supervised = np.flatnonzero(group.array("loss_mask"))
    if not supervised.size:
        return
    row_of = group.row_of[supervised]
    last = supervised[np.append(row_of[1:] != row_of[:-1], True)]
    rows = group.row_of[last]
    finish = np.array(reasons, dtype=object)[rows]
    ended = np.isin(ids[last], eos)
    broken = np.zeros(len(ids), dtype=np.bool_)
    broken[last] = ((finish == "stop") & ~ended) | (
        ((finish == "length") | (finish == "stop_string")) & ended
    )

    def expected(at: tuple[int, ...]) -> str:
        stopped = reasons[group.row_of[at[0]]] == "stop"
        return f"{'one' if stopped else 'none'} of the end tokens {eos}, as the finish_reason says"

    yield from group.places(
        "input_ids",
        broken,
        found=lambda at: f"the answer ends with token {ids[at]}",
        expected=expected,
    )


def finite(group: Group) -> Iterator[Problem]:
    for column in group.float_columns():
        yield from _vectors(group, column.name, group.scan(column).non_finite, "NaN or infinity")


def not_zero(group: Group) -> Iterator[Problem]:
    """No state vector is all zero; only columns of the target's own states."""
    for column in group.float_columns():
        if len(column.shape) > 1 and column.axes[-1] != "top_k":
            zero = group.scan(column).all_zero
            yield from _vectors(group, column.name, zero, "all zero")


def on_grid(group: Group) -> Iterator[Problem]:
    for column in group.float_columns():
        off = group.scan(column).off_grid
        yield from _vectors(group, column.name, off, f"a value that no {column.dtype} has")


def _vectors(group: Group, column: str, broken: BoolArray, found: str) -> Iterator[Problem]:
    """Problems of vectors [t] or [t, head]: the places are vectors, not single values."""
    expected = {
        "NaN or infinity": "finite numbers",
        "all zero": "a state of the target model",
    }.get(found, "values of the column's own dtype")
    yield from group.places(column, broken, found=lambda at: found, expected=expected)


_READ = "the file is damaged: download it again or extract it again"
_EXTRACT = "extract the file again; if it comes back, please report it"
ROW_RULES: tuple[Rule[Group], ...] = (
    Rule(
        id="parquet.pages",
        requires="every page decodes and matches its checksum",
        remedy=_READ,
        check=_trouble("parquet.pages"),
    ),
    Rule(
        id="rows.values",
        requires="no value is null, all text is UTF-8",
        remedy=_EXTRACT,
        check=_trouble("rows.values"),
    ),
    Rule(
        id="rows.sizes",
        requires="inner lists have the sizes of their axes",
        remedy=_EXTRACT,
        check=_trouble("rows.sizes"),
    ),
    Rule(
        id="rows.num_tokens",
        requires="every column of a row holds num_tokens tokens",
        remedy=_EXTRACT,
        check=_trouble("rows.num_tokens"),
    ),
    Rule(
        id="rows.empty",
        requires="a row has at least one token",
        remedy=_EXTRACT,
        check=not_empty,
    ),
    Rule(
        id="rows.finish_reason",
        requires="finish_reason is stop, stop_string, length or given",
        remedy=_EXTRACT,
        check=finish_reason,
    ),
    Rule(
        id="rows.degenerate",
        requires="degenerate is 1 iff the last answer was cut and over half its 4-grams repeat",
        remedy=_EXTRACT,
        check=degenerate,
    ),
    Rule(
        id="rows.on_policy",
        requires="on_policy is 0 where the answers were given, else 1",
        remedy=_EXTRACT,
        check=on_policy,
    ),
    Rule(
        id="tokens.vocab",
        requires="input_ids are ids of the vocabulary",
        remedy=_EXTRACT,
        check=ids_in_vocab,
    ),
    Rule(
        id="positions.context",
        requires="absolute positions stay in the trained context",
        remedy="extract again with a smaller --position-shift-max",
        check=positions_in_context,
    ),
    Rule(
        id="masks.binary",
        requires="loss_mask is 0 or 1",
        remedy=_EXTRACT,
        check=mask_binary,
    ),
    Rule(
        id="masks.none",
        requires="a row has a supervised token",
        remedy="drop the row, or see whether the chat template marks the answers",
        check=mask_not_empty,
    ),
    Rule(
        id="masks.all",
        requires="a row has a token that is not supervised",
        remedy="drop the row, or see whether the chat template marks the answers",
        check=mask_not_full,
    ),
    Rule(
        id="masks.terminator",
        requires="the last answer ends with an end token iff finish_reason is stop",
        remedy=_EXTRACT,
        check=terminator,
    ),
    Rule(
        id="numbers.finite",
        requires="every float is finite",
        remedy="extract again with --dtype float32, or drop the row",
        check=finite,
    ),
    Rule(
        id="numbers.zero",
        requires="no vector of hidden states, keys or values is all zero",
        remedy=_EXTRACT,
        check=not_zero,
    ),
    Rule(
        id="numbers.dtype",
        requires="stored float32 values are values of the column's logical dtype",
        remedy=_EXTRACT,
        check=on_grid,
    ),
)
