"""The sizes of a target model, and the columns they give; no torch here."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pipeline.layers import Layers
from pipeline.schema import Layout, bind, load_schema

# RoPE variants whose frequencies depend on the largest position seen: a shift changes every
# position of the row, so no shift is possible there.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, kw_only=True)
class SharedKV:
    """The K/V that one attention type shares: layer is the 0-based block that computes it.

    key_norm: least and greatest length of a K vector that the weights of k_norm allow; None
        where K is not normed, or scaled afterwards. Read from the target's file when a run is
        planned; a loaded model does not tell it, so it does not count in comparisons.
    """

    layer: int
    kv_heads: int
    head_dim: int
    rope_type: str
    rope_theta: float
    rope_scaling: Mapping[str, float | tuple[float, ...]] = field(default_factory=dict)
    key_norm: tuple[float, float] | None = field(default=None, compare=False)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Sizes of a target model, all read from its own files.

    shared_kv: attention type ("sliding", "full") -> the last non-shared layer of that type.
        Only the types the model has; a Llama has "full" alone, from its last layer.
    context_length: tokens; absolute positions stay below it.
    embedding_scale: the token embeddings are multiplied with it (Gemma), 1 for most.
    hidden_dtype, kv_dtype: logical dtype of hidden states and of K/V as captured.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    sliding_window: int | None
    logit_softcap: float | None
    embedding_scale: float
    shared_kv: Mapping[str, SharedKV]
    hidden_dtype: str
    kv_dtype: str

    @property
    def can_shift(self) -> bool:
        """Whether a uniform position shift leaves the frequencies as they are."""
        return all(kv.rope_type not in LENGTH_DEPENDENT_ROPE for kv in self.shared_kv.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read back `as_dict`; raises TypeError where a field is missing or unknown."""
        kv = {kind: SharedKV(**fields) for kind, fields in raw["shared_kv"].items()}
        return cls(**{**raw, "shared_kv": kv})


def feature_layout(
    geometry: Geometry,
    feature_sets: Sequence[str],
    *,
    top_k: int,
    depth: int,
    layers: Layers | None = None,
) -> Layout:
    """The columns of a run's shards for this target model: the union of its feature sets.

    feature_sets: names or references (mtp, mtp/v1); layers: feature set -> blocks to hold.
    """
    sizes = {"hidden": geometry.hidden_size, "top_k": top_k, "depth": depth}
    layer_metadata = {}
    for kind, kv in geometry.shared_kv.items():
        sizes |= {f"{kind}_kv_heads": kv.kv_heads, f"{kind}_head_dim": kv.head_dim}
        layer_metadata[kind] = {
            "layer": str(kv.layer),
            "rope": "K rotated at position_offset + t",
            "rope_type": kv.rope_type,
            "rope_theta": repr(kv.rope_theta),
            "rope_scaling": json.dumps(kv.rope_scaling, sort_keys=True),
        }
    return bind(
        [load_schema(name) for name in ("common", *feature_sets)],
        sizes=sizes,
        dtypes={"hidden_dtype": geometry.hidden_dtype, "kv_dtype": geometry.kv_dtype},
        layer_metadata=layer_metadata,
        block_layers=sorted({i for blocks in (layers or {}).values() for i in blocks}),
    )
