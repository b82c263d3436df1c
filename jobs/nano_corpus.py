"""Chats cut out of the installed Python's standard library: the head of something, its rest.

Every function, class and docstring gives some: the user turn is what stands before, the model turn
a piece that ends where a reader would stop. Which files exist depends on the Python version.
"""

import ast
import hashlib
import re
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ANSWER_CHARS = 300  # of a paragraph, about 80 tokens: short enough that the end is learnt
CODE_CHARS = 160  # of a piece of a body: on longer ones so small a model learns to go in circles
HEAD_CHARS = 400  # of a signature with its docstring
CONTEXT_CHARS = 200  # of the lines before a later piece of a body
_PIECE_CHARS = 60  # statements are joined until a piece is this long
HELD_OUT_SHARE = 20  # one module of this many is never trained on

# Tests and generated tables repeat themselves; _sysconfigdata differs between machines.
_LEFT_OUT = {
    "site-packages", "test", "tests", "idlelib", "turtledemo", "encodings", "lib2to3",
    "pydoc_data", "ensurepip", "lib-dynload", "__phello__", "__pycache__",
}  # fmt: skip
_LEFT_OUT_FILES = re.compile(r"_sysconfigdata.*|__phello__.*|antigravity|this")
_CONTROL = re.compile(r"<(?:pad|eos|bos|unk|mask)>|<\||\|>")


class Module(NamedTuple):
    """name: dotted; path: its source file."""

    name: str
    path: Path

    @property
    def held_out(self) -> bool:
        """Whether it is kept apart from training; depends on the name alone."""
        return hashlib.sha256(self.name.encode()).digest()[0] % HELD_OUT_SHARE == 0


class Chat(NamedTuple):
    """One user turn and its answer, both plain ASCII without surrounding white space."""

    module: str
    line: int
    user: str
    model: str


def library_modules() -> list[Module]:
    """Every module of the standard library that is used, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    modules = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not _LEFT_OUT.intersection(parts) and not _LEFT_OUT_FILES.fullmatch(parts[-1]):
            modules.append(Module(".".join(parts), path))
    return sorted(modules)


def chats_of(module: Module) -> list[Chat]:
    """The chats of one module, in the order of its lines, each text once."""
    source = read_source(module)
    lines = source.splitlines()
    found: dict[tuple[str, str], Chat] = {}
    for line, before, answer in _pairs(ast.parse(source), lines):
        user, model = before.strip(), textwrap.dedent(answer).strip()
        if _usable(user, 3) and _usable(model, 8) and len(model) <= ANSWER_CHARS:
            found.setdefault((user, model), Chat(module.name, line, user, model))
    return sorted(found.values(), key=lambda chat: chat.line)


def read_source(module: Module) -> str:
    """The module's text; what is not UTF-8 becomes U+FFFD, which no chat keeps."""
    return module.path.read_text(encoding="utf-8", errors="replace").expandtabs(8)


def _usable(text: str, shortest: int) -> bool:
    return len(text) >= shortest and text.isascii() and not _CONTROL.search(text)


def _pairs(tree: ast.Module, lines: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """(line, text before, answer), neither yet checked nor trimmed."""
    yield from _paragraph_pairs(tree, 1)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        start, inside = node.lineno, _first_line(node.body[0])
        if start == inside:  # all on one line
            continue
        head = textwrap.dedent("\n".join(lines[start - 1 : inside - 1]))
        doc = ast.get_docstring(node)
        if doc is not None:
            yield start, head + '\n    """', _paragraphs(doc)[0] if doc else ""
            yield from _paragraph_pairs(node, start)
        if not isinstance(node, ast.ClassDef):
            yield from _body_pairs(node, lines, has_doc=doc is not None)


def _paragraph_pairs(
    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, line: int
) -> Iterator[tuple[int, str, str]]:
    """Each paragraph of a docstring and the one after it."""
    paragraphs = _paragraphs(ast.get_docstring(node) or "")
    for index in range(1, len(paragraphs)):
        if len(paragraphs[index - 1]) <= HEAD_CHARS:
            yield line, paragraphs[index - 1], paragraphs[index]


def _body_pairs(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str], *, has_doc: bool
) -> Iterator[tuple[int, str, str]]:
    """The pieces of a function's body after its docstring, each with the lines before it."""
    body = node.body[1:] if has_doc else node.body
    if not body:
        return
    start, first = node.lineno, _first_line(body[0])
    context = lines[start - 1 : first - 1]
    if has_doc and sum(len(line) + 1 for line in context) > HEAD_CHARS:
        context = lines[start - 1 : _first_line(node.body[0]) - 1]
    position = first
    for piece in _pieces(lines[first - 1 : node.end_lineno]):
        before = textwrap.dedent("\n".join(context))
        if len(before) <= HEAD_CHARS:
            yield position, before, "\n".join(piece)
        position += len(piece)
        context = _last_lines(lines[start - 1 : position - 1])


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _paragraphs(text: str) -> list[str]:
    return [part for part in re.split(r"\n\s*\n", text.strip()) if part.strip()]


def _last_lines(lines: Sequence[str]) -> Sequence[str]:
    """The last lines, CONTEXT_CHARS at most, blank ones at the end left out."""
    total, index = 0, len(lines)
    while index and total + len(lines[index - 1]) < CONTEXT_CHARS:
        index -= 1
        total += len(lines[index]) + 1
    return lines[index:]


def _pieces(lines: Sequence[str]) -> list[Sequence[str]]:
    """Cut a body into runs of lines: whole if short, else at blank lines, else at statements.

    The pieces joined are the body again; one that could not be cut short stays too long.
    """
    if len("\n".join(lines)) <= CODE_CHARS or len(lines) == 1:
        return [lines]
    blank = [i + 1 for i, line in enumerate(lines[:-1]) if not line.strip()]
    if blank:
        return _cut(lines, blank, joined=0)
    indents = [len(line) - len(line.lstrip()) for line in lines]
    starts = [i for i in range(1, len(lines)) if indents[i] <= min(indents)]
    if not starts:  # one statement with a body: its head alone, then the rest
        starts = [1]
    return _cut(lines, starts, joined=_PIECE_CHARS)


def _cut(lines: Sequence[str], starts: Sequence[int], joined: int) -> list[Sequence[str]]:
    """Cut before each line of `starts`, but after a piece shorter than `joined`."""
    pieces: list[Sequence[str]] = []
    begin = 0
    for end in [*starts, len(lines)]:
        if end < len(lines) and len("\n".join(lines[begin:end])) < joined:
            continue
        pieces += _pieces(lines[begin:end]) if end - begin < len(lines) else [lines]
        begin = end
    return pieces
