"""Between which lengths the K vectors of a target model must lie, from its k_norm's weights."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import PipelineError
from pipeline.gguf import read_gguf
from pipeline.models.base import Geometry
from pipeline.models.hf_geometry import decoder_layers

# These rotate without scaling, so that RoPE leaves the length of a vector as the norm made it.
PLAIN_ROPE = frozenset({"default", "linear", "llama3", "proportional"})


def with_key_norms(geometry: Geometry, model: Any, path: Path) -> Geometry:
    """The geometry with `key_norm` of each shared KV filled in, where the target norms K by head.

    model: on the meta device; path: a GGUF file or a directory with safetensors. Only the norms'
    weights are read, head_dim numbers for each attention type. Raises PipelineError where they
    are missing or cannot be read.
    """
    layers = decoder_layers(model)
    found = {}
    for kind, kv in geometry.shared_kv.items():
        norm = getattr(layers[kv.layer].self_attn, "k_norm", None)
        by_head = norm is not None and tuple(norm.weight.shape) == (kv.head_dim,)
        if by_head and kv.rope_type in PLAIN_ROPE:
            weights = _weights(path, kv.layer)
            found[kind] = replace(kv, key_norm=_bounds(norm, weights, path))
        else:
            found[kind] = kv
    return replace(geometry, shared_kv=found)


def _bounds(norm: Any, weights: torch.Tensor, path: Path) -> tuple[float, float]:
    """The module itself says how its weights count (some add 1): ask it about a vector of ones."""
    if weights.shape != norm.weight.shape:
        raise PipelineError(
            f"{path}: k_norm has shape {list(weights.shape)}, not {list(norm.weight.shape)}"
        )
    module = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        module.weight.copy_(weights)
        scales = module(torch.ones(weights.shape)).abs() * len(weights) ** 0.5
    return float(scales.min()), float(scales.max())


def _weights(path: Path, layer: int) -> torch.Tensor:
    """The weights of block `layer`'s k_norm as this format's loader would give them, float32."""
    if path.is_file():
        name = f"blk.{layer}.attn_k_norm.weight"
        return torch.from_numpy(read_gguf(path).read(name))
    name = f"layers.{layer}.self_attn.k_norm.weight"
    try:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            entries = json.loads(index.read_text())["weight_map"].items()
            files = [path / Path(file).name for key, file in entries if _is_text(key, name)]
        else:
            files = sorted(path.glob("*.safetensors"))
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 (not a dict)
                    if _is_text(key, name):
                        weights: torch.Tensor = tensors.get_tensor(key).float()
                        return weights
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise PipelineError(f"{path}: cannot read {name}: {error}") from error
    raise PipelineError(f"{path}: no tensor {name}")


def _is_text(key: str, name: str) -> bool:
    return key.endswith(f".{name}") and "_tower." not in key
