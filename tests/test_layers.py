"""Feature sets in one pass: which blocks, that each is the right one, and what they mean."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from corruptions_rows import CORRUPTIONS, edit_footer
from run_files import load, shard_rows
from tampering import Tampered

from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.inspect_run import inspect_run
from pipeline.layers import (
    choose_layers,
    default_layers,
    dspark_layers,
    eagle3_layers,
    parse_features,
)
from pipeline.loading.reading import FeatureIndex
from pipeline.models.base import PositionedRow
from pipeline.models.load import find_target
from pipeline.schema import FOOTER_KEY
from pipeline.semantics import Semantics, read_semantics
from pipeline.settings import Settings
from pipeline.validate import validate

ALL = "mtp,dspark,eagle3"


def test_default_blocks_are_the_published_ones() -> None:
    """C8: block outputs, 0-based; 36 layers are Qwen3-4B, whose drafters publish their list."""
    assert dspark_layers(36) == (1, 9, 17, 25, 33)
    assert default_layers("dspark", 42, "gemma4_text") == (1, 10, 20, 30, 39)  # Gemma-4 E4B
    # Gemma-4 12B, whose released DSpark drafter was trained on others than the rule's.
    assert default_layers("dspark", 48, "gemma4_text") == (5, 17, 29, 41, 46)
    assert default_layers("dspark", 48, "qwen3") == (1, 12, 23, 34, 45)
    assert eagle3_layers(42) == (1, 20, 38)
    n = 32  # as others count, these are the inputs of layers 2, n//2 and n-3
    assert [i + 1 for i in eagle3_layers(n)] == [2, n // 2, n - 3]


def test_sets_and_blocks_as_options() -> None:
    assert parse_features("eagle3, mtp") == ("mtp", "eagle3")
    chosen = choose(("mtp", "dspark", "eagle3"), ["eagle3=5,3,0"], 36)
    assert chosen == {"dspark": (1, 9, 17, 25, 33), "eagle3": (0, 3, 5)}
    assert choose(("mtp", "eagle3"), ["2,1"], 4) == {"eagle3": (1, 2)}
    assert choose(("mtp", "eagle3"), ["1,-1,-3"], 12) == {"eagle3": (1, 9, 11)}
    assert choose(("mtp",), [], 2) == {}


def choose(features: tuple[str, ...], wanted: list[str], layers: int) -> Any:
    return choose_layers(features, wanted, num_layers=layers, architecture="llama")


@pytest.mark.parametrize(
    ("features", "wanted", "message"),
    [
        (("mtp",), ["1,2"], "none of them does"),
        (("dspark", "eagle3"), ["1,2"], "write SET=I,J"),
        (("eagle3",), ["eagle3=1,8"], "no block 8; the target model has 0 to 7"),
        (("eagle3",), ["eagle3=-9"], "no block -9"),
        (("eagle3",), ["eagle3=7,-1"], "a block is named twice"),
        (("eagle3",), ["eagle3=1,1"], "a block is named twice"),
        (("eagle3",), ["eagle3=1", "eagle3=2"], "eagle3 is named twice"),
        (("eagle3",), ["eagle3=1,x"], "not a list of numbers"),
    ],
)
def test_wrong_blocks_are_named(features: tuple[str, ...], wanted: list[str], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        choose(features, wanted, 8)


@pytest.mark.parametrize("layers", [1, 2, 4, 7])
def test_a_shallow_target_needs_its_blocks_named(layers: int) -> None:
    """C8: the rules would name a block twice, or one that is not there."""
    with pytest.raises(PipelineError, match=f"{layers} layers, too few for the usual blocks"):
        choose(("dspark",), [], layers)
    assert choose(("dspark",), ["0"], layers) == {"dspark": (0,)}
    if layers < 7:
        with pytest.raises(PipelineError, match="name them: --layers eagle3=0,1"):
            choose(("eagle3",), [], layers)
    else:
        assert choose(("eagle3",), [], layers) == {"eagle3": (1, 2, 3)}


def test_unknown_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"--features: .*no feature set 'eagle2'"):
        Settings.check(target="x", prompts="x", out="x", features="mtp,eagle2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All sets of gemma4-nano, which has 8 blocks: dspark 1,2,3,4,5 and eagle3 1,3,4."""
    base = tmp_path_factory.mktemp("all")
    prompts = base / "prompts.jsonl"
    texts = ["def add(a, b):", "class Node:", "import os\n", "x = 1"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    execute(settings(prompts, base / "out", features=ALL), LocalWorker)
    return base / "out"


def settings(prompts: Path, out: Path, **changes: Any) -> Settings:
    given = {
        "target": "gemma4-nano",
        "prompts": str(prompts),
        "out": str(out),
        "max_new_tokens": 24,
        "backend": "transformers",
        "dtype": "float32",
        "seed": 5,
    }
    return Settings.check(**(given | changes))


@torch.inference_mode()
def test_every_block_is_its_output_at_the_recorded_offset(run: Path) -> None:
    """C2: one off, and the column is a neighbour's; the last shared KV stay what they are."""
    target = load(find_target("gemma4-nano"))
    model: Any = target.model  # type: ignore[attr-defined]
    for row in shard_rows(run):
        ids = torch.tensor(row["input_ids"], dtype=torch.long)[None]
        positions = row["position_offset"] + torch.arange(ids.shape[1])[None]
        plain = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            output_hidden_states=True,
            use_cache=False,
        ).hidden_states
        blocks = [name for name in row if name.startswith("block_")]
        assert blocks == [f"block_{i}_hidden" for i in (1, 2, 3, 4, 5)]
        for i in (1, 2, 3, 4, 5):
            stored = row[f"block_{i}_hidden"]
            np.testing.assert_allclose(stored, plain[i + 1][0].numpy(), rtol=1e-3, atol=1e-4)
            gap = np.abs(stored - plain[i][0].numpy()).max()
            assert gap > 0.05  # a neighbour would be far off
        np.testing.assert_allclose(row["final_hidden"], plain[-1][0].numpy(), rtol=1e-3, atol=1e-4)


def test_columns_are_stored_once_and_say_which_block_they_are(run: Path) -> None:
    assert validate(run).findings == ()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["semantics"]["layers"] == {"dspark": [1, 2, 3, 4, 5], "eagle3": [1, 3, 4]}
    (shard,) = manifest["shards"]
    schema = pq.read_schema(run / shard["file"])
    assert len(set(schema.names)) == len(schema.names)
    for i in (1, 2, 3, 4, 5):
        metadata = schema.field(f"block_{i}_hidden").metadata
        assert metadata[b"block"] == str(i).encode()
        assert metadata[b"layer_convention"] == b"output of the 0-based decoder block"
        assert metadata[b"logical_dtype"] == b"float32"
    footer = json.loads(schema.metadata[FOOTER_KEY])
    assert footer["features"] == ALL and footer["semantics"] == manifest["semantics"]
    assert set(footer["schemas"]) == {"common/v1", "mtp/v1", "dspark/v1", "eagle3/v1"}


def test_one_pass_gives_what_each_set_alone_gives(run: Path, tmp_path: Path) -> None:
    prompts = run.parent / "prompts.jsonl"
    together = shard_rows(run)
    for name in ("mtp", "eagle3"):
        out = tmp_path / name
        execute(settings(prompts, out, features=name), LocalWorker)
        for alone, both in zip(shard_rows(out), together, strict=True):
            for column, value in alone.items():
                np.testing.assert_array_equal(value, both[column], err_msg=column)


def test_other_blocks_are_another_run_and_the_usual_ones_named_are_not(
    run: Path, tmp_path: Path
) -> None:
    """E13: a resume with one more captured layer is refused, and says so."""
    prompts = run.parent / "prompts.jsonl"
    with pytest.raises(PipelineError, match="layers"):
        execute(settings(prompts, run, features=ALL, layers=["eagle3=1,3,5"]), LocalWorker)
    assert execute(settings(prompts, run, features=ALL, layers=["eagle3=1,3,4"]), LocalWorker)


def test_llamacpp_gives_its_own_block_outputs(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from pipeline.models.tiny import write_tiny_gemma4

    write_tiny_gemma4(tmp_path)
    (gguf,) = tmp_path.glob("*.gguf")
    ids = np.random.default_rng(0).integers(10, 500, 40).astype(np.int32)
    row = [PositionedRow(ids, 77)]
    with load(find_target(str(gguf)), backend="llamacpp") as target:  # type: ignore[attr-defined]
        (served,) = target.forward(row, top_k=4, block_layers=(1, 2))
    (plain,) = load(find_target(str(gguf))).forward(row, top_k=4, block_layers=(1, 2))
    assert set(served.block_hidden) == {1, 2}  # and no other is kept
    for i in (1, 2):
        error = (served.block_hidden[i] - plain.block_hidden[i]).norm()
        assert error / plain.block_hidden[i].norm() < 5e-3
        assert error < 0.1 * (served.block_hidden[i] - plain.block_hidden[3 - i]).norm()


def test_unknown_semantics_are_refused(run: Path) -> None:
    raw = json.loads((run / "manifest.json").read_text())["semantics"]
    known = read_semantics(raw, "manifest.json")
    assert isinstance(known, Semantics) and known.as_dict() == raw
    assert known.embedding_scale == 16.0  # sqrt(256)
    assert known.rope["sliding"].theta == 1e4 and known.rope["sliding"].scaling == {}
    assert known.rope["full"].type == "proportional" and known.rope["full"].theta == 1e6
    assert known.rope["full"].scaling == {"partial_rotary_factor": 0.25}
    assert (known.generated_by, known.scored_by) == ("transformers", "transformers")
    for change in (
        {"pairing": "embed(x_n) with final_hidden[n]"},
        {"version": 2},
        {"norm": "before"},
        {"layers": None},
        {"scored_by": "guess"},
    ):
        with pytest.raises(PipelineError, match=f"{next(iter(change))} is .*does not know"):
            read_semantics({**raw, **change}, "x.parquet")
    for name in raw:
        less = {key: value for key, value in raw.items() if key != name}
        with pytest.raises(PipelineError, match=rf"semantics\.{name} is missing"):
            read_semantics(less, "x.parquet")
    with pytest.raises(PipelineError, match=r"x\.parquet: semantics is None"):
        read_semantics(None, "x.parquet")


def test_reader_and_validator_refuse_shards_with_another_pairing(run: Path, tmp_path: Path) -> None:
    tampered = Tampered(run, tmp_path / "out")
    CORRUPTIONS["semantics.known"](tampered)
    assert tampered.fired() == {"semantics.known"}
    with pytest.raises(PipelineError, match=r"semantics\.pairing is 'h_n with x_n', which this"):
        FeatureIndex(tampered.out)
    with pytest.raises(PipelineError, match=r"semantics\.pairing is 'h_n with x_n'"):
        inspect_run(tampered.out)


def test_a_column_that_says_it_is_its_neighbour_is_found(run: Path, tmp_path: Path) -> None:
    tampered = Tampered(run, tmp_path / "out")
    table = pq.read_table(tampered.path("train-00000"))
    at = table.schema.get_field_index("block_3_hidden")
    field = table.schema.field(at)
    other = field.with_metadata({**field.metadata, b"block": b"4"})
    tampered.write_table("train-00000", table.cast(table.schema.set(at, other)))
    (finding,) = validate(tampered.out).findings
    assert (finding.rule, finding.column) == ("semantics.layers", "block_3_hidden metadata block")
    assert (finding.found, finding.expected) == ("4", "3")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"dspark": [1, 2, 3, 4, 5], "eagle3": [1, 3, 8]}, "blocks from 0 to 7, rising"),
        ({"dspark": [1, 2, 3, 4, 5], "eagle3": [3, 1, 4]}, "blocks from 0 to 7, rising"),
        ({"dspark": [1, 2, 3, 4, 5]}, "of dspark, eagle3, its feature sets that hold blocks"),
    ],
)
def test_blocks_in_the_footer_are_the_target_models(
    run: Path, tmp_path: Path, layers: dict[str, list[int]], expected: str
) -> None:
    tampered = Tampered(run, tmp_path / "out")
    footer = tampered.footer("train-00000")
    semantics = {**footer["semantics"], "layers": layers}
    edit_footer(tampered, "train-00000", semantics=semantics)
    found = [f for f in validate(tampered.out).findings if f.rule == "semantics.layers"]
    assert expected in {f.expected for f in found}
