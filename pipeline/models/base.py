"""What a target model is to the rest of the pipeline: geometry, `generate` and `forward`.

Shape suffixes used in this package: B rows of a micro-batch, T tokens of a row, D hidden size,
H KV heads, C head size, V vocabulary, K top-k.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pipeline.geometry import Geometry, SharedKV

__all__ = [
    "FinishReason",
    "Generation",
    "Geometry",
    "Int32Array",
    "PositionedRow",
    "Prompt",
    "RowOutput",
    "Sampling",
    "SharedKV",
    "TargetModel",
    "TeacherRows",
]

Int32Array = npt.NDArray[np.int32]
FinishReason = Literal["stop", "stop_string", "length", "given"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How rollouts are drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep everything.

    ended: asked after each token that is no terminator whether the answer so far, as ids, has
        come to one of the stop strings; None where there are none.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    ended: Callable[[Sequence[int]], bool] | None = None

    def finish_of(
        self, answer: Sequence[int], eos_ids: Collection[int], limit: int
    ) -> "FinishReason | None":
        """Why `answer`, ids that grew by one token, ends here; None if it goes on."""
        if answer[-1] in eos_ids:
            return "stop"
        if self.ended is not None and self.ended(answer):
            return "stop_string"
        return "length" if len(answer) >= limit else None


class Prompt(NamedTuple):
    """ids: int32 [P], the context up to and including the generation header; seed: 64 bits."""

    ids: Int32Array
    seed: int


class Generation(NamedTuple):
    """ids: int32 [N], at most one terminator, kept as the last id iff finish_reason is stop.

    With finish_reason stop_string the last id is the one that completed the string.
    """

    ids: Int32Array
    finish_reason: FinishReason


class PositionedRow(NamedTuple):
    """ids: int32 [T]; token t sits at absolute position `offset + t`."""

    ids: Int32Array
    offset: int


class TeacherRows(NamedTuple):
    """Row t is the target's distribution of x_{t+1} (soft-cap applied, log-softmax in float32).

    top_ids: int32 [T, K], by falling probability, ties to the lower id
    top_logprobs: float32 [T, K]
    tail_mass: float32 [T], 1 - sum(exp(top_logprobs)), never below 0
    token_logprobs: float32 [T], log p of x_t under row t-1; 0 at t = 0
    """

    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    tail_mass: torch.Tensor
    token_logprobs: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class RowOutput:
    """What one forward pass says of one row; CPU tensors without padding.

    final_hidden: [T, D] after the final norm, logical dtype `Geometry.hidden_dtype`
    shared_kv: attention type -> (K, V), each [T, H, C] in `Geometry.kv_dtype`;
        K after k_norm and RoPE at `offset + t`, V after v_norm
    block_hidden: 0-based block -> [T, D], output of that block before the final norm
    """

    final_hidden: torch.Tensor
    shared_kv: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    teacher: TeacherRows
    block_hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)


class TargetModel(Protocol):
    """A loaded target model; `backend` and `backend_version` go into the manifest."""

    backend: str
    backend_version: str
    geometry: Geometry
    eos_ids: frozenset[int]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation]:
        """Answer each prompt, in order; a prompt's answer does not depend on the others' seeds."""
        ...

    def forward(
        self, rows: Sequence[PositionedRow], *, top_k: int, block_layers: Sequence[int] = ()
    ) -> list[RowOutput]:
        """One teacher-forced pass over a micro-batch; everything comes from this one pass."""
        ...
