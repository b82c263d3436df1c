"""What the columns mean beyond their schema, for programs: in the manifest and in every footer.

Each convention is a fixed text. A reader that meets another one does not know these features and
must not train on them, so `Semantics` refuses it.
"""

from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from pipeline.errors import PipelineError
from pipeline.geometry import Geometry
from pipeline.layers import Layers


class Rope(BaseModel):
    """RoPE of one attention type, as its stored K has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    theta: float


class Semantics(BaseModel):
    """DESIGN §3, and what of it depends on the target model and the run.

    embedding_scale: what the target model multiplies its token embeddings with.
    layers: feature set -> the blocks whose outputs it holds.
    generated_by: llamacpp, transformers or endpoint; None where the answers were given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    final_hidden: Literal["after the final norm"] = "after the final norm"
    block_hidden: Literal["output of the 0-based decoder block, before the final norm"] = (
        "output of the 0-based decoder block, before the final norm"
    )
    key: Literal["after k_norm and RoPE at position_offset + t"] = (
        "after k_norm and RoPE at position_offset + t"
    )
    value: Literal["after v_norm"] = "after v_norm"
    position: Literal["token t at position_offset + t"] = "token t at position_offset + t"
    teacher_row: Literal[
        "row t is the distribution of token t+1, temperature 1, after the soft-cap"
    ] = "row t is the distribution of token t+1, temperature 1, after the soft-cap"
    target: Literal["[t, k-1] is token t+k"] = "[t, k-1] is token t+k"
    loss_mask: Literal["1 for tokens of an answer, its end-of-turn token included"] = (
        "1 for tokens of an answer, its end-of-turn token included"
    )
    pairing: Literal["at last known token n: embed(x_n) with final_hidden[n-1], KV rows [:n]"] = (
        "at last known token n: embed(x_n) with final_hidden[n-1], KV rows [:n]"
    )
    draft_position: Literal["position_offset + n for every depth"] = (
        "position_offset + n for every depth"
    )
    rope: Mapping[str, Rope]
    embedding_scale: float = Field(gt=0)
    logit_softcap: float | None
    layers: Mapping[str, tuple[int, ...]]
    generated_by: str | None
    scored_by: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.model_dump(mode="json")


def semantics_of(
    geometry: Geometry, *, layers: Layers, generated_by: str | None, scored_by: str
) -> Semantics:
    """What this code writes for a target model."""
    return Semantics(
        rope={
            kind: Rope(type=kv.rope_type, theta=kv.rope_theta)
            for kind, kv in geometry.shared_kv.items()
        },
        embedding_scale=geometry.embedding_scale,
        logit_softcap=geometry.logit_softcap,
        layers=dict(layers),
        generated_by=generated_by,
        scored_by=scored_by,
    )


def read_semantics(raw: object, where: str) -> Semantics:
    """Read what a manifest or footer says. Raises PipelineError naming what is unknown.

    where: the file, for the message.
    """
    try:
        return Semantics.model_validate(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or "semantics"
        raise PipelineError(
            f"{where}: {name} is {first['input']!r}, which this version does not know "
            f"({first['msg']}); read it with the version of drafter-features that wrote it"
        ) from error
