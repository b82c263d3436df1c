"""Feature sets in one pass: which blocks, and that each column is the right one."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from run_files import load, shard_rows

from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.layers import (
    choose_layers,
    default_layers,
    dspark_layers,
    eagle3_layers,
    parse_features,
)
from pipeline.models.load import find_target
from pipeline.progress import RunProgress
from pipeline.schema import FOOTER_KEY
from pipeline.settings import Settings
from pipeline.show import show
from pipeline.validate import Replay, validate

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


def settings(prompts: Path, out: Path, **changes: Any) -> Settings:
    """Those of every_set_run."""
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
def plain_states(model: Any, row: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """What transformers itself says of a row, at its offset: entry i + 1 is block i's output."""
    ids = torch.tensor(row["input_ids"], dtype=torch.long)[None]
    states = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=row["position_offset"] + torch.arange(ids.shape[1])[None],
        output_hidden_states=True,
        use_cache=False,
    ).hidden_states
    return [state[0].numpy() for state in states]


def relative(stored: np.ndarray[Any, Any], plain: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(stored - plain) / np.linalg.norm(plain))


def model_of(target: str) -> Any:
    return load(find_target(target)).model  # type: ignore[attr-defined]


def test_every_block_is_its_output_at_the_recorded_offset(every_set_run: Path) -> None:
    """C7: one off, and the column is a neighbour's."""
    model = model_of("gemma4-nano")
    for row in shard_rows(every_set_run):
        plain = plain_states(model, row)
        blocks = [name for name in row if name.startswith("block_")]
        assert blocks == [f"block_{i}_hidden" for i in (1, 2, 3, 4, 5)]
        for i in (1, 2, 3, 4, 5):
            stored = row[f"block_{i}_hidden"]
            assert relative(stored, plain[i + 1]) < 1e-5
            assert min(relative(stored, plain[i]), relative(stored, plain[i + 2])) > 0.05
        assert relative(row["final_hidden"], plain[-1]) < 1e-5


def test_the_last_block_of_a_llama_is_before_the_final_norm(
    tiny_llama_dir: Path, every_set_run: Path, tmp_path: Path
) -> None:
    """Negative blocks count from the end; transformers' own list has no such entry."""
    out = tmp_path / "out"
    chosen = ["dspark=0", "eagle3=-1,0"]
    prompts = every_set_run.parent / "prompts.jsonl"
    said: list[str] = []
    progress = RunProgress(Console(quiet=True))
    progress.say = said.append  # type: ignore[method-assign]
    given = settings(prompts, out, target=str(tiny_llama_dir), features="dspark,eagle3")
    execute(given.model_copy(update={"layers": chosen}), LocalWorker, progress)
    assert "hidden 32, dspark blocks 0, eagle3 blocks 0 1; float32" in "".join(said)
    report = validate(out, replay=Replay(9, str(tiny_llama_dir)))
    assert report.ok and report.replay["block_1_hidden"].error == 0.0
    model = model_of(str(tiny_llama_dir))
    for row in shard_rows(out):
        assert not {"target_ids", "full_key"} & row.keys()  # of mtp alone
        plain = plain_states(model, row)
        assert relative(row["block_0_hidden"], plain[1]) < 1e-5
        last = row["block_1_hidden"]
        normed = model.model.norm(torch.from_numpy(last.copy())).numpy()
        assert relative(normed, plain[2]) < 1e-5 and relative(last, plain[2]) > 0.05
        assert relative(row["final_hidden"], plain[2]) < 1e-5


def test_a_run_without_mtp_can_be_shown(every_set_run: Path, tmp_path: Path) -> None:
    prompts = every_set_run.parent / "prompts.jsonl"
    execute(settings(prompts, tmp_path / "out", features="dspark"), LocalWorker)
    console = Console(record=True, width=120, file=io.StringIO())
    show(tmp_path / "out", 0, console)
    text = console.export_text()
    assert "block_5_hidden" in text and "k=1" not in text


def test_llamacpp_runs_store_its_own_block_outputs(every_set_run: Path, tmp_path: Path) -> None:
    """The same columns from l_out-i as from hidden_states[i + 1], on a GGUF file of 12 blocks."""
    pytest.importorskip("llama_cpp")
    from pipeline.models.tiny import write_tiny_gemma4

    write_tiny_gemma4(tmp_path / "tiny")
    gguf = str(tmp_path / "tiny" / "model-F16.gguf")
    prompts = every_set_run.parent / "prompts.jsonl"
    given = settings(
        prompts, tmp_path / "out", target=gguf, backend="llamacpp", features=ALL, max_new_tokens=8
    )
    execute(given, LocalWorker)
    report = validate(tmp_path / "out", replay=Replay(2, gguf))
    assert report.ok and "block_9_hidden" in report.replay
    model = model_of(gguf)
    for row in shard_rows(tmp_path / "out"):
        plain = plain_states(model, row)
        blocks = [name for name in row if name.startswith("block_")]
        # dspark 1, 3, 5, 7, 9 and eagle3 1, 5, 8
        assert blocks == [f"block_{i}_hidden" for i in (1, 3, 5, 7, 8, 9)]
        for i in (1, 3, 5, 7, 8, 9):
            stored = row[f"block_{i}_hidden"]
            assert relative(stored, plain[i + 1]) < 5e-3  # float16 weights, activations rounded
            assert min(relative(stored, plain[i]), relative(stored, plain[i + 2])) > 0.05


def test_columns_are_stored_once_and_say_which_block_they_are(every_set_run: Path) -> None:
    assert validate(every_set_run).findings == ()
    manifest = json.loads((every_set_run / "manifest.json").read_text())
    assert manifest["semantics"]["layers"] == {"dspark": [1, 2, 3, 4, 5], "eagle3": [1, 3, 4]}
    (shard,) = manifest["shards"]
    schema = pq.read_schema(every_set_run / shard["file"])
    assert len(set(schema.names)) == len(schema.names)
    for i in (1, 2, 3, 4, 5):
        metadata = schema.field(f"block_{i}_hidden").metadata
        assert metadata[b"block"] == str(i).encode()
        assert metadata[b"layer_convention"] == b"output of the 0-based decoder block"
        assert metadata[b"logical_dtype"] == b"float32"
    footer = json.loads(schema.metadata[FOOTER_KEY])
    assert footer["features"] == ALL and footer["semantics"] == manifest["semantics"]
    assert set(footer["schemas"]) == {"common/v1", "mtp/v1", "dspark/v1", "eagle3/v1"}


def test_one_pass_gives_what_each_set_alone_gives(every_set_run: Path, tmp_path: Path) -> None:
    prompts = every_set_run.parent / "prompts.jsonl"
    together = shard_rows(every_set_run)
    for name in ("mtp", "eagle3"):
        out = tmp_path / name
        execute(settings(prompts, out, features=name), LocalWorker)
        for alone, both in zip(shard_rows(out), together, strict=True):
            for column, value in alone.items():
                np.testing.assert_array_equal(value, both[column], err_msg=column)


def test_other_blocks_are_another_run_and_the_usual_ones_named_are_not(
    every_set_run: Path, tmp_path: Path
) -> None:
    """E13: a resume with one more captured layer is refused, and says so."""
    prompts = every_set_run.parent / "prompts.jsonl"
    with pytest.raises(PipelineError, match="layers"):
        execute(
            settings(prompts, every_set_run, features=ALL, layers=["eagle3=1,3,5"]), LocalWorker
        )
    assert execute(
        settings(prompts, every_set_run, features=ALL, layers=["eagle3=1,3,4"]), LocalWorker
    )
