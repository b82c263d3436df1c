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
from pipeline.models.gguf_writer import write_gguf
from pipeline.models.tiny_tokenizer import (
    BOS,
    EOS_IDS,
    PAD,
    TinyVocabulary,
    tiny_vocabulary,
    write_hf_tokenizer,
)

if TYPE_CHECKING:
    from transformers import Gemma4TextConfig

GGUF_NAME = "model-F16.gguf"


def write_tiny_gemma4(out: Path, *, seed: int = 0, vocab_size: int = 512, **sizes: Any) -> None:
    """Write config, weights, tokenizer, generation config and `model-F16.gguf` into `out`.

    sizes: those of `tiny_config`. The same arguments give the same bytes.
    Raises PipelineError for sizes that do not fit together.
    """
    config = tiny_config(vocab_size=vocab_size, **sizes)
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = tiny_vocabulary(vocab_size)
    weights = dict(_random_weights(config, seed))
    write_hf(out, config, vocabulary, weights)
    write_gguf(out / GGUF_NAME, "tiny gemma4", config, vocabulary, weights)


def tiny_config(
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
) -> "Gemma4TextConfig":
    """A Gemma-4 configuration with every feature of the real one on.

    layers: a multiple of full_every; each full_every-th block is full attention, and about the
        last 3/7 of the blocks share KV (18 of 42, 6 of 12), cut at a multiple of full_every.
    Raises PipelineError for sizes that do not fit together.
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
    return Gemma4TextConfig(
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
        yield name, exact_in_both(torch.from_numpy(array))


def exact_in_both(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """The tensor's numbers rounded to ones that bfloat16 and float16 both hold exactly."""
    return tensor.detach().to(torch.bfloat16).to(torch.float16).float().numpy()


def write_hf(
    out: Path,
    config: "Gemma4TextConfig",
    vocabulary: TinyVocabulary,
    weights: dict[str, npt.NDArray[np.float32]],
) -> None:
    """Write a Hugging Face directory: config, bfloat16 weights, tokenizer, generation config.

    weights: as in `write_gguf`; the numbers must be exact in bfloat16.
    """
    from safetensors.torch import save_file

    config.save_pretrained(out)
    save_file(
        {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in weights.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_hf_tokenizer(out, vocabulary)
    write_generation_config(out)


def write_generation_config(out: Path) -> None:
    """Gemma-4's sampling defaults and its three end ids, as generation_config.json in `out`."""
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
