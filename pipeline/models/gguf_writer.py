"""Write a Gemma-4 text model as a GGUF file that llama.cpp serves."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import PipelineError
from pipeline.models.tiny_tokenizer import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    MASK,
    PAD,
    UNK,
    TinyVocabulary,
)

if TYPE_CHECKING:
    from transformers import Gemma4TextConfig

_ROTATED_SHARE = 0.25  # of a full layer's head: Gemma-4's partial_rotary_factor
_NEVER_ROTATED = 1e30  # llama.cpp divides a frequency by this to switch it off


def write_gguf(
    path: Path,
    name: str,
    config: "Gemma4TextConfig",
    vocabulary: TinyVocabulary,
    weights: dict[str, npt.NDArray[np.float32]],
) -> None:
    """Write one GGUF file: matrices as F16, vectors as F32.

    name: general.name. weights: transformers' parameter names -> float32 arrays; `lm_head.weight`
        is tied to the embedding and not among them. The numbers must be exact in float16.
    The same arguments give the same bytes. Raises PipelineError for a name gguf does not know.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_name(name)
    last = config.num_hidden_layers - 1  # a full block, as block 0 is a sliding one
    sliding_dim, full_dim = (
        weights[f"model.layers.{block}.self_attn.q_norm.weight"].shape[0] for block in (0, last)
    )
    _add_sizes(writer, config, sliding_dim, full_dim)
    add_tokenizer(writer, vocabulary)
    pairs = full_dim // 2
    rotated = int(pairs * _ROTATED_SHARE)
    freqs = np.array([1.0] * rotated + [_NEVER_ROTATED] * (pairs - rotated), dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", freqs)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA4, config.num_hidden_layers)
    for parameter, array in weights.items():
        target = names.get_name(parameter.removesuffix(".weight"))
        if target is None:
            raise PipelineError(f"gguf has no name for {parameter}: install gguf>=0.19")
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


def add_tokenizer(writer: Any, vocabulary: TinyVocabulary) -> None:
    """Write the tokenizer's keys with an open GGUFWriter, the chat template included."""
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
