"""Files, folders and standard input as prompts: compressed, arrays, mixed; broken and hostile."""

import gzip
import io
import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import prompt_json, prompt_sources
from pipeline.errors import PipelineError
from pipeline.prompt_turns import Message
from pipeline.prompts import PromptRow, RejectedRow, read_prompts


def prompt(text: str) -> dict[str, Any]:
    return {"prompt": text}


def jsonl(*rows: Any) -> bytes:
    return b"".join((json.dumps(row) + "\n").encode() for row in rows)


def told(path: Path | str, **options: Any) -> list[tuple[str, str]]:
    """Each row's source, and its question or reject reason."""
    return [
        (row.source, row.reason if isinstance(row, RejectedRow) else row.messages[0].content)
        for row in read_prompts(str(path), **options)
    ]


# ---- compressed


PACK = {"gz": gzip.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("kind", PACK)
def test_compressed_lines_of_several_frames(tmp_path: Path, kind: str) -> None:
    """E20: frames one after the other are one stream, whatever the name says."""
    pack = PACK[kind]
    data = jsonl(prompt("a"), {"prompt": 1}, prompt("日本"))
    for name in (f"p.jsonl.{kind}", "p.bin"):
        path = tmp_path / name
        path.write_bytes(pack(data[:30]) + pack(data[30:]))
        assert told(path) == [
            (f"{name}:1", "a"),
            (f"{name}:2", "bad_content"),
            (f"{name}:3", "日本"),
        ]


@pytest.mark.parametrize("kind", PACK)
def test_cut_or_damaged_stream_is_one_error_not_fewer_rows(tmp_path: Path, kind: str) -> None:
    rows = [prompt(f"question {i} {i * 7919 % 10007}") for i in range(20_000)]
    data = PACK[kind](jsonl(*rows))
    path = tmp_path / f"p.jsonl.{kind}"
    for broken in (data[: len(data) // 2], data[:-1], data + b"more"):
        path.write_bytes(broken)
        with pytest.raises(PipelineError, match=rf"p\.jsonl\.{kind}(: the| is broken)"):
            told(path)


def test_an_array_and_a_parquet_file_inside_compression(tmp_path: Path) -> None:
    path = tmp_path / "p.json.gz"
    path.write_bytes(gzip.compress(b" [" + json.dumps(prompt("a")).encode() + b"]"))
    assert told(path) == [("p.json.gz:1", "a")]
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "p.parquet")
    path.write_bytes(gzip.compress((tmp_path / "p.parquet").read_bytes()))
    with pytest.raises(PipelineError, match="compressed Parquet"):
        told(path)
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(PipelineError, match="empty once decompressed"):
        told(path)


@pytest.mark.parametrize("kind", PACK)
def test_a_bomb_ends_at_the_ratio_in_bounded_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E20: 1 GiB of zeros; the first 64 MiB are free, then 1,000 times the file's size."""
    monkeypatch.setattr(prompt_json, "MAX_LINE_BYTES", 2**20)
    monkeypatch.setattr(prompt_sources, "MAX_RATIO", 100)
    out = io.BytesIO()
    if kind == "zst":
        with zstandard.ZstdCompressor().stream_writer(out, size=2**28, closefd=False) as writer:
            for _ in range(2**8):
                writer.write(bytes(2**20))
    else:
        with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=1) as packed:
            for _ in range(2**8):
                packed.write(bytes(2**20))
    path = tmp_path / f"bomb.jsonl.{kind}"
    path.write_bytes(out.getvalue())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PipelineError, match="unpacks to more than 100 times its size"):
        told(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


# ---- arrays


def array(tmp_path: Path, text: str) -> list[tuple[str, str]]:
    path = tmp_path / "p.json"
    path.write_bytes(text.encode())
    return told(path)


def test_array_rows_and_their_faults(tmp_path: Path) -> None:
    text = (
        '\ufeff \n[{"prompt": "a, ] \\" } b"}, 7,\n{"prompt": "c", "prompt": "d"},, '
        '{"prompt" "e"}, {"prompt": "f", "tags": [[1], {"x": "]"}]} ]\n '
    )
    assert [what for _, what in array(tmp_path, text)] == [
        'a, ] " } b',
        "not_an_object",
        "duplicate_key",
        "bad_json",
        "bad_json",
        "f",
    ]
    assert [source for source, _ in array(tmp_path, text)][-1] == "p.json:6"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"prompt": "a"}', ["bad_json"]),
        ('[{"prompt": "a"}, {"prompt": "b', ["a", "bad_json"]),
        ('[{"prompt": "a"},]', ["a", "bad_json"]),
        ('[{"prompt": "a"}] {"prompt": "b"}', ["a", "bad_json"]),
        ("[" + "[" * 100_000, ["bad_json"]),
        ("[" + "[" * 100_000 + "]" * 100_000 + ', {"prompt": "a"}]', ["too_deep", "a"]),
        ('[{"prompt": "\\ud83d"}, {"prompt": "\\ud83d\\ude00"}]', ["lone_surrogate", "\U0001f600"]),
    ],
)
def test_arrays_that_break_off_lose_nothing_silently(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    assert [what for _, what in array(tmp_path, text)] == expected


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
        min_size=1,
        max_size=5,
    ),
    size=st.integers(1, 40),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
)
def test_any_chunk_border_gives_the_same_rows(
    rows: list[str], size: int, ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps([prompt(row) for row in rows], ensure_ascii=ascii_only, indent=indent)
    cut = prompt_json._ArrayCutter(1)
    data = text.encode()[1:]
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    found = [element for chunk in chunks for element, _ in cut.feed(chunk)]
    assert list(cut.finish()) == []
    assert [json.loads(element)["prompt"] for element in found] == rows  # type: ignore[arg-type]


def test_a_row_of_an_array_may_not_fill_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_json, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "p.json"
    with path.open("w") as stream:
        stream.write('[{"prompt": "')
        for _ in range(300):
            stream.write("x" * 100_000)
        stream.write('"}, {"prompt": "b"}]')
    tracemalloc.start()
    assert told(path) == [("p.json:1", "line_too_long"), ("p.json:2", "b")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


# ---- folders and standard input


def test_a_folder_mixes_formats_in_path_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "c.jsonl").write_bytes(jsonl(prompt("c1"), prompt("c2")))
    (folder / "b.json").write_bytes(json.dumps([prompt("b1")]).encode())
    pq.write_table(pa.table({"instruction": ["p1"]}), folder / "a.parquet")
    (folder / "sub" / "d.ndjson.zst").write_bytes(zstandard.compress(jsonl(prompt("d1"))))
    (folder / "README.md").write_text("not prompts")
    (folder / "_SUCCESS.json").write_text("{}")
    (folder / "empty.jsonl").touch()
    (folder / ".hidden" / "x.jsonl").write_bytes(jsonl(prompt("x")))
    assert told(folder) == [
        ("a.parquet:1", "p1"),
        ("b.json:1", "b1"),
        ("c.jsonl:1", "c1"),
        ("c.jsonl:2", "c2"),
        ("sub/d.ndjson.zst:1", "d1"),
    ]


def test_standard_input_is_read_once_and_told_apart_by_content() -> None:
    script = (
        "from pipeline.prompts import read_prompts\n"
        "for _ in range(2): print([(r.source, r.messages[0].content) for r in read_prompts('-')])"
    )
    for data in (jsonl(prompt("a")), gzip.compress(b'[{"prompt": "a"}]')):
        done = subprocess.run(
            [sys.executable, "-c", script], input=data, capture_output=True, check=True
        )
        assert done.stdout.decode().splitlines() == ["[('stdin:1', 'a')]"] * 2
    done = subprocess.run([sys.executable, "-c", script], input=b"", capture_output=True)
    assert b"stdin is empty" in done.stderr


# ---- columns under other names


def test_columns_under_other_names(tmp_path: Path) -> None:
    rows = [{"q": "Why?", "a": "So.", "uid": 7, "prompt": "other"}, {"uid": 8}]
    lines = tmp_path / "p.jsonl"
    lines.write_bytes(jsonl(*rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    for path in (lines, tmp_path / "p.parquet"):
        found = list(read_prompts(str(path), columns="prompt=q, completion=a, id=uid"))
        turns = (Message("user", "Why?"), Message("assistant", "So."))
        assert found[0] == PromptRow("7", f"{path.name}:1", turns)
        assert isinstance(found[1], RejectedRow) and found[1].reason == "no_messages"
    with pytest.raises(PipelineError, match=r"p\.parquet has no column 'gone', only: 'q'"):
        told(tmp_path / "p.parquet", columns="prompt=gone")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("prompt", "must be OURS=THEIRS"),
        ("prompt=", "must be OURS=THEIRS"),
        ("question=q", "'question' is none of"),
        ("id=a,id=b", "'id' is named twice"),
    ],
)
def test_columns_that_name_nothing(tmp_path: Path, columns: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        read_prompts(str(tmp_path / "any.jsonl"), columns=columns)
