"""What a rule is, what it finds, and the report of one validation. No torch here.

A rule is one function from what it looks at (a folder, a file, a row group, the whole run) to the
places where it does not hold. It raises `NotChecked` where it lacks what it needs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, NamedTuple, TypeVar

Subject = TypeVar("Subject")

# Findings of one rule that are kept; more are only counted, so that memory stays bounded.
FINDINGS_KEPT = 100_000
# Longest text quoted in a message; ids and names come from strangers.
QUOTED_CHARS = 120


class NotChecked(Exception):
    """A rule lacks what it needs here; the text says what."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One place where a rule does not hold.

    file: path under the validated directory; row: sample_id; index: token index first, then the
    further axes; places: how many values of that row and column break the rule, `index` being the
    first of them.
    """

    file: str
    found: str
    expected: str
    row: str | None = None
    column: str | None = None
    index: tuple[int, ...] | None = None
    places: int = 1


@dataclass(frozen=True, kw_only=True)
class Finding(Problem):
    """A problem, with the rule it breaks and one sentence that says it all."""

    rule: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Rule(Generic[Subject]):
    """id: GROUP.NAME; requires: what must hold; remedy: what to do where it does not."""

    id: str
    requires: str
    remedy: str
    check: Callable[[Subject], Iterable[Problem]]


@dataclass(frozen=True, kw_only=True)
class RuleResult:
    """findings: how many there are; checked: on how many folders, files or row groups it ran."""

    id: str
    requires: str
    remedy: str
    status: Literal["pass", "fail", "skipped"]
    findings: int
    checked: int
    not_checked: tuple[str, ...]


class Worst(NamedTuple):
    """The largest error of a replayed column, in units of its tolerance; above 1 is a finding."""

    error: float
    row: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of `validate`; sizes count the files that were read.

    replay: by column, how far the replayed row was off that was furthest off; drawn: the ids of
    the rows that replay_seed drew (their batch mates were compared as well).
    """

    path: str
    rules: tuple[RuleResult, ...]
    findings: tuple[Finding, ...]
    files: int
    rows: int
    tokens: int
    bytes: int
    seconds: float
    replay: dict[str, Worst] = field(default_factory=dict)
    drawn: tuple[str, ...] = ()
    replay_seed: int | None = None

    @property
    def ok(self) -> bool:
        return all(rule.status != "fail" for rule in self.rules)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every value is a string, an integer, a finite float, a list or None."""
        return {"ok": self.ok, **asdict(self)}


@dataclass
class Tally:
    """What one rule found, on how much, and why not on more."""

    findings: list[Finding] = field(default_factory=list)
    count: int = 0
    checked: int = 0
    not_checked: dict[str, None] = field(default_factory=dict)  # a set that keeps its order


class Recorder:
    """Runs rules and keeps what they say."""

    def __init__(self, rules: Sequence[Rule[Any]]) -> None:
        self._rules = rules
        self._tallies = {rule.id: Tally() for rule in rules}

    def run(self, rules: Iterable[Rule[Subject]], subject: Subject) -> None:
        for rule in rules:
            tally = self._tallies[rule.id]
            try:
                for problem in rule.check(subject):
                    self._add(tally, rule.id, problem)
                tally.checked += 1
            except NotChecked as reason:
                tally.not_checked.setdefault(str(reason))

    def skip(self, rules: Iterable[Rule[Any]], reason: str) -> None:
        for rule in rules:
            self._tallies[rule.id].not_checked.setdefault(reason)

    @property
    def tallies(self) -> dict[str, Tally]:
        """What was found so far; can be sent to another process and merged there."""
        return self._tallies

    def merge(self, tallies: dict[str, Tally]) -> None:
        """Take up what another recorder of the same rules found, after all that is here."""
        for rule, other in tallies.items():
            tally = self._tallies[rule]
            room = max(0, FINDINGS_KEPT - len(tally.findings))
            tally.findings += other.findings[:room]
            tally.count += other.count
            tally.checked += other.checked
            tally.not_checked |= other.not_checked

    def _add(self, tally: Tally, rule: str, problem: Problem) -> None:
        tally.count += 1
        if len(tally.findings) < FINDINGS_KEPT:
            tally.findings.append(
                Finding(**vars(problem), rule=rule, message=problem_message(problem))
            )

    def results(self) -> tuple[RuleResult, ...]:
        results = []
        for rule in self._rules:
            tally = self._tallies[rule.id]
            ran: Literal["pass", "skipped"] = "pass" if tally.checked else "skipped"
            results.append(
                RuleResult(
                    id=rule.id,
                    requires=rule.requires,
                    remedy=rule.remedy,
                    status="fail" if tally.count else ran,
                    findings=tally.count,
                    checked=tally.checked,
                    not_checked=tuple(tally.not_checked),
                )
            )
        return tuple(results)

    def findings(self) -> tuple[Finding, ...]:
        return tuple(f for tally in self._tallies.values() for f in tally.findings)


def problem_message(problem: Problem) -> str:
    """Where, what, and what should be there, in one line."""
    where = [quoted(problem.file)]
    if problem.row is not None:
        where.append(f"row {quoted(problem.row)}")
    if problem.column is not None:
        index = "" if problem.index is None else f"[{', '.join(map(str, problem.index))}]"
        where.append(problem.column + index)
    more = f" (the first of {problem.places} in this row)" if problem.places > 1 else ""
    return f"{': '.join(where)}: {problem.found}; expected {problem.expected}{more}"


def quoted(text: str) -> str:
    """A stranger's text for one line of a terminal: cut, control characters escaped."""
    short = text if len(text) <= QUOTED_CHARS else text[: QUOTED_CHARS - 1] + "…"
    return short if short.isprintable() else ascii(short)[1:-1]
