"""Reading prompts: every source kind, every reject reason, exact texts and ids."""

import json
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import prompt_json
from pipeline.errors import PipelineError
from pipeline.prompt_reasons import REJECT_REASONS
from pipeline.prompt_turns import Message
from pipeline.prompts import (
    PromptHasher,
    PromptRow,
    RejectedRow,
    SeenIds,
    content_id,
    read_prompts,
)

HELLO = [{"role": "user", "content": "Hello"}]
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write lines (bytes, text or objects) as a JSON Lines file; its path."""

    def to_file(*lines: Any, name: str = "in.jsonl", end: bytes = b"\n") -> str:
        path = tmp_path / name
        encoded = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        path.write_bytes(b"".join(line + end for line in encoded))
        return str(path)

    return to_file


def only(path: str) -> PromptRow | RejectedRow:
    rows = list(read_prompts(path))
    assert len(rows) == 1
    return rows[0]


def accepted(path: str) -> PromptRow:
    row = only(path)
    assert isinstance(row, PromptRow), row
    return row


def reasons(path: str) -> list[str | None]:
    """None for an accepted row, else the reason, in order."""
    return [row.reason if isinstance(row, RejectedRow) else None for row in read_prompts(path)]


# ---- rejects

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes"}
SYSTEM = {"role": "system", "content": "Be kind"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
CALL_OF_LIST = {**CALL, "tool_calls": [{"name": "f", "arguments": [1]}]}

BAD_ROWS: list[tuple[str, Any]] = [
    ("bad_encoding", b'{"messages":[{"role":"user","content":"\xff"}]}'),
    ("bad_json", '{"messages":[{"role":"user","con'),
    ("bad_json", '{"messages":[]} trailing'),
    ("bad_json", '{"a":' + '"' + '\\"[' * 500),
    ("too_deep", "[" * 100_000 + "]" * 100_000),
    ("too_deep", '{"tags":' + "[" * 100 + "]" * 100 + "}"),
    ("duplicate_key", '{"id":1,"id":2,"messages":[{"role":"user","content":"a"}]}'),
    ("duplicate_key", '{"messages":[{"role":"user","role":"user","content":"a"}]}'),
    ("non_finite_number", '{"score":NaN,"messages":[{"role":"user","content":"a"}]}'),
    ("non_finite_number", '{"score":-Infinity,"messages":[]}'),
    ("not_an_object", "[1, 2]"),
    ("not_an_object", "null"),
    ("no_messages", {"body": "Hello"}),
    ("no_messages", {"messages": None, "conversations": None}),
    ("both_conventions", {"messages": HELLO, "conversations": [{"from": "human", "value": "x"}]}),
    ("empty_conversation", {"messages": []}),
    ("bad_turn", {"messages": "Hello"}),
    ("bad_turn", {"messages": {"role": ["user"], "content": ["x"]}}),
    ("bad_turn", {"messages": ["Hello"]}),
    ("bad_turn", {"messages": [{"content": "x"}]}),
    ("bad_turn", {"messages": [{"role": 7, "content": "x"}]}),
    ("bad_turn", {"messages": [{"role": "user", "from": "gpt", "content": "x"}]}),
    ("bad_turn", {"messages": [{"role": "user", "content": "x", "value": "y"}]}),
    ("unknown_role", {"messages": [{"role": "narrator", "content": "x"}]}),
    ("unknown_role", {"conversations": [{"from": "\ud83d", "value": "x"}]}),
    ("tool_order", {"messages": [USER, {"role": "tool", "content": "x"}]}),
    ("tool_order", {"messages": [USER, CALL, {"role": "tool", "content": "x"}, USER]}),
    ("bad_tool_call", {"messages": [USER, {**ANSWER, "tool_calls": [{"arguments": {}}]}]}),
    ("bad_tool_call", {"messages": [USER, {**ANSWER, "tool_calls": "f("}]}),
    ("bad_tool_call", {"messages": [{**USER, "tool_calls": [{"name": "f"}]}]}),
    (
        "bad_tool_call",
        {"messages": [USER, {**CALL, "tool_calls": [{"name": "f", "arguments": 1}]}]},
    ),
    ("bad_tool", {"messages": [USER], "tools": [{"description": "f"}]}),
    ("bad_tool", {"messages": [USER], "tools": "f("}),
    ("non_finite_number", b'{"prompt": "x", "tools": [{"name": "f", "parameters": 1e999}]}'),
    ("bad_token_ids", {"input_ids": [1, -1]}),
    ("bad_token_ids", {"input_ids": [1, 1.5]}),
    ("bad_token_ids", {"input_ids": "12"}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": [1]}),
    ("bad_loss_mask", {"input_ids": [1, 2], "loss_mask": [0, 2]}),
    ("both_conventions", {"input_ids": [1, 2], "text": "x"}),
    ("empty_conversation", {"input_ids": []}),
    ("bad_turn", {"messages": [USER, {**ANSWER, "reasoning": "a", "thinking": "b"}]}),
    ("empty_content", {"messages": [{"role": "user", "content": None}]}),
    ("empty_content", {"messages": [{"role": "user", "content": " \n\u3000"}]}),
    ("empty_content", {"messages": [{"role": "user", "content": []}]}),
    ("bad_content", {"messages": [{"role": "user", "content": 12}]}),
    ("bad_content", {"messages": [{"role": "user", "content": {"text": "x"}}]}),
    ("bad_content", {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}),
    ("bad_content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("lone_surrogate", {"messages": [{"role": "user", "content": "\ud83d"}]}),
    ("lone_surrogate", {"id": "\udc00", "messages": HELLO}),
    ("system_not_first", {"messages": [USER, SYSTEM]}),
    ("system_not_first", {"messages": [SYSTEM, USER], "system": "Be brief"}),
    ("assistant_first", {"messages": [ANSWER, USER]}),
    ("assistant_first", {"messages": [SYSTEM, ANSWER]}),
    ("consecutive_roles", {"messages": [USER, USER]}),
    ("consecutive_roles", {"messages": [USER, ANSWER, ANSWER]}),
    ("no_user_turn", {"messages": [SYSTEM]}),
    ("bad_id", {"id": True, "messages": HELLO}),
    ("bad_id", {"id": [1], "messages": HELLO}),
    ("bad_id", {"id": "", "messages": HELLO}),
    ("long_id", {"id": "x" * 1025, "messages": HELLO}),
]
FROM_RENDERING = {
    "template_refused",
    "template_limit",
    "template_drops_text",
    "history_changes",
    "control_token",
    "bad_bos",
    "no_open_answer",
    "no_assistant_turn",
    "answers_touch",
    "too_long",
}


@pytest.mark.parametrize(("reason", "line"), BAD_ROWS)
def test_bad_row_is_one_reject_among_good_ones(write: Write, reason: str, line: Any) -> None:
    good = [{"id": n, "messages": HELLO} for n in range(2)]
    rows = list(read_prompts(write(good[0], line, good[1])))
    assert [type(row) for row in rows] == [PromptRow, RejectedRow, PromptRow]
    bad = rows[1]
    assert isinstance(bad, RejectedRow)
    assert (bad.reason, bad.source) == (reason, "in.jsonl:2")
    # Rejects are written to a file: each must be encodable and of a readable length.
    assert len(json.dumps(bad, ensure_ascii=False).encode()) < 2500


def test_every_reason_has_a_case() -> None:
    elsewhere = {"line_too_long", "duplicate_id", "duplicate"}
    assert {reason for reason, _ in BAD_ROWS} | elsewhere | FROM_RENDERING == set(REJECT_REASONS)


def test_bad_json_names_the_byte(write: Write) -> None:
    first = {"messages": HELLO}
    bad = '{"messages": "あ" oops}'
    row = list(read_prompts(write(first, bad)))[1]
    assert isinstance(row, RejectedRow)
    offset = len(json.dumps(first)) + 1 + bad.encode().index(b"oops")
    assert row.detail.endswith(f"byte offset {offset}")


def test_long_line_is_skipped_whole(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_json, "MAX_LINE_BYTES", 100)
    path = write(
        {"messages": HELLO},
        {"messages": [{"role": "user", "content": "x" * 3_000_000}]},
        {"id": "after", "messages": HELLO},
        b"{" + b" " * 98 + b"}",  # exactly at the cap
    )
    assert reasons(path) == [None, "line_too_long", None, "no_messages"]
    bad = list(read_prompts(path))[1]
    assert isinstance(bad, RejectedRow)
    assert (
        bad.detail
        == f"longer than 100 bytes, at byte offset {len(json.dumps({'messages': HELLO})) + 1}"
    )


def test_cut_last_line_without_newline(write: Write) -> None:
    path = write({"messages": HELLO})
    with Path(path).open("ab") as stream:
        stream.write(b'{"messages":[{"role":"us')
    assert reasons(path) == [None, "bad_json"]


def test_uneven_roles_all_counted(write: Write) -> None:
    rows = [
        {"id": n, "messages": [USER, ANSWER, ANSWER] if n < 37 else [USER, ANSWER]}
        for n in range(100)
    ]
    found = reasons(write(*rows))
    assert (found.count("consecutive_roles"), found.count(None)) == (37, 63)


def test_hostile_quotes_cost_linear_time(write: Write) -> None:
    # Every quote could start a string that never closes; quadratic matching takes minutes.
    assert reasons(write('{"a":"' + '\\"' * 400_000 + "[" * 200)) == ["bad_json"]


def test_many_brackets_are_not_depth(write: Write) -> None:
    wide = {"tags": [[{}]] * 300, "messages": [{"role": "user", "content": '["\\' * 300}]}
    deepest = '{"tags":' + "[" * 99 + "]" * 99 + ',"messages":[{"role":"user","content":"a"}]}'
    assert reasons(write(wide, deepest)) == [None, None]


# ---- texts


def test_bom_crlf_blank_lines_and_line_separator(tmp_path: Path) -> None:
    texts = ["one\u2028two\u0085", "crlf\r\ninside", "plain"]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": t}]}, ensure_ascii=False).encode()
        for t in texts
    ]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\r\n  \n" + lines[1] + b"\r\n" + lines[2])
    rows = list(read_prompts(str(path)))
    assert [row.messages[0].content for row in rows if isinstance(row, PromptRow)] == texts
    assert [row.source for row in rows] == ["odd.jsonl:1", "odd.jsonl:4", "odd.jsonl:5"]


def test_surrogate_pair_survives(write: Write) -> None:
    line = r'{"messages":[{"role":"user","content":"\ud83d\ude00"}]}'
    assert accepted(write(line)).messages[0].content == "\U0001f600"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_text_round_trip(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ascii_only: bool
) -> None:
    roles = ["user", "assistant"] * 2
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    path = tmp_path_factory.mktemp("round") / "in.jsonl"
    path.write_bytes(json.dumps({"messages": turns}, ensure_ascii=ascii_only).encode() + b"\n")
    assert [m.content for m in accepted(str(path)).messages] == texts


def test_text_parts_are_joined(write: Write) -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "extra": None}]
    row = accepted(write({"messages": [{"role": "user", "content": parts}]}))
    assert row.messages == (Message("user", "a b"),)


# ---- conventions


def test_sharegpt_equals_messages(write: Write) -> None:
    share = {
        "conversations": [
            {"from": "system", "value": "S"},
            {"from": "human", "value": "Q"},
            {"from": "gpt", "value": "A"},
        ]
    }
    plain = {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "A"},
        ]
    }
    one, two = accepted(write(share)), accepted(write(plain))
    assert (
        one.messages == two.messages == tuple(map(Message, ("system", "user", "assistant"), "SQA"))
    )
    assert one.sample_id == two.sample_id


def test_conventions_mixed_in_a_row_and_in_a_file(write: Write) -> None:
    mixed = {"conversations": [{"from": "human", "value": "Q"}, ANSWER]}
    nulls = {
        "messages": [{"role": "user", "content": "R", "from": None, "tool_calls": None}],
        "conversations": None,
    }
    rows = list(read_prompts(write(mixed, nulls)))
    assert [row.messages for row in rows if isinstance(row, PromptRow)] == [
        (Message("user", "Q"), Message("assistant", "Yes")),
        (Message("user", "R"),),
    ]


def test_system_beside_the_turns_comes_first(write: Write) -> None:
    row = accepted(write({"conversations": [{"from": "human", "value": "Q"}], "system": "S"}))
    assert row.messages == (Message("system", "S"), Message("user", "Q"))


# ---- ids


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("12345678901234567890123", "12345678901234567890123"),
        ("-0", "-0"),
        ("1.50", "1.50"),
        ("1E5", "1E5"),
        ("9" * 1000, "9" * 1000),
        ('"../../x"', "../../x"),
        ('"/etc/x"', "/etc/x"),
        ('"a\\u0000b"', "a\0b"),
        ('" 007 "', " 007 "),
        ('"' + "x" * 1024 + '"', "x" * 1024),
    ],
)
@pytest.mark.parametrize("key", ["id", "sample_id"])
def test_id_is_exact_text(write: Write, key: str, written: str, expected: str) -> None:
    line = f'{{"{key}":{written},"messages":[{{"role":"user","content":"a"}}]}}'
    assert accepted(write(line)).sample_id == expected


def test_null_id_gives_way(write: Write) -> None:
    assert accepted(write({"id": None, "sample_id": "s", "messages": HELLO})).sample_id == "s"


def test_content_id_is_pinned(write: Write) -> None:
    # sha256 of [{"content":"Hello","role":"user"}]: shards are found by it, so it never changes.
    row = accepted(write({"messages": HELLO}))
    assert row.sample_id == "013cf0c05f083773340d61c256a32240"
    assert row.sample_id == content_id(row.chat)


def test_duplicates(write: Write) -> None:
    path = write(
        {"id": 1, "messages": HELLO},
        {"id": "1", "messages": [USER]},
        {"messages": [USER]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"id": 2, "messages": HELLO},
    )
    assert reasons(path) == [None, "duplicate_id", None, "duplicate_id", None]
    rows = [row for row in read_prompts(path) if isinstance(row, RejectedRow)]
    assert rows[0].detail == "an earlier row has the id '1'"
    assert rows[1].detail == "an earlier row has the same conversation"


def test_a_rejected_row_does_not_take_its_id(write: Write) -> None:
    assert reasons(write({"id": 1, "messages": []}, {"id": 1, "messages": HELLO})) == [
        "empty_conversation",
        None,
    ]


def test_seen_ids() -> None:
    seen = SeenIds()
    assert [seen.add(text) for text in ("a", "b", "a", "A")] == [True, True, False, True]


# ---- hash of all prompts


def hash_of(*rows: tuple[str, list[tuple[str, str]]]) -> str:
    hasher = PromptHasher()
    for sample_id, turns in rows:
        hasher.update(PromptRow(sample_id, "anywhere:1", tuple(Message(*turn) for turn in turns)))
    return hasher.hexdigest()


def test_prompt_hash_sees_ids_texts_roles_order_and_borders() -> None:
    base = hash_of(("a", [("user", "x")]), ("b", [("user", "y")]))
    others = [
        hash_of(("b", [("user", "y")]), ("a", [("user", "x")])),
        hash_of(("a", [("user", "x")])),
        hash_of(("a", [("user", "x")]), ("c", [("user", "y")])),
        hash_of(("a", [("user", "x")]), ("b", [("system", "y")])),
        hash_of(("a", [("user", "x")]), ("b", [("user", "y ")])),
        hash_of(("a", [("user", "x"), ("user", "y")]), ("b", [])),
        hash_of(("a", [("user", 'x"}]\n"b" [{"content":"y","role":"user')])),
    ]
    assert len({base, *others}) == len(others) + 1
    assert base == hash_of(("a", [("user", "x")]), ("b", [("user", "y")]))


def test_prompt_hash_ignores_where_rows_came_from() -> None:
    one, two = PromptHasher(), PromptHasher()
    one.update(PromptRow("a", "x.jsonl:1", (Message("user", "q"),)))
    two.update(PromptRow("a", "y.parquet:9", (Message("user", "q"),)))
    assert one.hexdigest() == two.hexdigest()


# ---- limit, memory, sources


def test_limit_counts_rejects(write: Write) -> None:
    path = write({"id": 1, "messages": HELLO}, "oops", {"id": 2, "messages": HELLO})
    assert [type(row) for row in read_prompts(path, limit=2)] == [PromptRow, RejectedRow]
    with pytest.raises(PipelineError, match="at least 1"):
        read_prompts(path, limit=0)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    text = "x" * 100_000
    with path.open("w") as stream:
        for n in range(200):  # 20 MB
            stream.write(json.dumps({"id": n, "messages": [{"role": "user", "content": text}]}))
            stream.write("\n")
    tracemalloc.start()
    assert sum(isinstance(row, PromptRow) for row in read_prompts(str(path))) == 200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("blank.jsonl", b"\xef\xbb\xbf\n \r\n", "has no rows"),
        ("rows.jsonl.gz", b"\x1f\x8b\x08\x00", r"rows\.jsonl\.gz is broken gzip"),
        ("rows.jsonl.bz2", b"BZh91AY", "bzip2-compressed"),
        ("rows.jsonl", b"\xff\xfe{\x00", "UTF-16"),
        ("rows.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("rows.json", b" [\n ] ", "has no rows"),
        ("rows.parquet", b"not parquet", "does not start like a Parquet file"),
        ("rows.parquet", b"PAR1" + b"\0" * 40, "cut-off Parquet file"),
    ],
)
def test_unusable_file(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(PipelineError, match=message):
        list(read_prompts(str(path)))


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "./gone.jsonl", "/no/such/place", "gone.jsonl"])
def test_missing_path(path: str) -> None:
    with pytest.raises(PipelineError, match=r"There is no prompt file|is empty|cannot be used"):
        read_prompts(path)


def test_url_is_refused_without_printing_it() -> None:
    with pytest.raises(PipelineError, match="not from a URL") as caught:
        read_prompts("https://me:hunter2@host/x.jsonl")
    assert "hunter2" not in str(caught.value)


def test_source_has_no_folder_names(write: Write) -> None:
    assert (
        accepted(write({"messages": HELLO}, name="my prompts.jsonl")).source == "my prompts.jsonl:1"
    )


# ---- Parquet and datasets

ROWS: list[dict[str, Any]] = [
    {"id": 1, "messages": [{"role": "user", "content": "a\u2028b"}]},
    {"id": 2, "messages": [USER, ANSWER]},
    {"id": 2, "messages": HELLO},
    {"id": None, "messages": []},
]


def check_rows(path: str, name: str) -> None:
    rows = list(read_prompts(path))
    assert [row.source for row in rows] == [f"{name}:{n}" for n in (1, 2, 3, 4)]
    assert rows[0] == PromptRow("1", f"{name}:1", (Message("user", "a\u2028b"),))
    assert isinstance(rows[1], PromptRow)
    assert rows[1].messages == (Message("user", "Hi"), Message("assistant", "Yes"))
    assert [row.reason for row in rows[2:] if isinstance(row, RejectedRow)] == [
        "duplicate_id",
        "empty_conversation",
    ]


def test_parquet(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([{**row, "junk": b"\xff" * 9} for row in ROWS])
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=2)
    check_rows(str(tmp_path / "rows.parquet"), "rows.parquet")
    # It is the content that counts, not the suffix.
    (tmp_path / "rows.parquet").rename(tmp_path / "rows.bin")
    check_rows(str(tmp_path / "rows.bin"), "rows.bin")


def test_parquet_ids_are_exact(tmp_path: Path) -> None:
    big = Decimal("12345678901234567890123")
    table = pa.table(
        {
            "id": pa.array([big], pa.decimal128(30, 0)),
            "messages": pa.array([HELLO]),
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    assert accepted(str(tmp_path / "x.parquet")).sample_id == str(big)


def test_parquet_bad_text_is_one_reject(tmp_path: Path) -> None:
    good = [b"fine", b"\xff\xfe", b"good"]
    texts = pa.Array.from_buffers(pa.string(), 3, pa.array(good, pa.binary()).buffers())
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], ["role", "content"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), turns)
    pq.write_table(pa.table({"messages": lists}), tmp_path / "x.parquet")
    assert reasons(str(tmp_path / "x.parquet")) == [None, "bad_encoding", None]


def test_parquet_without_conversations(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "x.parquet")
    with pytest.raises(PipelineError, match=r"none of the columns messages, .*, only: 'body', 'n'"):
        list(read_prompts(str(tmp_path / "x.parquet")))


def test_damaged_parquet_page(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    rows = [{"messages": [{"role": "user", "content": f"text {n}"}]} for n in range(500)]
    pq.write_table(pa.Table.from_pylist(rows), path, write_page_checksum=True, compression="none")
    data = bytearray(path.read_bytes())
    data[data.index(b"text 250") + 5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PipelineError, match=r"x\.parquet cannot be read past row"):
        list(read_prompts(str(path)))


class Opener(pa.ExtensionType):
    """An extension type that notes when a file makes pyarrow rebuild it."""

    opened = 0

    def __init__(self) -> None:
        super().__init__(pa.string(), "tests.opener")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, data: bytes) -> "Opener":
        cls.opened += 1
        return cls()


@pytest.mark.parametrize("in_folder", [False, True])
def test_extension_type_is_refused_unopened(tmp_path: Path, in_folder: bool) -> None:
    column = pa.ExtensionArray.from_storage(Opener(), pa.array(["x"]))
    path = tmp_path / "x.parquet"
    pa.register_extension_type(Opener())
    try:
        # The length of the schema decides which byte stands before it in the footer.
        for width in range(0, 80, 2):
            plain = {f"plain_{n}": [1] for n in range(width)}
            pq.write_table(pa.table({"messages": [HELLO], **plain, "odd": column}), path)
            Opener.opened = 0
            with pytest.raises(PipelineError, match="Arrow extension type"):
                list(read_prompts(str(tmp_path if in_folder else path)))
            assert Opener.opened == 0
    finally:
        pa.unregister_extension_type("tests.opener")


def test_extension_type_in_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Array2D(shape=(1, 1), dtype="float32")})
    made = datasets.Dataset.from_dict({"x": [[[1.0]]]}, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(PipelineError, match="Arrow extension type"):
        read_prompts(str(tmp_path / "saved"))


def test_saved_dataset_reads_only_its_own_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    broken = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    table = pa.table({"messages": pa.array([HELLO]), "junk": broken})
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    assert accepted(str(tmp_path / "saved")).messages == (Message("user", "Hello"),)


def test_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{**row, "junk": 1} for row in ROWS])
    made.save_to_disk(str(tmp_path / "saved"))
    check_rows(str(tmp_path / "saved"), "saved")

    both = datasets.DatasetDict({"train": made, "test": made.select([0])})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(PipelineError, match="has the splits test, train; name one"):
        read_prompts(str(tmp_path / "both"))
    check_rows(f"{tmp_path / 'both'}:train", "both")
    assert accepted(f"{tmp_path / 'both'}:test").sample_id == "1"
    with pytest.raises(PipelineError, match="there is no split 'dev', only: test, train"):
        read_prompts(f"{tmp_path / 'both'}:dev")


def test_saved_dataset_that_is_broken(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(PipelineError, match="cannot be loaded"):
        read_prompts(str(tmp_path))


def test_folder_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="could not load the folder"):
        read_prompts(str(tmp_path))


def test_name_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(PipelineError, match="no local file or folder 'nobody/nothing'"):
        read_prompts("nobody/nothing")


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"instruction": "Add", "input": "1 2", "output": "3"}, "user:Add\n\n1 2|assistant:3"),
        ({"instruction": "Add", "input": "", "output": " "}, "user:Add"),
        ({"instruction": "Add", "input": None}, "user:Add"),
        ({"prompt": "Why?"}, "user:Why?"),
        ({"prompt": "Why?", "completion": "So."}, "user:Why?|assistant:So."),
        ({"prompt": "Why?", "response": "So.", "system": "S"}, "system:S|user:Why?|assistant:So."),
        ({"prompt": [{"role": "user", "content": "Why?"}]}, "user:Why?"),
        ({"messages": HELLO, "prompt": "ignored", "instruction": "too"}, None),
        (
            {"messages": [{"role": "developer", "content": "D"}, *HELLO]},
            "system:D|" + "|".join(f"{m['role']}:{m['content']}" for m in HELLO),
        ),
    ],
)
def test_other_conventions_give_the_same_turns(
    row: dict[str, Any], messages: str | None, write: Write
) -> None:
    """And the same id as the row in `messages` form."""
    found = next(iter(read_prompts(write(row))))
    assert isinstance(found, PromptRow), found
    plain = "|".join(f"{m.role}:{m.content}" for m in found.messages)
    assert plain == (messages or "|".join(f"{m['role']}:{m['content']}" for m in HELLO))
    again = {"messages": [{"role": m.role, "content": m.content} for m in found.messages]}
    same = next(iter(read_prompts(write(again))))
    assert isinstance(same, PromptRow) and same.sample_id == found.sample_id


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "a", "prompt": "b"}, "both_conventions"),
        ({"prompt": "a", "completion": "b", "response": "c"}, "bad_turn"),
        ({"prompt": "  "}, "empty_content"),
        ({"prompt": 7}, "bad_content"),
        ({"instruction": "a", "output": 7}, "bad_content"),
        ({"instruction": "a", "input": ["x"]}, "bad_content"),
    ],
)
def test_pairs_that_do_not_tell_what_they_mean(
    row: dict[str, Any], reason: str, write: Write
) -> None:
    found = next(iter(read_prompts(write(row))))
    assert isinstance(found, RejectedRow) and found.reason == reason


def test_alpaca_columns_of_parquet(tmp_path: Path) -> None:
    table = {
        "instruction": ["Add", "Say"],
        "input": ["1 2", ""],
        "output": ["3", None],
        "n": [1, 2],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    rows = list(read_prompts(str(tmp_path / "a.parquet")))
    turns = [[tuple(m)[:2] for m in row.messages] for row in rows if isinstance(row, PromptRow)]
    assert turns == [[("user", "Add\n\n1 2"), ("assistant", "3")], [("user", "Say")]]


def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E20's kind; the cap is lowered to keep the test small."""
    monkeypatch.setattr("pipeline.prompt_parquet.MAX_ROW_GROUP_BYTES", 10**7)
    table = pa.table({"prompt": ["x" * 1_000_000 + str(i) for i in range(16)]})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "bomb.parquet").stat().st_size < 50_000
    with pytest.raises(
        PipelineError, match=r"bomb\.parquet: row group 0 unpacks to 16,\d+,\d+ bytes"
    ):
        list(read_prompts(str(tmp_path / "bomb.parquet")))
