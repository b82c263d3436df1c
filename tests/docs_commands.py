"""The commands and links of the Markdown pages, read and checked against the code, for tests."""

import importlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from pipeline.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
        ROOT / "schemas" / "README.md",
        *(ROOT / "docs").glob("*.md"),
    )
)
# Programs that are not ours: their own options are theirs, what they are pointed at is checked.
OTHERS = {"export", "ray", "docker", "aws", "hf", "ruff", "mypy", ".", "python3"}
JOBS = ("extract_mtp", "simulate_run", "train_nano_target")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_OURS = ("pipeline/", "jobs/", "tests/", "docs/", "infra/", "schemas/", "./")


class Command(NamedTuple):
    """One command line of a page. inline: within a sentence, perhaps with words left out."""

    page: str
    words: tuple[str, ...]
    inline: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [body for name, body in _BLOCK.findall(text_of(page)) if name == language]


def block_commands(page: str) -> list[Command]:
    """Each command of its bash blocks: continued lines joined, comments gone, cut at && and --."""
    found = []
    for body in blocks(page, "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            found += [Command(page, tuple(part), False) for part in _parts(words)]
    return found


def _parts(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in ("&&", "--"):
            yield part
            part = []
        else:
            part.append(word)
    if part:
        yield part


def inline_spans(page: str) -> list[str]:
    """What stands between backticks in its text."""
    return _INLINE.findall(" ".join(_BLOCK.sub("", text_of(page)).split()))


def inline_commands(page: str) -> list[Command]:
    """The spans of its text that begin with a program of ours, up to the first > of each."""
    starts = ("pipeline ", "python jobs/", "python -m ", "python tests/", "make ", "pip ")
    return [
        Command(page, tuple(part), True)
        for span in inline_spans(page)
        if span.startswith(starts)
        for part in _parts(re.sub("[…']", "", span.split(" > ")[0]).split())
    ]


def known_options() -> set[str]:
    """Every option of our command line and jobs."""
    apps = [app, *(job_app(f"jobs/{name}.py") for name in JOBS)]
    groups: list[Any] = [typer.main.get_command(one) for one in apps]
    commands = [c for group in groups for c in (group, *getattr(group, "commands", {}).values())]
    return {option for c in commands for p in c.params for option in (*p.opts, *p.secondary_opts)}


def check(command: Command) -> None:
    """Raise AssertionError for a command, option, target or file that does not exist."""
    program, *rest = command.words
    for word in command.words:
        path = word.removeprefix("file://")
        if path.startswith(_OURS) and "=" not in path:
            assert (ROOT / path).exists(), f"{command}: no {path}"
    if program == "pipeline":
        _check_pipeline(command)
    elif program == "make":
        _check_make(command)
    elif program == "pip":
        _check_pip(command)
    elif program == "python" and rest[0] in {f"jobs/{name}.py" for name in JOBS}:
        job = typer.main.get_command(job_app(rest[0]))
        _check_click(command, job, rest[1:])
    elif program == "python" and rest[0] == "-m":
        name = rest[1].replace(".", "/")
        files = [ROOT / f"{name}.py", ROOT / name / "__main__.py"]
        if rest[1].split(".")[0] == "pipeline":
            _check_source(command, next(file for file in files if file.is_file()), rest[2:])
    elif program == "python":
        _check_source(command, ROOT / rest[0], rest[1:])
    else:
        assert program in OTHERS, f"{command}: which program is this?"


def job_app(path: str) -> typer.Typer:
    """The typer app of jobs/NAME.py."""
    app: typer.Typer = importlib.import_module(path.removesuffix(".py").replace("/", ".")).app
    return app


def _check_pipeline(command: Command) -> None:
    group: Any = typer.main.get_command(app)
    name = command.words[1]
    if name.startswith("--"):
        assert name in {option for p in group.params for option in p.opts}, str(command)
        return
    assert name in group.commands, f"{command}: no such command"
    _check_click(command, group.commands[name], list(command.words[2:]))


def _check_click(command: Command, click: Any, words: list[str]) -> None:
    """All must parse; within a sentence, where words are left out, every option must exist."""
    if not command.inline:
        click.make_context(command.words[1], words)
        return
    known = {option for p in click.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
    named = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert named <= known, f"{command}: no {sorted(named - known)}"


def _check_source(command: Command, file: Path, words: list[str]) -> None:
    source = file.read_text(encoding="utf-8")
    for word in words:
        if word.startswith("-"):
            assert f'"{word}"' in source, f"{command}: {file.name} has no {word}"


def _check_make(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        found = f"$({name})" in makefile if equals else re.search(rf"^{name}:", makefile, re.M)
        assert found, f"{command}: the Makefile has no {name}"


def _check_pip(command: Command) -> None:
    """Files, extras and pinned versions are those of this checkout."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    words = list(command.words)
    for before, word in itertools.pairwise(words):
        if before == "-c":
            assert (ROOT / word).is_file(), f"{command}: no {word}"
        for name in re.findall(r"\[([^\]]+)\]", word):
            assert set(name.split(",")) <= extras.keys(), f"{command}: no extra {name}"
        if "==" in word:
            pinned = (ROOT / "constraints.txt").read_text().replace("_", "-")
            assert word.replace("_", "-") in pinned, f"{command}: constraints.txt has another"


def links(page: str) -> list[tuple[str, str]]:
    """(file, anchor) of each relative link, either possibly empty."""
    prose = _BLOCK.sub("", text_of(page))
    found = re.findall(r"\]\(([^)\s]+)\)", " ".join(prose.split()))
    return [tuple(link.partition("#")[::2]) for link in found if "://" not in link]  # type: ignore[misc]


def anchors(text: str) -> set[str]:
    """The anchors that a forge gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", _BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}
