"""The geometry of a transformers model, read from its modules and its config."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from pipeline.errors import PipelineError
from pipeline.models.base import Geometry, SharedKV

ATTENTION_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}


def meta_model(config: Any, *, trust_remote_code: bool = False) -> Any:
    """The model a config describes, without memory for its weights.

    Raises PipelineError where the architecture is not a causal language model we can read.
    """
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (ValueError, KeyError, ImportError) as error:
        raise PipelineError(f"cannot build a {config.model_type} model: {error}") from error


def geometry_of(model: Any) -> Geometry:
    """Read the geometry from a model (on any device, meta too).

    Head sizes come from the layers' own modules: `config.head_dim` means nothing where layers
    differ. Raises PipelineError for attention that this pipeline does not know.
    """
    config = model.config
    layers = decoder_layers(model)
    types = _layer_types(config, len(layers))
    if getattr(config, "attn_logit_softcapping", None):
        raise PipelineError(f"{config.model_type}: soft-capped attention scores are not supported")
    own_kv = len(layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    shared_kv = {}
    for kind in ("sliding", "full"):
        indices = [i for i in range(own_kv) if types[i] == kind]
        if indices:
            attention = layers[indices[-1]].self_attn
            rope = _rope_parameters(config, kind)
            shared_kv[kind] = SharedKV(
                layer=indices[-1],
                kv_heads=attention.k_proj.out_features // attention.head_dim,
                head_dim=int(attention.head_dim),
                rope_type=rope["rope_type"],
                rope_theta=float(rope["rope_theta"]),
                rope_scaling=_rope_scaling(rope),
            )
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return Geometry(
        architecture=config.model_type,
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        sliding_window=config.sliding_window if "sliding" in types else None,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=_embedding_scale(model),
        shared_kv=shared_kv,
        hidden_dtype=dtype,
        kv_dtype=dtype,
    )


def _embedding_scale(model: Any) -> float:
    """Gemma's embedding module scales what it looks up; a buffer may be on the meta device."""
    return float(getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0))


def decoder_layers(model: Any) -> Any:
    """The blocks of a decoder-only model, first to last; raises PipelineError for another kind."""
    layers = getattr(model.base_model, "layers", None)
    if layers is None or not hasattr(layers[0], "self_attn"):
        raise PipelineError(f"{model.config.model_type}: not a decoder-only model we can read")
    return layers


def _layer_types(config: Any, count: int) -> list[str]:
    """Attention type of each layer, in our words; refuses what is neither full nor sliding."""
    names = getattr(config, "layer_types", None)
    if names is None:  # one kind for all, as Mistral
        window = getattr(config, "sliding_window", None)
        names = ["sliding_attention" if window else "full_attention"] * count
    unknown = sorted(set(names) - set(ATTENTION_TYPES))
    if unknown:
        raise PipelineError(f"{config.model_type}: attention type {unknown[0]!r} is not supported")
    return [ATTENTION_TYPES[name] for name in names]


def _rope_parameters(config: Any, kind: str) -> Mapping[str, Any]:
    rope = config.rope_parameters
    return rope.get(f"{kind}_attention", rope) if isinstance(rope, Mapping) else {}


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, float | tuple[float, ...]]:
    """The numbers that rope_type and rope_theta leave open."""
    numbers: dict[str, float | tuple[float, ...]] = {}
    for name, value in sorted(rope.items()):
        if isinstance(value, list | tuple):
            numbers[name] = tuple(float(number) for number in value)
        elif isinstance(value, int | float) and name != "rope_theta":
            numbers[name] = float(value)
    return numbers
