"""A tiny random Gemma-4 target model, as a Hugging Face directory and as a GGUF file.

Every feature of the real one is on: sliding and full layers with two head sizes, shared KV,
per-layer embeddings, layer scalars, proportional RoPE, soft-cap, several EOS ids. Both files hold
the same numbers: every weight is exact in bfloat16 (safetensors) and in float16 (GGUF).
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import PipelineError
from pipeline.models.tiny_tokenizer import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    EOS_IDS,
    MASK,
    PAD,
    UNK,
    TinyVocabulary,
    tiny_vocabulary,
    write_hf_tokenizer,
)

if TYPE_CHECKING:
    from transformers import Gemma4TextConfig

GGUF_NAME = "model-F16.gguf"
_ROTATED_SHARE = 0.25  # of a full layer's head: Gemma-4's partial_rotary_factor
_NEVER_ROTATED = 1e30  # llama.cpp divides a frequency by this to switch it off


def write_tiny_gemma4(
    out: Path,
    *,
    layers: int = 12,
    full_every: int = 6,
    hidden: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    full_head_dim: int = 64,
    per_layer_input: int = 64,
    window: int = 32,
    vocab_size: int = 512,
    context_length: int = 131072,
    softcap: float = 30.0,
    seed: int = 0,
) -> None:
    """Write config, weights, tokenizer, generation config and `model-F16.gguf` into `out`.

    layers: a multiple of full_every; each full_every-th block is full attention, and about the
        last 3/7 of the blocks share KV (18 of 42, 6 of 12), cut at a multiple of full_every.
    The same arguments give the same bytes. Raises PipelineError for sizes that do not fit together.
    """
    if layers < 2 * full_every or layers % full_every:
        raise PipelineError(
            f"layers must be a multiple of {full_every}, at least {2 * full_every}, not {layers}: "
            "the last block is full attention, and some blocks must share KV with earlier ones"
        )
    if head_dim % 2 or full_head_dim % 8 or heads % kv_heads:
        raise PipelineError(
            "head_dim must be even, full_head_dim a multiple of 8, heads a multiple of kv_heads; "
            f"not {head_dim}, {full_head_dim}, {heads} and {kv_heads}"
        )
    from transformers import Gemma4TextConfig

    own = max(1, min(layers // full_every - 1, round(layers * 4 / 7 / full_every))) * full_every
    config = Gemma4TextConfig(
        vocab_size=vocab_size,
        vocab_size_per_layer_input=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        global_head_dim=full_head_dim,
        hidden_size_per_layer_input=per_layer_input,
        layer_types=[
            "sliding_attention" if (block + 1) % full_every else "full_attention"
            for block in range(layers)
        ],
        num_kv_shared_layers=layers - own,
        sliding_window=window,
        max_position_embeddings=context_length,
        final_logit_softcapping=softcap,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=list(EOS_IDS),
        architectures=["Gemma4ForCausalLM"],
        dtype="bfloat16",
    )
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = tiny_vocabulary(vocab_size)
    weights = dict(_random_weights(config, seed))
    _write_hf(out, config, vocabulary, weights)
    _write_gguf(out / GGUF_NAME, config, vocabulary, weights)


def _random_weights(
    config: "Gemma4TextConfig", seed: int
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """(transformers' name, float32 array) of every parameter, in the model's order.

    Scales keep activations near 1 and attention scores near 1 in both kinds of layer.
    """
    from transformers import Gemma4ForCausalLM

    with torch.device("meta"):
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in Gemma4ForCausalLM(config).state_dict().items()
            if name != "lm_head.weight"  # tied to the embedding
        }
    for index, (name, shape) in enumerate(shapes.items()):
        random = np.random.Generator(np.random.Philox(key=[seed, index]))
        noise = random.standard_normal(shape)
        if name.endswith("layer_scalar"):
            array = 0.9 + 0.05 * noise
        elif name == "model.norm.weight":
            # Random signs: with a tied embedding, each token would else predict itself.
            array = 3.0 * np.sign(noise) * (1 + 0.1 * np.abs(noise))
        elif name.endswith("k_norm.weight"):
            array = (1 + 0.1 * noise) * 1.2 / math.sqrt(shape[0])
        elif name.endswith(("post_feedforward_layernorm.weight", "input_norm.weight")):
            # llama.cpp looks GELU up in a float16 table: keep the share of its two users small.
            array = 0.5 + 0.05 * noise
        elif len(shape) == 1:
            array = 1 + 0.1 * noise
        else:
            array = noise / math.sqrt(shape[1])
        if "embed_tokens_per_layer" in name:  # the model multiplies by this square root again
            array = noise / math.sqrt(config.hidden_size_per_layer_input)
        exact = torch.from_numpy(array).to(torch.bfloat16).to(torch.float16)
        yield name, exact.float().numpy()


def _write_hf(
    out: Path,
    config: "Gemma4TextConfig",
    vocabulary: TinyVocabulary,
    weights: dict[str, npt.NDArray[np.float32]],
) -> None:
    from safetensors.torch import save_file

    config.save_pretrained(out)
    save_file(
        {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in weights.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_hf_tokenizer(out, vocabulary)
    generation = {
        "bos_token_id": BOS,
        "do_sample": True,
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": PAD,
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    }
    text = json.dumps(generation, indent=2) + "\n"
    (out / "generation_config.json").write_text(text, encoding="utf-8")


def _write_gguf(
    path: Path,
    config: "Gemma4TextConfig",
    vocabulary: TinyVocabulary,
    weights: dict[str, npt.NDArray[np.float32]],
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_name("tiny gemma4")
    last = config.num_hidden_layers - 1  # a full block, as block 0 is a sliding one
    sliding_dim, full_dim = (
        weights[f"model.layers.{block}.self_attn.q_norm.weight"].shape[0] for block in (0, last)
    )
    _add_sizes(writer, config, sliding_dim, full_dim)
    _add_tokenizer(writer, vocabulary)
    pairs = full_dim // 2
    rotated = int(pairs * _ROTATED_SHARE)
    freqs = np.array([1.0] * rotated + [_NEVER_ROTATED] * (pairs - rotated), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", freqs)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for name, array in weights.items():
        target = names.get_name(name.removesuffix(".weight"))
        if target is None:
            raise PipelineError(f"gguf has no name for {name}: install gguf>=0.19")
        writer.add_tensor(
            f"{target}.weight", array.astype(np.float16 if array.ndim > 1 else np.float32)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: "Gemma4TextConfig", sliding_dim: int, full_dim: int) -> None:
    rope = config.rope_parameters
    assert rope is not None and config.layer_types is not None
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(full_dim)
    writer.add_value_length(full_dim)
    writer.add_key_length_swa(sliding_dim)
    writer.add_value_length_swa(sliding_dim)
    writer.add_rope_dimension_count(full_dim)
    writer.add_rope_dimension_count_swa(sliding_dim)
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _add_tokenizer(writer: Any, vocabulary: TinyVocabulary) -> None:
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_scores([-1000.0] * len(vocabulary.tokens))
    writer.add_token_types(vocabulary.kinds)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary.merges])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_mask_token_id(MASK)
    writer.add_chat_template(CHAT_TEMPLATE)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)
