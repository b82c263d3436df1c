"""`pipeline prompts`: what a run would make of a prompt file, before anything runs."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.errors import RowReject
from pipeline.models.load import find_target, load_eos_ids, load_geometry, load_tokenizer
from pipeline.plan import SourceShare
from pipeline.planned_rows import PlannedRow, make_renderer, plan_row
from pipeline.prompt_settings import PromptSettings
from pipeline.prompts import PromptRow, RejectedRow
from pipeline.summary import shares_text

ANSWER = "bold green"  # supervised: what the target model answers, or the input's own answer


class Rendered(NamedTuple):
    """One accepted row; pieces: (ids, supervised) in order, an open answer as no ids."""

    row: PromptRow
    pieces: list[tuple[list[int], bool]]


def check_prompts(settings: PromptSettings) -> Iterator[Rendered | RejectedRow]:
    """Read and render each row as a run with the same options would. Raises PipelineError."""
    files = find_target(settings.target, trust_remote_code=settings.trust_remote_code)
    tokenizer = load_tokenizer(files, settings.tokenizer)
    renderer = make_renderer(settings, tokenizer, load_eos_ids(files, tokenizer))
    # Where it is computed does not change the context's length.
    geometry = load_geometry(
        files, backend="transformers", dtype="float32", kv_cache_dtype="float32"
    )
    longest = min(settings.max_length, geometry.context_length)
    for row in settings.read():
        if isinstance(row, RejectedRow):
            yield row
            continue
        try:
            yield Rendered(row, _pieces(plan_row(row, renderer, settings, longest)))
        except RowReject as reject:
            yield RejectedRow(row.source, row.sample_id, reject.reason, reject.detail, row.tag)


def _pieces(planned: PlannedRow) -> list[tuple[list[int], bool]]:
    pieces: list[tuple[list[int], bool]] = []
    if planned.given_mask is None:
        for segment in planned.segments:
            pieces += [(segment, False), ([], True)]
        return pieces
    for token, mask in zip(planned.segments[0], planned.given_mask, strict=True):
        if not pieces or pieces[-1][1] != bool(mask):
            pieces.append(([], bool(mask)))
        pieces[-1][0].append(token)
    return pieces


def print_prompts(settings: PromptSettings, *, show: int, console: Console) -> dict[str, Any]:
    """Print counts, and the first `show` rows with their mask in colour; returns the counts."""
    tokenizer = load_tokenizer(find_target(settings.target), settings.tokenizer) if show else None
    rejected: Counter[str] = Counter()
    examples: dict[str, RejectedRow] = {}
    shares: defaultdict[str, SourceShare] = defaultdict(SourceShare)
    shown = 0
    for found in check_prompts(settings):
        if isinstance(found, RejectedRow):
            rejected[found.reason] += 1
            shares[found.tag].rejected += 1
            examples.setdefault(found.reason, found)
            continue
        shares[found.row.tag].accepted += 1
        shares[found.row.tag].prompt_tokens += sum(len(ids) for ids, _ in found.pieces)
        if shown < show:
            shown += 1
            _print_row(found, tokenizer, console)
    accepted = sum(share.accepted for share in shares.values())
    tokens = sum(share.prompt_tokens for share in shares.values())
    table = Table("rows", "", "first one", box=None, pad_edge=False)
    table.add_row(f"{accepted:,}", Text("accepted", style="green"), "")
    for reason, count in sorted(rejected.items()):
        first = examples[reason]
        where = Text(f"{first.source}: {first.detail}")
        table.add_row(f"{count:,}", Text(reason, style="red"), where)
    console.print(table)
    total = accepted + rejected.total()
    before = "" if settings.turns == "given" else " before any answer"
    console.print(
        f"{total:,} rows = {accepted:,} accepted + {rejected.total():,} rejected; "
        f"{tokens:,} tokens{before}"
    )
    sources = {tag: share.model_dump() for tag, share in sorted(shares.items()) if any(shares)}
    if sources:
        console.print(Text(f"by source: {shares_text(sources)}"))
    return {
        "rows": total,
        "accepted": accepted,
        "rejected": dict(sorted(rejected.items())),
        "tokens": tokens,
        "sources": sources,
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
