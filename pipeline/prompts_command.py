"""`pipeline prompts`: what a run would make of a prompt file, before anything runs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.errors import RowReject
from pipeline.models.load import find_target, load_eos_ids, load_tokenizer
from pipeline.prompts import PromptRow, RejectedRow, read_prompts

ANSWER = "bold green"  # supervised: what the target model answers, or the input's own answer


class Rendered(NamedTuple):
    """One accepted row; pieces: (ids, supervised) in order, an open answer as no ids."""

    row: PromptRow
    pieces: list[tuple[list[int], bool]]


def check_prompts(
    prompts: str, *, target: str, turns: str, limit: int | None
) -> Iterator[Rendered | RejectedRow]:
    """Read and render each row as a run with the same options would. Raises PipelineError."""
    files = find_target(target)
    tokenizer = load_tokenizer(files)
    renderer = ChatRenderer(tokenizer, eos_ids=load_eos_ids(files, tokenizer))
    for row in read_prompts(prompts, limit=limit):
        if isinstance(row, RejectedRow):
            yield row
            continue
        try:
            yield Rendered(row, _pieces(row, renderer, turns))
        except RowReject as reject:
            yield RejectedRow(row.source, row.sample_id, reject.reason, reject.detail)


def _pieces(row: PromptRow, renderer: ChatRenderer, turns: str) -> list[tuple[list[int], bool]]:
    if turns == "given":
        given = renderer.given_row(row.messages)
        pieces: list[tuple[list[int], bool]] = []
        for token, mask in zip(given.ids.tolist(), given.loss_mask.tolist(), strict=True):
            if not pieces or pieces[-1][1] != bool(mask):
                pieces.append(([], bool(mask)))
            pieces[-1][0].append(token)
        return pieces
    start = Conversation.all_turns if turns == "all" else Conversation.last_turn
    opened: list[tuple[list[int], bool]] = []
    for segment in start(renderer, row.messages).segments:
        opened += [(segment.tolist(), False), ([], True)]
    return opened


def print_prompts(
    prompts: str, *, target: str, turns: str, limit: int | None, show: int, console: Console
) -> dict[str, Any]:
    """Print counts, and the first `show` rows with their mask in colour; returns the counts."""
    tokenizer = load_tokenizer(find_target(target)) if show else None
    rejected: Counter[str] = Counter()
    examples: dict[str, RejectedRow] = {}
    accepted = tokens = shown = 0
    for found in check_prompts(prompts, target=target, turns=turns, limit=limit):
        if isinstance(found, RejectedRow):
            rejected[found.reason] += 1
            examples.setdefault(found.reason, found)
            continue
        accepted += 1
        tokens += sum(len(ids) for ids, _ in found.pieces)
        if shown < show:
            shown += 1
            _print_row(found, tokenizer, console)
    table = Table("rows", "", "first one", box=None, pad_edge=False)
    table.add_row(f"{accepted:,}", Text("accepted", style="green"), "")
    for reason, count in sorted(rejected.items()):
        first = examples[reason]
        where = Text(f"{first.source}: {first.detail}")
        table.add_row(f"{count:,}", Text(reason, style="red"), where)
    console.print(table)
    total = accepted + rejected.total()
    before = "" if turns == "given" else " before any answer"
    console.print(
        f"{total:,} rows = {accepted:,} accepted + {rejected.total():,} rejected; "
        f"{tokens:,} tokens{before}"
    )
    return {
        "rows": total,
        "accepted": accepted,
        "rejected": dict(sorted(rejected.items())),
        "tokens": tokens,
    }


def _print_row(found: Rendered, tokenizer: Any, console: Console) -> None:
    count = sum(len(ids) for ids, _ in found.pieces)
    text = Text(f"{found.row.sample_id} ({found.row.source}, {count} tokens)\n", style="bold")
    for ids, supervised in found.pieces:
        style = ANSWER if supervised else "default"
        if not ids:
            text.append("⟨answer⟩", style=ANSWER)
        for token in ids:
            piece = tokenizer.decode([token], skip_special_tokens=False)
            text.append(piece, style=style)
            text.append(f"·{token} ", style="dim")
    console.print(text, soft_wrap=True)
    console.print()
