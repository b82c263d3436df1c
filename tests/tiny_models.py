"""Tiny random target models of each architecture, in memory; nothing is downloaded."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from pipeline.models.hf import TransformersTarget

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma4"]
VOCAB = 199  # not a multiple of anything, so that axes cannot be confused
SLIDING = "sliding_attention"
FULL = "full_attention"


def tiny_config(architecture: str, **changes: Any) -> PreTrainedConfig:
    """A config whose sizes are all different: heads, KV heads, head size, layers, window."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if architecture == "llama":
        return LlamaConfig(**{**common, "num_hidden_layers": 3, **changes})
    if architecture == "qwen3":
        return Qwen3Config(**{**common, "num_hidden_layers": 3, "head_dim": 16, **changes})
    if architecture == "mistral":  # every layer slides
        return MistralConfig(**{**common, "num_hidden_layers": 3, "sliding_window": 8, **changes})
    assert architecture == "gemma4"
    gemma = {
        "num_hidden_layers": 9,
        "layer_types": [SLIDING, SLIDING, FULL] * 3,
        "num_kv_shared_layers": 3,
        "sliding_window": 8,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "eos_token_id": [2, 5],
    }
    return Gemma4TextConfig(**{**common, **gemma, **changes})


def tiny_model(architecture: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose every parameter matters: norms and scalars are not left at 1."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (2.0 / parameter.shape[-1] ** 0.5))
            else:
                assert "norm" in name or "bias" in name or "scal" in name, name
                parameter.copy_(1.0 + 0.2 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype).eval().requires_grad_(False)


def make_target(architecture: str, **changes: object) -> TransformersTarget:
    return TransformersTarget(tiny_model(architecture, **changes), eos_ids=frozenset({2, 5}))
