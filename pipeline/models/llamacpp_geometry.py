"""Geometry of a GGUF target model, and the names of its tensors in llama.cpp's graphs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models.base import Geometry, SharedKV


@dataclass(frozen=True, kw_only=True)
class GraphNames:
    """Tensor names in one architecture's graph; `{}` is the 0-based block.

    interleaved_rope: the file's Q/K rows, and so K in the graph, pair dimensions (2i, 2i+1)
    instead of transformers' (i, i + head_dim/2).
    """

    key: str
    value: str
    final_hidden: str
    block: str = "l_out-{}"
    interleaved_rope: bool = False


_QWEN = GraphNames(key="Kcur-{}", value="Vcur-{}", final_hidden="result_norm")
GRAPH_NAMES = {
    "gemma4": GraphNames(key="Kcur_pos-{}", value="Vcur_normed-{}", final_hidden="h_nextn"),
    "llama": GraphNames(
        key="Kcur-{}", value="Vcur-{}", final_hidden="result_norm", interleaved_rope=True
    ),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}

Metadata = Mapping[str, Any]


def read_metadata(path: Path) -> Metadata:
    """The file's scalar and numeric-array keys, and `tensors`: the names of its tensors.

    Arrays of strings (the vocabulary) stay unread. Raises PipelineError for an unreadable file.
    """
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise PipelineError(f"{path}: not a readable GGUF file ({error})") from error
    metadata: dict[str, Any] = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not (field.types[0] == GGUFValueType.ARRAY and field.types[-1] == GGUFValueType.STRING)
    }
    return metadata | {"tensors": frozenset(tensor.name for tensor in reader.tensors)}


class _Keys:
    """Exact-key access under the architecture's prefix; a missing key is one clear error."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path, self.metadata = path, metadata
        self.architecture = str(metadata.get("general.architecture"))

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise PipelineError(
                f"{self.path}: metadata key {self.architecture}.{key} is missing: "
                "convert the model again with a current llama.cpp"
            )
        return value


def geometry_of(
    path: Path, metadata: Metadata, *, vocab_size: int, hidden_dtype: str, kv_dtype: str
) -> Geometry:
    """The target model's sizes, from exact metadata keys.

    vocab_size: rows of the logits. Raises PipelineError for an architecture whose graph this
    package does not know, or a missing or contradictory key.
    """
    keys = _Keys(path, metadata)
    if keys.architecture not in GRAPH_NAMES:
        raise PipelineError(
            f"{path}: architecture {keys.architecture!r} is not supported by the llamacpp "
            f"backend, which knows {', '.join(sorted(GRAPH_NAMES))}"
        )
    gemma4 = keys.architecture == "gemma4"
    return Geometry(
        architecture=keys.architecture,
        num_layers=keys("block_count"),
        hidden_size=keys("embedding_length"),
        vocab_size=vocab_size,
        context_length=keys("context_length"),
        sliding_window=keys("attention.sliding_window") if gemma4 else None,
        logit_softcap=keys("final_logit_softcapping") if gemma4 else None,
        shared_kv=_gemma4_shared_kv(keys) if gemma4 else {"full": _last_layer_kv(keys)},
        hidden_dtype=hidden_dtype,
        kv_dtype=kv_dtype,
    )


def _kv_heads(keys: _Keys, layer: int) -> int:
    heads = keys("attention.head_count_kv")
    return int(heads[layer] if isinstance(heads, list) else heads)


def _gemma4_shared_kv(keys: _Keys) -> dict[str, SharedKV]:
    layers, pattern = keys("block_count"), keys("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise PipelineError(
            f"{keys.path}: gemma4.attention.sliding_window_pattern must list {layers} booleans, "
            f"one per block, not {pattern!r}: convert the model again with a current llama.cpp"
        )
    own = range(layers - keys("attention.shared_kv_layers", 0))
    shared = {}
    for kind, is_sliding, suffix in (("sliding", True, "_swa"), ("full", False, "")):
        of_kind = [layer for layer in own if bool(pattern[layer]) == is_sliding]
        if not of_kind:
            continue
        head_dim = keys(f"attention.key_length{suffix}")
        if keys(f"attention.value_length{suffix}") != head_dim:
            raise PipelineError(f"{keys.path}: key and value head sizes differ; not supported")
        shared[kind] = SharedKV(
            layer=of_kind[-1],
            kv_heads=_kv_heads(keys, of_kind[-1]),
            head_dim=head_dim,
            rope_type="default" if is_sliding else "proportional",
            rope_theta=keys(f"rope.freq_base{suffix}"),
        )
    return shared


def _last_layer_kv(keys: _Keys) -> SharedKV:
    layer = keys("block_count") - 1
    head_dim = keys(
        "attention.key_length", keys("embedding_length") // keys("attention.head_count")
    )
    if keys("attention.value_length", head_dim) != head_dim:
        raise PipelineError(f"{keys.path}: key and value head sizes differ; not supported")
    rope_type = keys("rope.scaling.type", "none")
    if rope_type == "none":
        rope_type = "llama3" if "rope_freqs.weight" in keys.metadata["tensors"] else "default"
    return SharedKV(
        layer=layer,
        kv_heads=_kv_heads(keys, layer),
        head_dim=head_dim,
        rope_type=rope_type,
        rope_theta=keys("rope.freq_base", 10000.0),
    )
