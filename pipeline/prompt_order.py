"""Several prompt sources as one: tags, shares by weight, shuffling; in bounded memory."""

import hashlib
import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

from pipeline.errors import PipelineError

_TAGGED = re.compile(r"(?P<path>.+)=(?P<tag>[A-Za-z0-9_.-]+)(:(?P<weight>\d+(\.\d+)?))?")
_CACHE_KIB = 64 * 2**10

T = TypeVar("T")


class PromptSource(NamedTuple):
    """A value of --prompts: FILE, FILE=TAG or FILE=TAG:WEIGHT."""

    path: str
    tag: str = ""
    weight: Fraction | None = None


def parse_sources(values: Sequence[str]) -> list[PromptSource]:
    """The sources in order. Raises PipelineError: none, a weight of 0, weights for some only."""
    sources = [_parse(value) for value in values]
    if not sources:
        raise PipelineError("--prompts: name a file, a folder or a dataset")
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and not all(weighted):
        bare = sources[weighted.index(False)].path
        raise PipelineError(f"--prompts {bare}: needs a weight too, as FILE=TAG:1")
    return sources


def _parse(value: str) -> PromptSource:
    found = _TAGGED.fullmatch(value)
    # A name may have such an end itself.
    if found is None or (value.strip() and _exists(value)):
        return PromptSource(value)
    weight = None if found["weight"] is None else Fraction(found["weight"])
    if weight == 0:
        raise PipelineError(f"--prompts {value}: the weight must be above 0; leave the file out")
    return PromptSource(found["path"], found["tag"], weight)


def _exists(value: str) -> bool:
    try:
        return Path(value).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def mixed(streams: Sequence[Iterator[T]], weights: Sequence[Fraction]) -> Iterator[T]:
    """Rows of all streams in proportion to their weights, ending with the first that is used up.

    Each row comes from the stream that is furthest behind its share, the earlier one of equals.
    """
    taken = [0] * len(streams)
    while True:
        turn = min(range(len(streams)), key=lambda i: ((taken[i] + 1) / weights[i], i))
        try:
            row = next(streams[turn])
        except StopIteration:
            return
        taken[turn] += 1
        yield row


def shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """The texts in an order that depends on the seed and their number alone.

    They wait in a temporary database file, so memory does not grow with them.
    """
    waiting = sqlite3.connect("")
    waiting.executescript(
        f"PRAGMA journal_mode = OFF; PRAGMA cache_size = -{_CACHE_KIB};"
        "CREATE TABLE waiting (rank BLOB, text TEXT);"
    )
    waiting.executemany(
        "INSERT INTO waiting VALUES (?, ?)",
        ((_rank(seed, index), text) for index, text in enumerate(texts)),
    )
    for (text,) in waiting.execute("SELECT text FROM waiting ORDER BY rank"):
        yield text
    waiting.close()


def _rank(seed: int, index: int) -> bytes:
    return hashlib.blake2b(json.dumps([seed, index]).encode(), digest_size=16).digest()
