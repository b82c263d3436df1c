"""Hostile, cut and split GGUF files: one clear message each, before anything large is allocated."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.gguf import read_gguf
from pipeline.gguf.header import MAX_ELEMENTS

U32, STRING, ARRAY, F32 = 4, 8, 9, 0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name="t", shape=(4,), kind=F32, offset=0, dims=None) -> bytes:
    dims = len(shape) if dims is None else dims
    packed = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", dims) + packed + struct.pack("<IQ", kind, offset)


ARCH = key("general.architecture", STRING, text("llama"))


def header(keys=(ARCH,), tensors=(), *, counts=None, version=3, magic=b"GGUF") -> bytes:
    n_tensors, n_keys = counts or (len(tensors), len(keys))
    head = magic + struct.pack("<IQQ", version, n_tensors, n_keys)
    return head + b"".join(keys) + b"".join(tensors)


def padded(data: bytes, extra: int) -> bytes:
    return data + bytes(-len(data) % 32) + bytes(extra)


GOOD = padded(header(tensors=[tensor()]), 16)

HOSTILE = {
    "empty": (b"", "empty"),
    "magic": (b"PK\x03\x04" + bytes(60), "not a GGUF file"),
    "pickle": (b"\x80\x02}q\x00.", "not a GGUF file"),
    "one byte": (b"G", "cut short"),
    "header only": (GOOD[:24], "cut short"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "version 1": (header(version=1), "version 0x1"),
    "big-endian": (header(version=0x03000000), "big-endian"),
    "2^40 keys": (header(counts=(0, 1 << 40)), f"claims {1 << 40} metadata keys"),
    "2^40 tensors": (header(counts=(1 << 40, 1)), f"claims {1 << 40} tensors"),
    "60000 keys in 100 bytes": (header(counts=(0, 60_000)), "table of 60000 metadata keys"),
    "huge key": (header([struct.pack("<Q", 1 << 62)]), "expected at least 37 bytes"),
    "key over 64 KiB": (header([key("k" * 70_000, U32, bytes(4))]), "70000 bytes long"),
    "huge string": (
        header([key("s", STRING, struct.pack("<Q", 1 << 50))]),
        "key s is 1125899906842624 bytes long",
    ),
    "huge array": (
        header([key("a", ARRAY, struct.pack("<IQ", U32, 1 << 60))]),
        f"key a the arrays claim {1 << 60} elements",
    ),
    "many arrays": (
        header(
            [key(f"a{i}", ARRAY, struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21)) for i in "123"]
        ),
        "the arrays claim",
    ),
    "string array": (
        header([key("a", ARRAY, struct.pack("<IQQ", STRING, 3, 1 << 61))]),
        "key a",
    ),
    "nested array": (
        header([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
        "nested value type 9",
    ),
    "unknown value": (header([key("a", 77, b"")]), "value type 77"),
    "not UTF-8": (header([key("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]), "not UTF-8"),
    "duplicate key": (header([ARCH, ARCH]), "general.architecture appears twice"),
    "no architecture": (padded(header([key("a", U32, bytes(4))]), 0), "general.architecture"),
    "alignment 2^30": (
        header([ARCH, key("general.alignment", U32, struct.pack("<I", 1 << 30))], [tensor()]),
        "general.alignment is 1073741824",
    ),
    "alignment 3": (
        header([ARCH, key("general.alignment", U32, struct.pack("<I", 3))]),
        "general.alignment is 3",
    ),
    "8 dimensions": (header(tensors=[tensor(shape=(1,) * 8)]), "t has 8 dimensions"),
    "2^32-1 dimensions": (header(tensors=[tensor(dims=2**32 - 1)]), "dimensions"),
    "no dimensions": (header(tensors=[tensor(shape=(), offset=0)]), "t has 0 dimensions"),
    "empty dimension": (padded(header(tensors=[tensor(shape=(4, 0))]), 64), "impossible shape"),
    "product past 2^64": (
        header(tensors=[tensor(shape=(1 << 33, 1 << 33))]),
        "impossible shape",
    ),
    "broken block": (padded(header(tensors=[tensor(shape=(33,), kind=8)]), 64), "blocks of 32"),
    "unknown type": (header(tensors=[tensor(kind=4000)]), "ggml type 4000"),
    "offset outside": (
        padded(header(tensors=[tensor(offset=1 << 40)]), 64),
        "expected at least",
    ),
    "offset near 2^64": (
        padded(header(tensors=[tensor(offset=(1 << 64) - 32)]), 64),
        "expected at least",
    ),
    "unaligned offset": (padded(header(tensors=[tensor(offset=4)]), 64), "multiple of the align"),
    "overlap": (padded(header(tensors=[tensor("a"), tensor("b")]), 64), "overlaps"),
    "duplicate tensor": (
        padded(header(tensors=[tensor("a"), tensor("a", offset=32)]), 64),
        "tensor a appears twice",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_at_once(tmp_path, name):
    data, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    started = time.perf_counter()
    with pytest.raises(PipelineError) as error:
        read_gguf(path)
    assert time.perf_counter() - started < 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_the_good_header_of_these_tests_is_read(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(GOOD)
    file = read_gguf(path)
    assert file.architecture == "llama"
    assert file.tensors["t"].shape == (4,)
    assert file.read("t").tolist() == [0, 0, 0, 0]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(PipelineError, match=r"none\.gguf: cannot read"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(PipelineError, match="cannot read"):
        read_gguf(tmp_path)


def test_every_cut_is_refused(tmp_path):
    """B10: whatever byte a file ends at, the message tells expected and found bytes."""
    whole = padded(
        header(
            [ARCH, key("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("yz"))],
            [tensor("a", (4, 8)), tensor("b", (32,), kind=8, offset=128)],
        ),
        128 + 34,
    )
    path = tmp_path / "x.gguf"
    path.write_bytes(whole)
    assert read_gguf(path).tensors["b"].nbytes == 34
    for end in range(1, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(PipelineError) as error:
            read_gguf(path)
        assert "expected" in str(error.value) and f"found {end}" in str(error.value), end


@settings(
    max_examples=150, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_flipped_bytes_give_a_file_or_a_pipeline_error(tmp_path, data):
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    try:
        read_gguf(path)
    except PipelineError:
        pass


VALUES = st.one_of(
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.text(max_size=20),
    st.floats(width=32, allow_nan=False),
    st.lists(st.text(max_size=8), min_size=1, max_size=5),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5),
)


@settings(
    max_examples=60, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(metadata=st.dictionaries(st.text(min_size=1, max_size=12), VALUES, max_size=6))
def test_metadata_round_trip_with_the_gguf_package(tmp_path, metadata):
    metadata = {f"x.{k}": v for k, v in metadata.items()}
    contents = gguf_files.Contents(
        {"general.architecture": "llama", **metadata}, {"t": np.arange(6, dtype=np.float32)}
    )
    file = read_gguf(gguf_files.write(tmp_path / "x.gguf", contents))
    for name, value in metadata.items():
        assert file.metadata[name] == value
        assert type(file.metadata[name]) is type(value)
    assert file.read("t").tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "F64"])
def test_rows_are_dequantised(tmp_path, kind):
    rng = np.random.default_rng(0)
    source = rng.standard_normal((6, 64)).astype(np.float32)
    ggml_type = gguf.GGMLQuantizationType[kind]
    if kind == "F64":
        stored, expected = source.astype(np.float64), source
    else:
        stored = gguf.quantize(source, ggml_type)
        expected = gguf.dequantize(stored, ggml_type)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("w", stored, raw_dtype=ggml_type)
    writer.add_tensor("after", source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "x.gguf")
    assert file.tensors["w"].shape == (6, 64)
    assert file.quantisation == {kind: 1, "F32": 1}
    np.testing.assert_array_equal(file.read("w"), expected)
    np.testing.assert_array_equal(file.read_rows("w", 2, 5), expected[2:5])
    np.testing.assert_array_equal(file.read("after"), source)
    with pytest.raises(PipelineError, match="the tensor v is missing"):
        file.read("v")


def split_model(folder: Path, count: int = 3) -> list[Path]:
    """A model in `count` parts of one tensor each; only the first has the other metadata."""
    paths = []
    for number in range(count):
        keys = {"split.no": number, "split.count": count, "split.tensors.count": count}
        first = {"llama.block_count": 1} if number == 0 else {}
        contents = gguf_files.Contents(
            {"general.architecture": "llama", **first, **keys},
            {f"t{number}": np.full(8, number, dtype=np.float32)},
        )
        name = f"m-{number + 1:05d}-of-{count:05d}.gguf"
        paths.append(gguf_files.write(folder / name, contents))
    return paths


@pytest.mark.parametrize("given_part", [0, 2])
def test_split_model_is_read_from_any_part(tmp_path, given_part):
    paths = split_model(tmp_path)
    file = read_gguf(paths[given_part])
    assert file.paths == tuple(paths)
    assert file.metadata["llama.block_count"] == 1
    assert [file.read(f"t{i}")[0] for i in range(3)] == [0, 1, 2]


def test_split_model_with_a_missing_part_is_refused(tmp_path):
    paths = split_model(tmp_path)
    paths[1].unlink()
    with pytest.raises(PipelineError, match=r"3 parts.*m-00002-of-00003\.gguf"):
        read_gguf(paths[0])


def test_renamed_part_is_refused(tmp_path):
    paths = split_model(tmp_path)
    with pytest.raises(PipelineError, match="one of 3 parts"):
        read_gguf(paths[0].rename(tmp_path / "model.gguf"))


def test_parts_of_different_models_are_refused(tmp_path):
    paths = split_model(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(PipelineError, match="parts of different models are mixed"):
        read_gguf(paths[0])


def test_split_count_of_a_file_name_is_bounded(tmp_path):
    path = tmp_path / "m-00001-of-99999.gguf"
    path.write_bytes(GOOD)
    with pytest.raises(PipelineError, match="at most 1024"):
        read_gguf(path)


def test_the_cap_leaves_room_for_the_largest_vocabulary():
    assert MAX_ELEMENTS > 3 * 262_144 + 515_000
