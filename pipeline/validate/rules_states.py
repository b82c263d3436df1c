"""Rules on what the run's own settings and the architecture say of states and positions."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from pipeline.seeds import position_offset
from pipeline.validate.group import Group
from pipeline.validate.report import NotChecked, Problem, Rule

# V is stored in a 16-bit dtype; its norm divides by the RMS plus 1e-6.
V_RMS_TOLERANCE = 0.02
# Of the longest that the weights allow: rounding of K to 16 bits, before RoPE and after.
K_NORM_TOLERANCE = 0.02
SAMPLED = 32  # values of a vector that are compared with the next token's


def _settings(group: Group) -> dict[str, Any]:
    manifest = group.file.run.manifest
    if manifest is None:
        raise NotChecked("no readable manifest.json")
    return manifest.settings


def offsets_drawn(group: Group) -> Iterator[Problem]:
    """position_offset is a function of seed, id and length (DESIGN §5)."""
    settings, geometry = _settings(group), group.file.need_footer().geometry
    seed, shift_max = settings.get("seed"), settings.get("position_shift_max")
    if not isinstance(seed, int) or not isinstance(shift_max, int):
        raise NotChecked("manifest.json has no seed or position_shift_max")
    told = group.scalar("position_offset")
    longest = geometry.context_length
    drawn = np.array(
        [
            position_offset(
                geometry,
                seed=seed,
                sample_id=name,
                num_tokens=min(int(length), longest),
                shift_max=shift_max,
            )
            for name, length in zip(group.scalar("sample_id"), group.lengths, strict=True)
        ],
        dtype=np.int64,
    )
    # What lies outside the context, and rows without tokens, other rules name.
    inside = (told >= 0) & (told + group.lengths <= longest) & (group.lengths > 0)
    for row in np.flatnonzero((told != drawn) & inside).tolist():
        yield Problem(
            file=group.file.name,
            row=group.row_ids[row],
            column="position_offset",
            found=str(told[row]),
            expected=f"{drawn[row]}, drawn by the run's seed for this row",
        )


def answer_lengths(group: Group) -> Iterator[Problem]:
    """No answer is longer than max_new_tokens, and only a full one ends by length."""
    settings = _settings(group)
    limit, longest = settings.get("max_new_tokens"), settings.get("max_length")
    if not isinstance(limit, int) or not isinstance(longest, int):
        raise NotChecked("manifest.json has no max_new_tokens or max_length")
    longest = min(longest, group.file.need_footer().geometry.context_length)
    mask, reasons = group.array("loss_mask") == 1, group.scalar("finish_reason")
    edge = np.concatenate([[True], ~group.same_row])[: len(mask)]  # a row's first token
    starts = np.flatnonzero(mask & (edge | ~np.concatenate([[False], mask[:-1]])))
    after = np.concatenate([~mask[1:] | edge[1:], [True]])[: len(mask)]
    ends = np.flatnonzero(mask & after) + 1
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        row = int(group.row_of[start])
        if reasons[row] == "given" or end - start == group.lengths[row]:
            continue  # given answers have no limit; rows that are all answer have a rule
        last = end == group.starts[row + 1]
        short = end - start < limit and group.lengths[row] < longest
        if end - start > limit or (last and short and reasons[row] == "length"):
            yield Problem(
                file=group.file.name,
                row=group.row_ids[row],
                column="loss_mask",
                index=(start - int(group.starts[row]),),
                found=f"an answer of {end - start} tokens, finish_reason {reasons[row]}",
                expected=f"at most {limit}; exactly that, or a row of {longest}, if cut by length",
            )


def value_norm(group: Group) -> Iterator[Problem]:
    """Gemma-4's V goes through a norm without weights, so each head's vector has RMS 1."""
    if not group.file.need_footer().geometry.architecture.startswith("gemma4"):
        raise NotChecked("only Gemma-4 norms V without weights")
    columns = [c for c in group.float_columns() if c.name.endswith("_value")]
    if not columns:
        raise NotChecked(f"{group.file.kind} files have no V")
    for column in columns:
        values = group.array(column.name)
        rms = np.sqrt(np.einsum("thc,thc->th", values, values) / values.shape[2])
        yield from group.places(
            column.name,
            np.abs(rms - 1) > V_RMS_TOLERANCE,
            found=lambda at, rms=rms: f"RMS {rms[at]:.3f}",  # type: ignore[misc]
            expected="RMS 1, as the norm of V leaves it",
        )


def key_norm(group: Group) -> Iterator[Problem]:
    """k_norm makes each head's K a vector of RMS 1 times weights; RoPE only turns it."""
    shared = group.file.need_footer().geometry.shared_kv
    bounds = {f"{kind}_key": kv.key_norm for kind, kv in shared.items() if kv.key_norm}
    if not bounds:
        raise NotChecked("the target model does not norm K, or the footer does not say")
    columns = [c for c in group.float_columns() if c.name in bounds]
    if not columns:
        raise NotChecked(f"{group.file.kind} files have no K")
    for column in columns:
        low, high = bounds[column.name] or (0.0, 0.0)
        keys = group.array(column.name)
        length = np.sqrt(np.einsum("thc,thc->th", keys, keys))
        slack = K_NORM_TOLERANCE * high
        yield from group.places(
            column.name,
            ~((length >= low - slack) & (length <= high + slack)),
            found=lambda at, length=length: f"length {length[at]:.3f}",  # type: ignore[misc]
            expected=f"length {low:.3f} to {high:.3f}, as k_norm's weights allow",
        )


def states_vary(group: Group) -> Iterator[Problem]:
    """A row of different tokens does not have one and the same state at all of them."""
    ids = group.array("input_ids")
    columns = [c for c in group.float_columns() if len(c.shape) > 1 and c.axes[-1] != "top_k"]
    if not columns:
        raise NotChecked(f"{group.file.kind} files have no states")
    inside = np.flatnonzero(group.same_row)
    if not inside.size:
        return
    rows = group.row_of[inside]
    varied = np.zeros(group.rows, dtype=np.bool_)
    np.logical_or.at(varied, rows, ids[inside] != ids[inside + 1])
    for column in columns:
        flat = group.array(column.name).reshape(len(ids), -1)
        some = flat[:, :SAMPLED]  # enough to see that they change
        differs = (some[1:] != some[:-1]).any(axis=1)
        changes = np.zeros(group.rows, dtype=np.bool_)
        np.logical_or.at(changes, rows, differs[inside])
        yield from group.row_problems(
            column.name,
            varied & ~changes,
            found=lambda r: "the same vector at every token",
            expected="states that depend on the token",
        )


_EXTRACT = "extract the file again; if it comes back, please report it"
STATE_RULES: tuple[Rule[Group], ...] = (
    Rule(
        id="positions.drawn",
        requires="a row's offset is the one that the run's seed draws for it",
        remedy=_EXTRACT,
        check=offsets_drawn,
    ),
    Rule(
        id="masks.length",
        requires="answers keep to max_new_tokens, and one cut by length has all of them",
        remedy=_EXTRACT,
        check=answer_lengths,
    ),
    Rule(
        id="kv.value_norm",
        requires="each V vector has RMS 1 where V is normed without weights (Gemma-4)",
        remedy="K and V are swapped, or V was taken before its norm: extract again",
        check=value_norm,
    ),
    Rule(
        id="kv.key_norm",
        requires="each K vector is as long as the weights of k_norm allow",
        remedy="K was taken before its norm, or is another layer's: extract again",
        check=key_norm,
    ),
    Rule(
        id="numbers.constant",
        requires="states differ from token to token",
        remedy=_EXTRACT,
        check=states_vary,
    ),
)
