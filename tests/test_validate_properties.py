"""The validator against any input: its own computations, and files of strangers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from pipeline.errors import PipelineError
from pipeline.features import k_step_targets
from pipeline.schema import BoundColumn
from pipeline.shards import list_array
from pipeline.validate import validate
from pipeline.validate.folder import RunView
from pipeline.validate.group import Group, scan_floats
from pipeline.validate.reading import Lists, _decode
from pipeline.validate.rules_teacher import targets_masked, targets_shifted
from pipeline.validate.shard import ShardFile

# The session's run is copied into the test's own folder, so sharing it between examples is fine.
EXAMPLES = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MASKS = st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=5)


def group_of(lengths: list[int]) -> Group:
    run = RunView(root=Path(), has_records=False)
    file = ShardFile(run=run, name="x", path=Path("x"), kind="shard", record=None)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ids = [f"r{i}" for i in range(len(lengths))]
    return Group(file=file, first_row=0, row_ids=ids, starts=starts)


@given(masks=MASKS, depth=st.integers(1, 5))
def test_the_target_rules_agree_with_the_writer_on_any_masks(
    masks: list[list[int]], depth: int
) -> None:
    group = group_of([len(mask) for mask in masks])
    arrays = [np.array(mask, dtype=np.uint8) for mask in masks]
    ids = [np.arange(len(mask), dtype=np.int32) * 7 + i for i, mask in enumerate(masks)]
    pairs = [k_step_targets(i, m, depth) for i, m in zip(ids, arrays, strict=True)]
    group.arrays = {
        "input_ids": np.concatenate(ids),
        "loss_mask": np.concatenate(arrays),
        "target_ids": np.concatenate([p[0] for p in pairs]),
        "target_mask": np.concatenate([p[1] for p in pairs]),
    }
    assert list(targets_shifted(group)) == []
    assert list(targets_masked(group)) == []
    for t, k in np.ndindex(group.arrays["target_mask"].shape):
        group.arrays["target_mask"][t, k] ^= 1
        (problem,) = targets_masked(group)
        row = int(np.searchsorted(group.starts, t, side="right")) - 1
        assert (problem.row, problem.index) == (f"r{row}", (t - group.starts[row], k))
        group.arrays["target_mask"][t, k] ^= 1


@given(
    values=npst.arrays(
        np.float32,
        npst.array_shapes(min_dims=1, max_dims=3, max_side=5),
        elements=st.one_of(
            st.floats(width=32), st.floats(width=16), st.sampled_from([0.0, -0.0, 1.5, 70000.0])
        ),
    ),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
)
def test_the_float_scan_says_what_a_slow_look_at_each_vector_says(
    values: np.ndarray, dtype: str
) -> None:
    import torch

    scan = scan_floats(values, dtype)
    vectors = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
    target = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
    for i, vector in enumerate(vectors):
        finite = vector[np.isfinite(vector)]
        exact = torch.from_numpy(finite.copy()).to(target).float().numpy()
        assert scan.non_finite.ravel()[i] == (len(finite) < len(vector))
        assert scan.all_zero.ravel()[i] == (not vector.any())
        if len(finite) == len(vector):
            assert scan.off_grid.ravel()[i] == (not np.array_equal(exact, finite))


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    inner=st.sampled_from([(), (3,), (2, 4)]),
    cut=st.data(),
)
def test_rows_decode_to_what_was_written_also_from_a_slice(
    lengths: list[int], inner: tuple[int, ...], cut: Any
) -> None:
    column = BoundColumn(
        name="c",
        dtype="float32",
        axes=("T", "a", "b")[: 1 + len(inner)],
        shape=(None, *inner),
        meaning="",
    )
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((n, *inner)).astype(np.float32) for n in lengths]
    start = cut.draw(st.integers(0, len(rows) - 1))
    stop = cut.draw(st.integers(start + 1, len(rows)))
    array = list_array(column, rows).slice(start, stop - start)
    decoded = _decode(group_of(lengths), column, pa.chunked_array([array]), stop - start)
    assert isinstance(decoded, Lists)
    np.testing.assert_array_equal(np.diff(decoded.starts), lengths[start:stop])
    np.testing.assert_array_equal(decoded.values, np.concatenate(rows[start:stop]))


@pytest.fixture
def copied(tiny_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_run, tmp_path / "out")
    return tmp_path / "out"


@EXAMPLES
@given(data=st.data())
def test_any_flipped_byte_of_any_recorded_file_is_found(data: Any, copied: Path) -> None:
    files = sorted([*copied.glob("data/*"), *copied.glob("rollouts/*")])
    path = data.draw(st.sampled_from(files))
    raw = path.read_bytes()
    # The footer, which decides how all else is read, is a small part of a file: half the draws.
    last = len(raw) - 1
    at = data.draw(st.one_of(st.integers(0, last), st.integers(max(0, last - 16000), last)))
    changed = bytearray(raw)
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(changed)
    try:
        assert "files.sha256" in {f.rule for f in validate(copied).findings}
    finally:
        path.write_bytes(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@EXAMPLES
@given(data=st.data())
def test_a_record_of_any_content_is_a_finding_not_a_crash(data: Any, copied: Path) -> None:
    names = ["manifest.json", "commits/train-00000.json", "plan/plan.json", "rejects.jsonl"]
    path = copied / data.draw(st.sampled_from([*names, "README.md"]))
    good = path.read_bytes()
    value = data.draw(JSON)
    if path.suffix == ".json" and data.draw(st.booleans()):
        whole = json.loads(good)
        key = data.draw(st.sampled_from(sorted(whole)))
        value = {**whole, key: value}
    path.write_bytes(data.draw(st.sampled_from([json.dumps(value).encode(), b"\xff\0", good[:50]])))
    try:
        json.dumps(validate(copied).as_dict(), allow_nan=False)
    except PipelineError as error:
        assert str(error)
    finally:
        path.write_bytes(good)
