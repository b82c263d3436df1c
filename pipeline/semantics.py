"""What the columns mean beyond their schema, for programs: in the manifest and in every footer.

Each convention is a fixed text. A reader that meets another one does not know these features and
must not train on them, so `Semantics` refuses it.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.geometry import Geometry
from pipeline.layers import Layers


class Rope(BaseModel):
    """RoPE of one attention type, as its stored K has it: transformers' name, base and the rest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    type: str
    theta: float
    scaling: Mapping[str, float | tuple[float, ...]]


class Semantics(BaseModel):
    """DESIGN §3, and what of it depends on the target model and the run.

    Nothing has a default: what a file does not say is as unknown as what we do not know.
    embedding_scale: what the target model multiplies its token embeddings with.
    layers: feature set -> the blocks whose outputs it holds.
    generated_by: llamacpp, transformers or endpoint; None where the answers were given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: Literal[1]
    final_hidden: Literal["after the final norm"]
    block_hidden: Literal["output of the 0-based decoder block, before the final norm"]
    key: Literal["after k_norm and RoPE at position_offset + t"]
    value: Literal["after v_norm"]
    position: Literal["token t at position_offset + t"]
    teacher_row: Literal[
        "row t is the distribution of token t+1, temperature 1, after the soft-cap"
    ]
    target: Literal["[t, k-1] is token t+k"]
    loss_mask: Literal["1 for tokens of an answer, its end-of-turn token included"]
    target_mask: Literal["[t, k-1] is 1 iff loss_mask[t+1..t+k] are all 1"]
    pairing: Literal["at last known token n: embed(x_n) with final_hidden[n-1], KV rows [:n]"]
    draft_position: Literal["position_offset + n for every depth"]
    rope: Mapping[str, Rope]
    embedding_scale: float = Field(gt=0)
    logit_softcap: float | None
    layers: Mapping[str, tuple[int, ...]]
    generated_by: Literal["llamacpp", "transformers", "endpoint"] | None
    scored_by: Literal["llamacpp", "transformers"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.model_dump(mode="json")


def _conventions() -> dict[str, Any]:
    """The fields that can say one thing only, with what they say."""
    choices = {name: get_args(field.annotation) for name, field in Semantics.model_fields.items()}
    return {
        name: values[0]
        for name, values in choices.items()
        if get_origin(Semantics.model_fields[name].annotation) is Literal and len(values) == 1
    }


def semantics_of(
    geometry: Geometry, *, layers: Layers, generated_by: str | None, scored_by: str
) -> Semantics:
    """What this code writes for a target model. Raises pydantic.ValidationError (a ValueError)."""
    return Semantics(
        **_conventions(),
        **of_geometry(geometry),
        layers=dict(layers),
        generated_by=generated_by,  # type: ignore[arg-type]
        scored_by=scored_by,  # type: ignore[arg-type]
    )


def of_geometry(geometry: Geometry) -> dict[str, Any]:
    """What of the semantics stands in the geometry too."""
    return {
        "rope": {
            kind: Rope(type=kv.rope_type, theta=kv.rope_theta, scaling=kv.rope_scaling)
            for kind, kv in geometry.shared_kv.items()
        },
        "embedding_scale": geometry.embedding_scale,
        "logit_softcap": geometry.logit_softcap,
    }


def read_semantics(raw: object, where: str) -> Semantics:
    """Read what a manifest or footer says. Raises PipelineError naming what is unknown.

    where: the file, for the message.
    """
    try:
        return Semantics.model_validate(raw)
    except pydantic.ValidationError as error:
        raise PipelineError(
            f"{where}: {unknown(error)}, which this version of drafter-features does not know; "
            "read it with the version that wrote it"
        ) from error


def unknown(error: pydantic.ValidationError) -> str:
    """What of some semantics is not known, in a few words."""
    first = error.errors(include_url=False)[0]
    name = ".".join(("semantics", *(str(part) for part in first["loc"])))
    if first["type"] == "missing":
        return f"{name} is missing"
    return f"{name} is {first['input']!r:.120}"
