"""The lengths that K may have: read from a target's file, and held by what the model computes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from pipeline.errors import PipelineError
from pipeline.geometry import Geometry
from pipeline.models.base import PositionedRow
from pipeline.models.hf import TransformersTarget
from pipeline.models.hf_geometry import geometry_of
from pipeline.models.key_norms import with_key_norms
from pipeline.models.load import find_target, load_geometry
from pipeline.models.tiny import write_tiny_gemma4


def gemma3() -> object:
    """Its norms multiply by 1 + weight."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=199,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_norm.weight.uniform_(-0.5, 0.5)
    return model


def read_geometry(path: Path) -> Geometry:
    return load_geometry(
        find_target(str(path)),
        backend="transformers",
        dtype="float32",
        kv_cache_dtype="float32",
    )


@pytest.mark.parametrize("architecture", ["gemma4", "qwen3", "gemma3"])
def test_bounds_hold_for_every_key_and_follow_the_weights(
    architecture: str, tmp_path: Path
) -> None:
    model = gemma3() if architecture == "gemma3" else tiny_model(architecture)
    model.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    geometry = read_geometry(tmp_path)
    target = TransformersTarget(model.eval(), eos_ids=frozenset({2}))  # type: ignore[attr-defined]
    assert target.geometry == geometry  # a loaded model does not tell its bounds
    ids = np.random.default_rng(0).integers(6, 199, 60).astype(np.int32)
    (out,) = target.forward([PositionedRow(ids, 100)], top_k=4)
    for kind, kv in geometry.shared_kv.items():
        assert kv.key_norm is not None
        low, high = kv.key_norm
        module = model.model.layers[kv.layer].self_attn.k_norm  # type: ignore[attr-defined]
        weight = module.weight + (1 if architecture == "gemma3" else 0)
        expected = weight.abs() * kv.head_dim**0.5
        np.testing.assert_allclose(
            (low, high), (expected.min().item(), expected.max().item()), rtol=1e-5
        )
        lengths = out.shared_kv[kind][0].float().norm(dim=-1)
        # Close to what is allowed on both sides of the middle, and never outside.
        assert low < lengths.min() < lengths.max() < high


def test_llama_has_no_bounds(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    assert read_geometry(tmp_path).shared_kv["full"].key_norm is None


def test_a_gguf_and_its_directory_have_the_same_bounds(tmp_path: Path) -> None:
    write_tiny_gemma4(tmp_path)
    (gguf,) = tmp_path.glob("*.gguf")
    from_gguf, from_directory = read_geometry(gguf), read_geometry(tmp_path)
    for kind, kv in from_gguf.shared_kv.items():
        assert kv.key_norm is not None and kv.key_norm[0] > 0
        np.testing.assert_allclose(
            kv.key_norm, from_directory.shared_kv[kind].key_norm or (), rtol=1e-6
        )


def test_missing_weights_are_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    del model.model.layers[2].self_attn.k_norm
    model.save_pretrained(tmp_path)
    with pytest.raises(PipelineError, match=r"no tensor layers\.2\.self_attn\.k_norm\.weight"):
        with_key_norms(geometry_of(tiny_model("qwen3")), tiny_model("qwen3"), tmp_path)


@pytest.mark.parametrize("text", ["[" * 10**6, "{", "[]"])
def test_a_broken_index_is_one_clear_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(PipelineError, match=r"cannot read layers\.2\.self_attn\.k_norm\.weight"):
        with_key_norms(geometry_of(tiny_model("qwen3")), tiny_model("qwen3"), tmp_path)
