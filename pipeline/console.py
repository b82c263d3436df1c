"""What the command line prints for people. Text from files is never read as rich markup."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pipeline.doctor import Check
from pipeline.inspect_run import Inspection, Spread
from pipeline.schema import Schema, column_table
from pipeline.validate import Finding, Report, RuleResult
from pipeline.validate.report import quoted

FINDINGS_SHOWN = 20  # of a rule, unless --all
_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with ETA on stderr while it is a terminal; gives the function that moves it."""
    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def print_report(console: Console, report: Report, *, show_all: bool) -> None:
    """The table of rules, the findings rule by rule, and one line that sums up."""
    table = Table("rule", "status", "findings", "requires", box=None, pad_edge=False)
    table.columns[2].justify = "right"
    for rule in report.rules:
        status = Text(rule.status, style=_STYLES[rule.status])
        what = Text(rule.requires)
        if rule.status == "skipped":
            what.append(f" (not checked: {'; '.join(rule.not_checked)})", style="yellow")
        table.add_row(Text(rule.id), status, f"{rule.findings:,}" if rule.findings else "", what)
    console.print(table)
    findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        findings[finding.rule].append(finding)
    for rule in report.rules:
        if rule.status == "fail":
            _print_findings(console, rule, findings[rule.id], show_all=show_all)
    if report.replay_seed is not None:
        console.print(Text(f"\n{_replayed(report)}"), soft_wrap=True)
    for column, worst in report.replay.items():
        of = f"{worst.error:.3g} of its tolerance" if worst.error else "equal to the bit"
        console.print(Text(f"replayed {column}: {of}; worst row {quoted(worst.row)}"))
    console.print(Text(_summary(report), style="green" if report.ok else "bold red"))


def _print_findings(
    console: Console, rule: RuleResult, findings: list[Finding], *, show_all: bool
) -> None:
    console.print(Text(f"\n{rule.id}: {rule.requires}", style="bold red"))
    shown = findings if show_all else findings[:FINDINGS_SHOWN]
    for finding in shown:
        console.print(Text(f"  {finding.message}"), soft_wrap=True)
    if rule.findings > len(shown):
        hint = "" if show_all else " (--all lists them)"
        console.print(Text(f"  … and {rule.findings - len(shown):,} more{hint}"))
    console.print(Text(f"  What to do: {rule.remedy}", style="italic"))


def _replayed(report: Report) -> str:
    """Which rows went through the target model again, and that others did not."""
    rows = next(rule.checked for rule in report.rules if rule.id == "replay.columns")
    some = ", ".join(map(quoted, report.drawn[:FINDINGS_SHOWN]))
    more = ", …" if len(report.drawn) > FINDINGS_SHOWN else ""
    left = report.rows - rows
    rest = (
        f"; {left:,} rows were not: another --seed draws others, --replay {report.rows} takes all"
        if left > 0
        else ""
    )
    return (
        f"Replayed {rows:,} rows: {len(report.drawn):,} drawn by --seed {report.replay_seed} "
        f"({some}{more}) and those in their micro-batches{rest}"
    )


def _summary(report: Report) -> str:
    count = dict.fromkeys(_STYLES, 0)
    for rule in report.rules:
        count[rule.status] += 1
    found = sum(rule.findings for rule in report.rules)
    speed = report.bytes / 1e6 / max(report.seconds, 1e-3)
    return (
        f"\n{found:,} findings. Rules: {count['pass']} passed, {count['fail']} failed, "
        f"{count['skipped']} skipped. Read {report.files:,} files, {report.rows:,} rows, "
        f"{report.tokens:,} tokens, {report.bytes / 1e6:,.1f} MB in {report.seconds:.1f} s "
        f"({speed:,.0f} MB/s)."
    )


def print_check(console: Console, check: Check) -> None:
    """A line of `pipeline doctor`, and what to do below it."""
    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[check.status]
    line = Text(f"{check.status:<5}", style=style)
    console.print(line + Text(f"{check.name}: {check.found}"), soft_wrap=True)
    if check.advice:
        console.print(Text(f"     {check.advice}", style="italic"), soft_wrap=True)


def print_inspection(console: Console, found: Inspection) -> None:
    """Two tables: the run, and the bytes of each column."""
    table = Table(show_header=False, box=None, pad_edge=False)
    blocks = _BLOCKS if console.encoding.lower().startswith("utf") else _ASCII_BLOCKS
    for name, value in _inspection_lines(found, blocks):
        table.add_row(Text(name, style="bold"), Text(value))
    console.print(table)
    columns = Table("column", "dtype", "shape", "disk bytes", "bytes/token", "ratio", box=None)
    for column in columns.columns[3:]:
        column.justify = "right"
    for size in found.columns:
        columns.add_row(
            Text(size.name),
            size.dtype,
            Text(f"[{size.shape}]" if size.shape else "scalar"),
            f"{size.disk_bytes:,}",
            _number(size.disk_bytes / found.tokens if found.tokens else None, "{:,.2f}"),
            _number(size.ratio, "{:.2f}"),
        )
    console.print()
    console.print(columns)


def _inspection_lines(found: Inspection, blocks: str) -> Iterator[tuple[str, str]]:
    finished = {True: "", False: ", not finished", None: ", no manifest"}[found.complete]
    yield "run", f"{found.path}, shards: {found.shards:,}{finished}"
    yield "rows", f"{found.rows:,}"
    yield "tokens", f"{found.tokens:,} ({found.supervised_tokens:,} supervised)"
    per_token = _number(found.bytes_per_token, "{:,.0f}")
    yield "on disk", f"{found.disk_bytes:,} bytes, {per_token} a token"
    yield (
        "compression",
        f"{_number(found.ratio, '{:.2f}')} ({found.logical_bytes:,} bytes in their own dtypes)",
    )
    yield "tokens of a row", _spread(found.num_tokens, blocks)
    yield "position offset", _spread(found.position_offset, blocks)
    yield (
        "last position",
        (f"{_spread(found.last_position, blocks)}, of {found.context_length:,} in context"),
    )
    yield "finish reasons", _counts(found.finish_reasons)
    yield "on_policy", _counts(found.on_policy)
    supervised = _number(found.entropy_supervised_nats, "{:.3f}")
    yield (
        "teacher entropy",
        f"{_number(found.entropy_nats, '{:.3f}')} nats, {supervised} where the next token is "
        "supervised (the tail counts as one outcome: a lower bound)",
    )
    share = _number(found.argmax_share, "{:.1%}")
    yield "teacher arg-max", f"{share} of the supervised tokens are the arg-max of row t-1"
    yield "rejected", "unknown" if found.rejects is None else _counts(found.rejects)


def _spread(spread: Spread | None, blocks: str) -> str:
    if spread is None:
        return "-"
    line = sparkline(spread.histogram, blocks)
    return f"{line} min {spread.min:,}, median {spread.median:,.0f}, max {spread.max:,}"


def sparkline(counts: Sequence[int], blocks: str) -> str:
    """One character a count, the higher the more; the lowest of `blocks` only for 0."""
    top = max(counts, default=0)
    steps = len(blocks) - 1
    return "".join(blocks[-(-count * steps // top) if top else 0] for count in counts)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count:,}" for name, count in counts.items()) or "none"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def print_schema(console: Console, schema: Schema) -> None:
    """The schema's columns, one row each, as its TOML states them."""
    console.print(Text(f"{schema.ref}: {schema.summary}", style="bold"))
    table = Table("column", "dtype", "shape", "meaning", "transformers", "llama.cpp", box=None)
    for row in column_table(schema):
        cells = ("name", "dtype", "shape", "meaning", "transformers", "llamacpp")
        table.add_row(*(Text(row[cell]) for cell in cells))
    console.print(table)
    console.print(Text(f"sha256 {schema.digest}", style="dim"), soft_wrap=True)
