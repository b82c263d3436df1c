"""How a sample row shows on the page: as running text, and some of it token by token."""

from typing import Any, NamedTuple

from pipeline.report.samples import TABLE_ROWS, Decode, Sample, pieces


class Token(NamedTuple):
    """One token of a sample. css: how its mask and its depth from the anchor show."""

    text: str
    title: str
    css: str


def visible(token: str) -> str:
    """A token for a table's cell: blanks and line ends as signs."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥") or "∅"


def sample_view(sample: Sample, decode: Decode) -> dict[str, Any]:
    """A row: what it is, its tokens as running text, and some of them one by one."""
    anchor = sample.anchor
    depth = sample.target_ids.shape[1]
    shown = len(sample.input_ids)
    first = max(0, (anchor or 0) - 2)
    rows = [
        {
            "t": sample.start + i,
            "position": sample.position_offset + sample.start + i,
            "token": decode([int(sample.input_ids[i])]),
            "mask": int(sample.loss_mask[i]),
            "targets": [
                decode([int(sample.target_ids[i, k])]) if sample.target_mask[i, k] else None
                for k in range(depth)
            ],
            "teacher": decode([int(sample.teacher_ids[i])]),
            "probability": f"{sample.teacher_probs[i]:.2f}",
            "anchor": i == anchor,
        }
        for i in range(first, min(shown, first + TABLE_ROWS))
    ]
    return {
        "sample": sample,
        "tokens": _running_text(sample, decode),
        "rows": rows,
        "depth": depth,
        "before": sample.start,
        "after": sample.num_tokens - sample.start - shown,
    }


def _running_text(sample: Sample, decode: Decode) -> list[Token]:
    """The window's tokens, those of one character together, marked by mask and by the anchor."""
    tokens = []
    for start, stop, text in pieces(sample.input_ids.tolist(), decode):
        t = sample.start + start
        probability = float(sample.token_probs[start:stop].prod())
        title = f"t {t}, position {sample.position_offset + t}, p {probability:.2f}"
        ahead = None if sample.anchor is None else start - sample.anchor
        css = "m" if sample.loss_mask[start] else ""
        if ahead == 0 and "\n" in text:  # a line's end has nothing to put a mark on
            tokens += [Token(text.replace("\n", "↵"), title, "n"), Token("\n", title, css)]
            continue
        if ahead is not None and 0 <= ahead <= sample.target_ids.shape[1]:
            css += " n" if ahead == 0 else f" k{min(ahead, 3)}"
        tokens.append(Token(text, title, css.strip()))
    return tokens
