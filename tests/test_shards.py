"""Parquet files of this package: bit-exact round trips, physical form, no short files."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.errors import PipelineError, StorageError
from pipeline.schema import Layout, bind, load_schema
from pipeline.shards import (
    Row,
    ShardWriter,
    check_readable,
    ids_sha256,
    list_array,
    list_offsets,
    read_rows,
    row_arrays,
)

HIDDEN, HEADS, HEAD, TOP, DEPTH = 5, 2, 3, 4, 3


def small_layout(dtype: str = "bfloat16") -> Layout:
    return bind(
        [load_schema("common"), load_schema("mtp")],
        sizes={
            "hidden": HIDDEN,
            "top_k": TOP,
            "depth": DEPTH,
            "full_kv_heads": HEADS,
            "full_head_dim": HEAD,
        },
        dtypes={"hidden_dtype": dtype, "kv_dtype": dtype},
        layer_metadata={"full": {"layer": "3"}},
    )


def make_row(layout: Layout, sample_id: str, length: int, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, length])
    row: dict[str, Any] = {}
    for column in layout.columns:
        shape = (length, *column.inner_shape)
        if column.dtype == "string":
            row[column.name] = "stop"
        elif not column.shape:
            row[column.name] = 1
        elif column.stored_as == "float32":
            values = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
            row[column.name] = values.bfloat16().float().numpy()
        else:
            row[column.name] = rng.integers(0, 2, shape).astype(column.stored_as)
    return {**row, "sample_id": sample_id, "num_tokens": length}


def write(path: Path, layout: Layout, groups: list[list[Row]]) -> Path:
    with ShardWriter(path, layout, {"fingerprint": "f"}) as writer:
        for group in groups:
            writer.write(group)
    return path


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, np.ndarray):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
            assert got[name].tobytes() == value.tobytes(), name  # bits: -0, NaN payloads
        else:
            assert got[name] == value


def test_rows_come_back_bit_for_bit(tmp_path: Path) -> None:
    layout = small_layout()
    rows = [make_row(layout, f"r{i}", n) for i, n in enumerate([1, 7, 3, 12])]
    path = write(tmp_path / "a.parquet", layout, [rows[:2], rows[2:]])
    for got, expected in zip(read_rows(path, layout.columns), rows, strict=True):
        assert_same(got, {c.name: expected[c.name] for c in layout.columns})


def test_every_bfloat16_value_survives_exactly(tmp_path: Path) -> None:
    """E3, C14: all 65,536 bit patterns, among them -0, subnormals, 70000 and the extremes."""
    layout = small_layout()
    bits = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = torch.isfinite(bits)
    length = 65536 // HIDDEN + 1
    padded = torch.zeros(length * HIDDEN, dtype=torch.bfloat16)
    padded[:65536] = torch.where(finite, bits, torch.zeros_like(bits))
    row = make_row(layout, "all", length)
    row["final_hidden"] = padded.reshape(length, HIDDEN).float().numpy()
    path = write(tmp_path / "a.parquet", layout, [[row]])
    stored = torch.from_numpy(read_rows(path, layout.columns)[0]["final_hidden"].copy())
    back = stored.bfloat16().view(torch.int16).reshape(-1)[:65536]
    assert torch.equal(back[finite], bits.view(torch.int16)[finite])


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nested_arrays_round_trip(data: st.DataObject) -> None:
    column = next(c for c in small_layout().columns if c.name == "full_key")
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    floats = st.floats(width=32, allow_nan=True, allow_infinity=True)
    arrays = [data.draw(hnp.arrays(np.float32, (n, HEADS, HEAD), elements=floats)) for n in lengths]
    for got, expected in zip(row_arrays(list_array(column, arrays), column), arrays, strict=True):
        assert got.tobytes() == expected.tobytes() and got.shape == expected.shape


def test_the_physical_form(tmp_path: Path) -> None:
    layout = small_layout()
    path = write(tmp_path / "a.parquet", layout, [[make_row(layout, "r", 9)]])
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert len(chunks) == len(layout.columns)
    for name, chunk in chunks.items():
        assert chunk.compression == "ZSTD", name
        is_float = chunk.physical_type == "FLOAT"
        assert ("BYTE_STREAM_SPLIT" in chunk.encodings) == is_float, name
        assert (chunk.statistics is not None) == ("." not in name), name
    assert chunks["full_key.list.element.list.element.list.element"].physical_type == "FLOAT"


def test_page_checksums_are_written_and_catch_a_flipped_bit(tmp_path: Path) -> None:
    layout = small_layout()
    path = write(tmp_path / "a.parquet", layout, [[make_row(layout, "r", 400)]])
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(OSError, match=r"(?i)crc"):
        read_rows(path, layout.columns)


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    layout = small_layout()
    rows = [make_row(layout, f"r{i}", 20 + i) for i in range(4)]
    first = write(tmp_path / "a.parquet", layout, [rows])
    second = write(tmp_path / "b.parquet", layout, [rows])
    assert first.read_bytes() == second.read_bytes()


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    """RAY.md 3.3: pyarrow alone would leave a valid short file."""
    layout = small_layout()
    path = tmp_path / "a.parquet"
    with pytest.raises(RuntimeError), ShardWriter(path, layout, {}) as writer:
        writer.write([make_row(layout, "r", 3)])
        raise RuntimeError
    assert not path.exists()


def test_a_wrong_shape_or_dtype_is_named(tmp_path: Path) -> None:
    layout = small_layout()
    row = make_row(layout, "r", 3)
    for wrong in (row["full_key"][:, :, :2], row["full_key"].astype(np.float64)):
        with pytest.raises(PipelineError, match=r"column full_key: got .* expected float32"):
            write(tmp_path / "a.parquet", layout, [[{**row, "full_key": wrong}]])
        assert not (tmp_path / "a.parquet").exists()


def test_plain_readers_give_shaped_true_numbers(tmp_path: Path) -> None:
    layout = small_layout()
    rows = [make_row(layout, f"r{i}", n) for i, n in enumerate([4, 9])]
    path = write(tmp_path / "one.parquet", layout, [rows])
    for streaming in (False, True):
        data = load_dataset(
            "parquet",
            data_files=str(path),
            split="train",
            streaming=streaming,
            cache_dir=str(tmp_path / "cache"),
        ).with_format("torch")
        for got, expected in zip(data, rows, strict=True):
            for name in ("final_hidden", "full_key", "teacher_top_logprobs", "token_logprobs"):
                assert got[name].dtype == torch.float32
                assert torch.equal(got[name], torch.from_numpy(expected[name]))
            assert torch.equal(got["target_ids"], torch.from_numpy(expected["target_ids"]).long())
    ids = [row["input_ids"].tolist() for row in rows]
    found = duckdb.sql(f"select input_ids from '{path}'").fetchall()
    assert [r[0] for r in found] == ids
    assert polars.read_parquet(path, columns=["input_ids"])["input_ids"].to_list() == ids
    key = duckdb.sql(f"select full_key from '{path}'").fetchall()[1][0]
    assert np.array_equal(np.array(key, dtype=np.float32), rows[1]["full_key"])


def test_ids_digest_knows_where_ids_end() -> None:
    assert ids_sha256(["ab", "c"]) != ids_sha256(["a", "bc"])
    assert ids_sha256(["a", "b"]) != ids_sha256(["b", "a"])


def test_a_file_that_cannot_be_read_back_is_never_recorded(tmp_path: Path) -> None:
    """E1: one flipped byte of a page between writing and publishing."""
    layout = small_layout()
    path = write(tmp_path / "x.parquet", layout, [[make_row(layout, "a", 9)]] * 2)
    check_readable(path)
    chunk = pq.ParquetFile(path).metadata.row_group(1).column(len(layout.columns) - 1)
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match=r"x\.parquet: written, but cannot be read"):
        check_readable(path)


def test_more_values_than_32_bit_offsets_hold_are_refused_not_wrapped() -> None:
    """E2: lengths that sum up to 2.4e9."""
    bounds = np.cumsum([0, 1_200_000_000, 1_200_000_000])
    with pytest.raises(pa.ArrowInvalid, match="2400000000"):
        list_offsets(bounds)
    assert list_offsets(bounds[:2]).to_pylist() == [0, 1_200_000_000]
