"""GGUF metadata -> transformers configuration, by exact key, with nothing guessed or skipped.

Every `{architecture}.*` key is either read or named as one that does not change the numbers; any
other key is refused, because a key we do not know may change what the model computes.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import (
    Gemma4TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from pipeline.errors import PipelineError
from pipeline.gguf.keys import Keys
from pipeline.gguf.reader import GGUFFile
from pipeline.gguf.rope import check_no_freqs, llama_rope, proportional_factor
from pipeline.gguf.vocab import gguf_eos_ids, read_vocabulary

_BLOCK = re.compile(r"^blk\.(\d+)\.")


def gguf_config(file: GGUFFile) -> PreTrainedConfig:
    """The transformers configuration of a GGUF model (gemma4, llama, qwen2, qwen3).

    Raises PipelineError naming the key or tensor that is missing, unknown or contradictory.
    """
    builder = _BUILDERS.get(file.architecture)
    if builder is None:
        raise PipelineError(
            f"{file.path}: the architecture {file.architecture!r} is not supported; "
            f"{', '.join(sorted(_BUILDERS))} are (or use --backend llamacpp)"
        )
    keys = Keys(file)
    config = builder(keys, _common(keys))
    keys.finish()
    return config


def layer_count(keys: Keys) -> int:
    """block_count, checked against the blocks the file has before anything is built from it."""
    layers = keys.integer("block_count")
    blocks = {int(m[1]) for name in keys.file.tensors if (m := _BLOCK.match(name))}
    if layers == 0 or len(blocks) != layers or max(blocks) != layers - 1:
        raise keys.fail(
            "block_count", f"is {layers} but the file has tensors of {len(blocks)} blocks"
        )
    return layers


def _common(keys: Keys) -> dict[str, Any]:
    """What all configurations share: sizes, vocabulary, special ids, tied output."""
    file = keys.file
    layers = layer_count(keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise PipelineError(f"{file.path}: the tensor token_embd.weight is missing or not a matrix")
    vocabulary = read_vocabulary(file)
    rows = embedding.shape[0]
    if len(vocabulary.tokens) != rows:
        raise PipelineError(
            f"{file.path}: tokenizer.ggml.tokens has {len(vocabulary.tokens)} entries but "
            f"token_embd.weight has {rows} rows"
        )
    keys.equal("vocab_size", rows, "the rows of token_embd.weight")
    keys.equal("attention.causal", True, "a decoder")
    return {
        "vocab_size": rows,
        "num_hidden_layers": layers,
        "hidden_size": keys.integer("embedding_length"),
        "num_attention_heads": keys.same("attention.head_count", layers),
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": sorted(gguf_eos_ids(file)),
        "pad_token_id": vocabulary.pad_id,
    }


def _dense(keys: Keys, common: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the llama family: one head size, one FFN size, full attention."""
    layers, heads, hidden = (
        common[k] for k in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if heads == 0 or (not keys.has("attention.key_length") and hidden % heads):
        raise keys.fail("attention.head_count", f"is {heads}, which does not divide {hidden}")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    keys.equal("attention.value_length", head_dim, "the key length")
    keys.equal("rope.dimension_count", head_dim, "RoPE over the whole head")
    keys.equal("expert_count", 0, "dense models only")
    keys.equal("expert_used_count", 0, "dense models only")
    kv_heads = (
        keys.same("attention.head_count_kv", layers)
        if keys.has("attention.head_count_kv")
        else heads
    )
    if kv_heads == 0 or heads % kv_heads:
        raise keys.fail("attention.head_count_kv", f"is {kv_heads}, which does not divide {heads}")
    return {
        **common,
        "intermediate_size": keys.same("feed_forward_length", layers),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rope_parameters": _dense_rope(keys, head_dim),
    }


def _dense_rope(keys: Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.raw("rope.scaling.type") if keys.has("rope.scaling.type") else "none"
    if kind == "none":
        for key in ("rope.scaling.factor", "rope.scale_linear"):
            keys.equal(key, 1.0, "no RoPE scaling type is set")
        return llama_rope(keys.file, theta, head_dim)
    check_no_freqs(keys.file)
    if kind != "linear":
        raise keys.fail("rope.scaling.type", f"is {kind!r}: not supported (none and linear are)")
    factor = keys.number("rope.scaling.factor")
    keys.integer("rope.scaling.original_context_length", 0)  # linear scaling does not use it
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def _llama(keys: Keys, common: dict[str, Any]) -> PreTrainedConfig:
    return LlamaConfig(**_dense(keys, common))


def _qwen2(keys: Keys, common: dict[str, Any]) -> PreTrainedConfig:
    return Qwen2Config(**_dense(keys, common), use_sliding_window=False)


def _qwen3(keys: Keys, common: dict[str, Any]) -> PreTrainedConfig:
    # Without the key, head_dim would silently become hidden / heads, which Qwen3 does not use.
    keys.raw("attention.key_length")
    return Qwen3Config(**_dense(keys, common), use_sliding_window=False)


def _gemma4(keys: Keys, common: dict[str, Any]) -> PreTrainedConfig:
    layers = common["num_hidden_layers"]
    sliding = _sliding_layers(keys, layers)
    shared = keys.integer("attention.shared_kv_layers", 0)
    if shared >= layers or set(sliding[: layers - shared]) != set(sliding):
        raise keys.fail(
            "attention.shared_kv_layers",
            f"is {shared} of {layers}: an attention type would have no layer of its own K/V",
        )
    full_dim = keys.integer("attention.key_length")
    keys.equal("attention.value_length", full_dim, "the key length")
    keys.equal("rope.dimension_count", full_dim, "proportional RoPE over the whole head")
    sliding_dim = _sliding_head_dim(keys, sliding)
    keys.equal("attention.value_length_swa", sliding_dim, "the sliding key length")
    keys.equal("rope.dimension_count_swa", sliding_dim, "RoPE over the whole sliding head")
    per_layer = keys.integer("embedding_length_per_layer_input", 0)
    return Gemma4TextConfig(
        **common,
        **_gemma4_ffn(keys, layers, shared),
        **_gemma4_kv(keys, sliding, shared),
        **_gemma4_experts(keys),
        head_dim=sliding_dim,
        global_head_dim=full_dim,
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding],
        num_kv_shared_layers=shared,
        sliding_window=keys.integer("attention.sliding_window"),
        hidden_size_per_layer_input=per_layer,
        vocab_size_per_layer_input=common["vocab_size"],
        final_logit_softcapping=(
            keys.number("final_logit_softcapping") if keys.has("final_logit_softcapping") else None
        ),
        rope_parameters={
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa"),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.number("rope.freq_base"),
                "partial_rotary_factor": proportional_factor(keys.file, full_dim),
            },
        },
    )


def _sliding_layers(keys: Keys, layers: int) -> list[bool]:
    key = "attention.sliding_window_pattern"
    pattern = keys.raw(key)
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise keys.fail(
            key, f"is {str(pattern)[:80]}; one flag for each of {layers} layers is expected"
        )
    sliding = [bool(flag) for flag in pattern]
    if sliding[-1] or not any(sliding):
        raise keys.fail(key, "must have sliding layers and end with a full-attention layer")
    return sliding


def _sliding_head_dim(keys: Keys, sliding: list[bool]) -> int:
    """key_length_swa, or the length of a sliding layer's query norm where the key is absent."""
    norm = keys.file.tensors.get(f"blk.{sliding.index(True)}.attn_q_norm.weight")
    if not keys.has("attention.key_length_swa") and norm is not None:
        return norm.shape[-1]
    return keys.integer("attention.key_length_swa")


def _gemma4_ffn(keys: Keys, layers: int, shared: int) -> dict[str, Any]:
    """The KV-shared layers may have an FFN twice as wide."""
    sizes = keys.per_layer("feed_forward_length", layers)
    base, wide = sizes[0], sizes[-1]
    doubled = shared > 0 and wide == 2 * base
    expected = [base] * (layers - shared) + [wide if doubled else base] * shared
    if sizes != expected:
        raise keys.fail(
            "feed_forward_length", "is neither constant nor doubled on the KV-shared layers"
        )
    return {"intermediate_size": base, "use_double_wide_mlp": doubled}


def _gemma4_kv(keys: Keys, sliding: list[bool], shared: int) -> dict[str, Any]:
    """KV heads per attention type; V projections are absent where V is computed from K."""
    own = range(len(sliding) - shared)
    heads = keys.per_layer("attention.head_count_kv", len(sliding))
    by_type = {s: {heads[i] for i in own if sliding[i] == s} for s in (True, False)}
    if any(len(counts) != 1 or 0 in counts for counts in by_type.values()):
        raise keys.fail("attention.head_count_kv", "differs between layers of one attention type")
    without_v = {i for i in own if f"blk.{i}.attn_v.weight" not in keys.file.tensors}
    full = {i for i in own if not sliding[i]}
    if without_v not in (set(), full):
        raise PipelineError(
            f"{keys.file.path}: the tensor blk.{min(without_v)}.attn_v.weight is missing, though "
            "not all full-attention layers (and only those) lack their V projection"
        )
    (sliding_heads,), (full_heads,) = by_type[True], by_type[False]
    if not without_v and sliding_heads != full_heads:
        raise keys.fail(
            "attention.head_count_kv",
            "differs between attention types, which transformers supports only without V tensors",
        )
    return {
        "num_key_value_heads": sliding_heads,
        "num_global_key_value_heads": full_heads if without_v else None,
        "attention_k_eq_v": bool(without_v),
    }


def _gemma4_experts(keys: Keys) -> dict[str, Any]:
    count = keys.integer("expert_count", 0)
    if count == 0:
        keys.equal("expert_used_count", 0, "the model has no experts")
        keys.equal("expert_feed_forward_length", 0, "the model has no experts")
        return {"enable_moe_block": False}
    used = keys.integer("expert_used_count")
    if not 0 < used <= count:
        raise keys.fail("expert_used_count", f"is {used} of {count} experts")
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": used,
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    }


_BUILDERS: Mapping[str, Callable[[Keys, dict[str, Any]], PreTrainedConfig]] = {
    "gemma4": _gemma4,
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
