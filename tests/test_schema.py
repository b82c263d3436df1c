"""Schemas: pinned digests, and everything that derives from the TOML."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from datasets import Array2D, Array3D, Features, List, Value

from pipeline.errors import PipelineError
from pipeline.layers import FEATURE_SETS, LAYERED_SETS
from pipeline.schema import FOOTER_KEY, bind, column_table, load_schema, schema_refs

# A released schema never changes: make a new version instead, and pin it here.
PINNED = {
    "common/v1": "7e019854cd359c9c58c0f34dddb0ab3d037f37e6f99dbcfbe7f372c15adf1457",
    "dspark/v1": "513c7aaa21d408803da244e0a55665767b3fa2c0596b9034c5592b30dcf83bc4",
    "eagle3/v1": "cbffd97209c791fc97ac5a9e3e8508665a54d72e65c50450901077dcc60b63af",
    "mtp/v1": "6789b8710279cacb01d9344e4f10508a89c2f6f6f6e8833eb2b070550ec1f76c",
    "rollout/v1": "67227cfc9e86f132f30d83cb785e34e73258e9d8c3f85c6760ef2d6681d2554a",
}


def test_released_schemas_have_not_changed() -> None:
    assert {ref: load_schema(ref).digest for ref in schema_refs()} == PINNED


def test_a_column_means_the_same_in_every_schema() -> None:
    seen = {}
    for ref in schema_refs():
        for column in load_schema(ref).columns:
            same = seen.setdefault(column.name, column)
            assert (column.dtype, column.shape) == (same.dtype, same.shape), column.name


def test_every_feature_set_has_a_schema_and_those_with_blocks_take_layers() -> None:
    sets = [ref for ref in schema_refs() if ref.split("/")[0] not in ("common", "rollout")]
    assert {ref.split("/")[0] for ref in sets} == set(FEATURE_SETS)
    blocks = {
        ref.split("/")[0]
        for ref in sets
        if any(column.layer_type == "block" for column in load_schema(ref).columns)
    }
    assert blocks == set(LAYERED_SETS)


def test_a_name_alone_is_its_newest_version_and_an_unknown_one_is_named() -> None:
    assert load_schema("mtp").ref == "mtp/v1"
    with pytest.raises(PipelineError, match="no schema 'mtp/v9'; there are: common/v1"):
        load_schema("mtp/v9")


def gemma_layout():
    return bind(
        [load_schema("common"), load_schema("mtp")],
        sizes={
            "hidden": 2560,
            "top_k": 64,
            "depth": 3,
            "sliding_kv_heads": 2,
            "sliding_head_dim": 256,
            "full_kv_heads": 2,
            "full_head_dim": 512,
        },
        dtypes={"hidden_dtype": "bfloat16", "kv_dtype": "float16"},
        layer_metadata={"sliding": {"layer": "22"}, "full": {"layer": "23"}},
    )


def test_features_and_arrow_schema_of_the_e4b_geometry() -> None:
    layout = gemma_layout()
    features = layout.features()
    assert features["final_hidden"] == Array2D(shape=(None, 2560), dtype="float32")
    assert features["sliding_key"] == Array3D(shape=(None, 2, 256), dtype="float32")
    assert features["full_value"] == Array3D(shape=(None, 2, 512), dtype="float32")
    assert features["input_ids"] == List(Value("int32"))
    assert features["sample_id"] == Value("string")
    schema = layout.arrow_schema({"fingerprint": "x"})
    assert Features.from_arrow_schema(schema) == features
    assert json.loads(schema.metadata[FOOTER_KEY]) == {"fingerprint": "x"}
    key = schema.field("sliding_key")
    assert key.metadata[b"logical_dtype"] == b"float16" and key.metadata[b"layer"] == b"22"
    assert key.metadata[b"axes"] == b"T,sliding_kv_heads,sliding_head_dim"
    assert key.type.storage_type == pa.list_(pa.list_(pa.list_(pa.float32())))
    # 11 KiB a token of states and KV (DESIGN §7), and what teacher rows, ids and masks add
    states = sum(c.bytes_per_token for c in layout.columns if c.dtype in ("bfloat16", "float16"))
    assert states == 2 * (2560 + 2 * 2 * 256 + 2 * 2 * 512) == 11 * 1024
    assert layout.bytes_per_token == states + 4 * (1 + 1 + 1 + 64 + 64 + 3) + 1 + 3


def test_columns_of_layer_types_the_target_lacks_are_absent() -> None:
    layout = bind(
        [load_schema("mtp")],
        sizes={"hidden": 8, "depth": 3, "full_kv_heads": 1, "full_head_dim": 4},
        dtypes={"hidden_dtype": "float32", "kv_dtype": "float32"},
        layer_metadata={"full": {}},
    )
    names = [column.name for column in layout.columns]
    assert names == ["final_hidden", "target_ids", "target_mask", "full_key", "full_value"]


def test_the_column_table_covers_every_column() -> None:
    table = column_table(load_schema("mtp"))
    assert table[1]["name"] == "sliding_key"
    assert table[1]["shape"] == "[T, sliding_kv_heads, sliding_head_dim]"
    assert all(row["meaning"] for row in table)


def test_schemas_are_found_from_an_installed_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    copy = tmp_path / "checkout"
    for name in ("pipeline", "schemas"):
        shutil.copytree(root / name, copy / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    pip = [sys.executable, "-m", "pip"]
    wheel_dir = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    # from a copy, so that no build folder appears in the checkout
    subprocess.run([*pip, "wheel", "-q", *wheel_dir, copy], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = [*pip, "install", "-q", "--no-deps", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True)
    shipped = {p.relative_to(site / "pipeline") for p in (site / "pipeline").rglob("*.py")}
    sources = {p.relative_to(root / "pipeline") for p in (root / "pipeline").rglob("*.py")}
    assert sources <= shipped
    assert (site / "pipeline" / "data" / "demo_prompts.jsonl").is_file()
    code = (
        "import pipeline.schema as s; print(s.SCHEMA_ROOT); print(s.schema_refs());"
        "print((s.SCHEMA_ROOT / 'alignment.toml').is_file())"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": ""},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert shown[0] == str(site / "pipeline" / "schemas")
    assert shown[1] == str(sorted(PINNED)) and shown[2] == "True"
