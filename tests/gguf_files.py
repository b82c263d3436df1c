"""Tiny GGUF files for tests, written from tiny random transformers models.

A file is first two dictionaries, metadata and tensors, so that a test can break one entry before
`write` makes the file. Names and layouts follow llama.cpp's converter.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 384
CORPUS = [
    "the quick brown fox don't jump over 1234 lazy dogs, they'll sleep  in the\n\n sun.",
    "def add(a, b):\n    return a + b  # numbers 10 20 30\n\n\tx = {'key': [1, 2]}\n",
    "déjà vu à la carte, 日本語の文章 日本語 と 日本, ¿qué? naïve café",
] * 3
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
# GGUF token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


class Contents(NamedTuple):
    """What goes into a file; tests change it freely."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]


def write(path: Path, contents: Contents, change: Callable[[Contents], None] | None = None) -> Path:
    """Write a GGUF file after applying `change` to its contents in place."""
    if change is not None:
        change(contents)
    metadata = dict(contents.metadata)
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        if isinstance(value, list):
            kind = gguf.GGUFValueType.get_type(value[0])
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=kind)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(key, value)
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, data in contents.tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _trained(pre: Any, normalizer: Any, alphabet: list[str], room: int) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    import json

    return json.loads(tokenizer.to_str())["model"]


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    """A GPT-2 style vocabulary with real merges; ids 0-5 are CONTROLS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model = _trained(split, None, alphabet, VOCAB_SIZE - len(CONTROLS) - 1)
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [*CONTROLS, *learnt, "<think>"]
    types = [CONTROL] * len(CONTROLS) + [NORMAL] * len(learnt) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": _padded(tokens, types),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """A Llama-2 style vocabulary: <unk> <s> </s>, 256 byte tokens, scored pieces."""
    model = _trained(
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        normalizers.Replace(" ", "▁"),
        [],
        VOCAB_SIZE - 260,
    )
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    rank = {"".join(pair): i for i, pair in reversed(list(enumerate(model["merges"])))}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<|im_end|>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL]
    scores = [0.0] * 259 + [-float(rank.get(p, 1000 + i)) for i, p in enumerate(pieces)] + [0.0]
    tokens = _padded(tokens, types)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores + [-1e4] * (VOCAB_SIZE - len(scores)),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _padded(tokens: list[str], types: list[int]) -> list[str]:
    while len(tokens) < VOCAB_SIZE:
        tokens.append(f"<extra_{len(tokens)}>")
        types.append(CONTROL)
    assert len(tokens) == VOCAB_SIZE
    return tokens


def _randomise(model: PreTrainedModel) -> PreTrainedModel:
    """Weights large enough that a wrong one shows, norms and scales away from 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value) * 0.1 + (1.25 if value.dim() == 1 else 0.0))
            if name.endswith(".bias"):
                value.sub_(1.25)
            if "gemma4" in model.config.model_type and name.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):
                value.mul_(0.3)  # attention scale is 1: larger norms make every softmax one-hot
        for name, value in model.named_buffers():
            if name.endswith("layer_scalar"):
                value.uniform_(0.5, 0.9)
    return model.eval().requires_grad_(False)


def tiny_llama(**settings: Any) -> PreTrainedModel:
    """4 heads, 2 KV heads, 3 layers, untied output."""
    return _randomise(
        LlamaForCausalLM(LlamaConfig(**_dense(tie_word_embeddings=False), **settings))
    )


def tiny_qwen2(**settings: Any) -> PreTrainedModel:
    return _randomise(Qwen2ForCausalLM(Qwen2Config(**_dense(), **settings)))


def tiny_qwen3(**settings: Any) -> PreTrainedModel:
    """The head size is not hidden / heads, as in Qwen3."""
    return _randomise(Qwen3ForCausalLM(Qwen3Config(**_dense(head_dim=32), **settings)))


def _dense(**settings: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
        **settings,
    }


def tiny_gemma4(**settings: Any) -> PreTrainedModel:
    """9 layers (sliding, sliding, full) x 3, 3 of them KV-shared, two head sizes, per-layer input."""
    config = {
        "vocab_size": VOCAB_SIZE,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "sliding_window": 8,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
        "eos_token_id": [1, 3],
        **settings,
    }
    return _randomise(Gemma4ForCausalLM(Gemma4TextConfig(**config)))


def tiny_gemma4_moe() -> PreTrainedModel:
    """The 26B-A4B's shape: experts, V computed from K, fewer KV heads on full layers, no sharing."""
    return tiny_gemma4(
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
    )


def contents(model: PreTrainedModel, vocabulary: dict[str, Any] | None = None) -> Contents:
    """The GGUF contents of a tiny model, as llama.cpp's converter would write them in float32."""
    config = model.config
    arch = {"gemma4_text": "gemma4"}.get(config.model_type, config.model_type)
    metadata = {
        "general.architecture": arch,
        **{f"{arch}.{k}": v for k, v in _sizes(config).items()},
        **(vocabulary or byte_level_vocabulary("qwen2" if arch.startswith("qwen") else "smollm")),
    }
    return Contents(metadata, _tensors(model, arch))


def _sizes(config: Any) -> dict[str, Any]:
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    if config.model_type == "gemma4_text":
        return common | _gemma4_sizes(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return common | {
        "feed_forward_length": config.intermediate_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }


def _gemma4_sizes(config: Any) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[sliding.index(False)]
    own = config.num_hidden_layers - config.num_kv_shared_layers
    widths = [
        config.intermediate_size * (2 if config.use_double_wide_mlp and i >= own else 1)
        for i in layers
    ]
    heads = [config.per_layer_config[i].num_key_value_heads for i in layers]
    sizes = {
        "feed_forward_length": widths if len(set(widths)) > 1 else widths[0],
        "attention.head_count_kv": heads if len(set(heads)) > 1 else heads[0],
        "rope.freq_base": config.rope_parameters["full_attention"]["rope_theta"],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.per_layer_config[0].head_dim,
        "attention.value_length_swa": config.per_layer_config[0].head_dim,
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": config.per_layer_config[0].head_dim,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.enable_moe_block:
        sizes |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return sizes


def _tensors(model: PreTrainedModel, arch: str) -> dict[str, np.ndarray]:
    config = model.config
    kind = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = value.float().numpy()
        if arch == "llama" and ".q_proj." in name:
            data = interleaved(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = interleaved(data, config.num_key_value_heads)
        tensors[_tensor_name(table, name)] = data
    if arch == "gemma4":
        half = config.per_layer_config["full_attention"].head_dim // 2
        rotated = int(half * 0.25)
        tensors["rope_freqs.weight"] = np.array(
            [1.0] * rotated + [1e30] * (half - rotated), dtype=np.float32
        )
    return tensors


def _tensor_name(table: Any, name: str) -> str:
    if name.endswith(".router.scale"):
        return table.get_name(name.replace("router.scale", "router.proj")) + ".scale"
    if name.endswith(".router.per_expert_scale"):
        return (
            table.get_name(name.replace("router.per_expert_scale", "experts.down_proj")) + ".scale"
        )
    mapped = table.get_name(name, try_suffixes=(".weight", ".bias"))
    return mapped if mapped.endswith((".weight", ".bias")) else mapped + ".weight"


def interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Llama's row order in GGUF: the two halves of every head alternate."""
    half = weights.shape[0] // heads // 2
    return (
        weights.reshape(heads, 2, half, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
    ).copy()
