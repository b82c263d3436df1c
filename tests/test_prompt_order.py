"""Several sources as one: tags and weights, shuffling, limits, deduplication."""

import json
import tracemalloc
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.prompt_order import PromptSource, mixed, parse_sources, shuffled
from pipeline.prompts import PromptHasher, PromptRow, RejectedRow, read_prompts


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(path: Path, count: int) -> str:
    return write(path, *({"prompt": f"{path.stem} {i}"} for i in range(count)))


def told(paths: str | list[str], **options: Any) -> list[str]:
    return [
        row.reason if isinstance(row, RejectedRow) else row.messages[0].content
        for row in read_prompts(paths, **options)
    ]


def prompts_hash(paths: str | list[str], **options: Any) -> str:
    hasher = PromptHasher()
    for row in read_prompts(paths, **options):
        if isinstance(row, PromptRow):
            hasher.update(row)
    return hasher.hexdigest()


# ---- tags and weights


def test_sources_with_and_without_tags(tmp_path: Path) -> None:
    a, b = questions(tmp_path / "a.jsonl", 2), questions(tmp_path / "b.jsonl", 1)
    odd = questions(tmp_path / "odd=x:3", 1)  # a file of that very name
    rows = list(read_prompts([a, f"{b}=code", odd, f"{odd}=y"]))
    assert [(row.source, row.tag) for row in rows] == [
        ("a.jsonl:1", ""),
        ("a.jsonl:2", ""),
        ("code:b.jsonl:1", "code"),
        ("odd=x:3:1", ""),
        ("y:odd=x:3:1", "y"),
    ]
    assert isinstance(rows[-1], RejectedRow) and rows[-1].reason == "duplicate_id"
    assert prompts_hash([f"{b}=code"]) != prompts_hash([b])


def test_weights_are_shares_of_the_rows_until_a_source_is_used_up(tmp_path: Path) -> None:
    a, b = questions(tmp_path / "a.jsonl", 30), questions(tmp_path / "b.jsonl", 1000)
    rows = list(read_prompts([f"{a}=code:3", f"{b}=talk:1"]))
    assert Counter(row.tag for row in rows) == {"code": 30, "talk": 10}
    assert "".join(row.tag[0] for row in rows[:8]) == "ccctccct"
    few = Counter(row.tag for row in read_prompts([f"{a}=code:3", f"{b}=talk:1"], limit=12))
    assert few == {"code": 9, "talk": 3}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4))
def test_mixing_keeps_every_share_within_a_row(sizes: list[tuple[int, int]]) -> None:
    weights = [Fraction(weight) for _, weight in sizes]
    streams = [iter([(i, n) for n in range(size)]) for i, (size, _) in enumerate(sizes)]
    found = list(mixed(streams, weights))
    for length in range(len(found) + 1):
        counts = Counter(i for i, _ in found[:length])
        for i, weight in enumerate(weights):
            assert abs(counts[i] - length * weight / sum(weights)) < len(sizes)
    assert any(Counter(i for i, _ in found)[i] == size for i, (size, _) in enumerate(sizes))
    for i in range(len(sizes)):  # each stream in its own order
        assert [n for j, n in found if j == i] == list(range(Counter(j for j, _ in found)[i]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "name a file"),
        (["a.jsonl=x:1", "b.jsonl"], "b.jsonl: needs a weight too"),
        (["a.jsonl=x:0"], "must be above 0"),
        (["gone.jsonl=x:2"], "no prompt file or folder 'gone.jsonl'"),
    ],
)
def test_sources_that_cannot_be_mixed(values: list[str], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        read_prompts(values)


def test_weights_are_exact() -> None:
    assert parse_sources(["a=x:0.1", "b=y:2"]) == [
        PromptSource("a", "x", Fraction(1, 10)),
        PromptSource("b", "y", Fraction(2)),
    ]


# ---- shuffling


def test_shuffling_is_a_permutation_that_the_seed_decides(tmp_path: Path) -> None:
    path = questions(tmp_path / "a.jsonl", 200)
    plain, one, other = told(path), told(path, shuffle=1), told(path, shuffle=2)
    assert sorted(one) == sorted(other) == sorted(plain)
    assert one == told(path, shuffle=1) and one != other and one != plain
    assert told(path, shuffle=1, limit=20) == one[:20]  # a sample of the whole
    assert sum(int(text.split()[1]) >= 100 for text in one[:40]) in range(10, 31)
    # Pinned, since runs resume by it: the order of BLAKE2b hashes of [seed, index].
    assert one[:3] == ["a 44", "a 11", "a 175"]


def test_shuffling_keeps_rejects_ids_tools_and_places(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]}
    rows = [
        {"id": "\ud83d", "prompt": "x"},
        {"id": 12345678901234567890123, "messages": [{"role": "user", "content": "é\0"}]},
        {"messages": [{"role": "user", "content": "q"}, call], "tools": [{"name": "f"}]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]},
        {"text": "<|im_start|>"},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    plain = {row.source: row for row in read_prompts(path)}
    mixed_up = list(read_prompts(path, shuffle=3))
    assert {row.source: row for row in mixed_up} == plain
    assert [row.source for row in mixed_up] != list(plain)


def test_shuffled_weights_draw_from_whole_files(tmp_path: Path) -> None:
    a, b = questions(tmp_path / "a.jsonl", 10), questions(tmp_path / "b.jsonl", 1000)
    rows = told([f"{a}=x:1", f"{b}=y:1"], shuffle=5)
    drawn = [int(text.split()[1]) for text in rows if text.startswith("b")]
    assert len(drawn) == 10 and max(drawn) > 500
    # Without weights, files are shuffled together.
    assert {text[0] for text in told([a, b], shuffle=5)[:200]} == {"a", "b"}


def test_shuffling_holds_rows_on_disk() -> None:
    tracemalloc.start()
    count = sum(1 for _ in shuffled((f"{i} " + "x" * 10_000 for i in range(5000)), 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 5000 and peak < 5_000_000


# ---- deduplication


def rows_to_dedup() -> list[dict[str, Any]]:
    first = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    second = [{"role": "user", "content": "R"}]
    return [
        {"id": 1, "messages": first},
        {"id": 2, "prompt": "Q", "completion": "other"},
        {"id": 3, "messages": first + second},
        {"id": 4, "messages": [first[0], {**first[1], "content": "B"}, *second]},
        {"id": 5, "prompt": "Q", "system": "S"},
        {"id": 6, "prompt": "Q "},
        {"id": 1, "prompt": "new"},
        {"prompt": "new"},
    ]


@pytest.mark.parametrize(
    ("turns", "duplicates"), [("all", {2, 4}), ("last", {2}), ("given", set()), (None, set())]
)
def test_rows_that_ask_the_same(tmp_path: Path, turns: Any, duplicates: set[int]) -> None:
    path = write(tmp_path / "a.jsonl", *rows_to_dedup())
    found = list(read_prompts(path, dedup=turns))
    reasons = [row.reason if isinstance(row, RejectedRow) else "" for row in found]
    assert {i + 1 for i, reason in enumerate(reasons) if reason == "duplicate"} == duplicates
    # A row that is rejected does not stand in the way of a later one.
    assert reasons[6:] == ["duplicate_id", ""]
