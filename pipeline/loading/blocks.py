"""Examples for block drafters (DSpark, DFlash) and EAGLE-3 heads, from decoder-block outputs.

Both are conditioned on what the target model has computed when tokens up to n are known: states
of tokens [:n]. x_n itself is known and not yet processed. Block i means the OUTPUT of the 0-based
decoder block i (pipeline/layers.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.errors import PipelineError
from pipeline.loading.mtp import visible_rows
from pipeline.loading.reading import Row

NO_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class DsparkBlocks:
    """One row's blocks; S tokens a block, L layers.

    anchors: int64 [A], the last known token n
    token_ids: int64 [A, S], x_n .. x_{n+S-1}; a drafter sees the first, mask tokens stand for the
        rest; -100 past the row's end
    positions: int64 [A, S], position_offset + n + j
    label_mask: bool [A, S], whether x_{n+1..n+j} are all supervised; False at j = 0
    teacher_ids, teacher_logprobs: [A, S, K], teacher row n+j-1, the distribution of token n+j
    context: [T, L * D], the blocks' outputs side by side, layers rising
    context_mask: bool [A, T], rows [:n]
    """

    anchors: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    label_mask: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_logprobs: torch.Tensor
    context: torch.Tensor
    context_mask: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Eagle3Examples:
    """One row, example t of T - 2 being the anchor n = t + 1.

    token_ids: int64 [T-2], x_{t+1}
    hidden: [T-2, L * D], the blocks' outputs at t side by side, layers rising
    positions: int64 [T-2], position_offset + t
    label_ids: int64 [T-2], x_{t+2}
    label_mask: bool [T-2], whether x_{t+2} is supervised
    teacher_ids, teacher_logprobs: [T-2, K], teacher row t+1, the distribution of x_{t+2}
    final_hidden: [T-2, D] or None, h_{t+1}, whose LM head gives the whole distribution
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    label_ids: torch.Tensor
    label_mask: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_logprobs: torch.Tensor
    final_hidden: torch.Tensor | None


def side_by_side(row: Row, layers: Sequence[int]) -> torch.Tensor:
    """[T, L * D]: outputs of the blocks, rising. Raises PipelineError if one is missing."""
    missing = [i for i in layers if f"block_{i}_hidden" not in row]
    if missing or not layers:
        raise PipelineError(
            f"no outputs of the blocks {missing or list(layers)} in these rows: extract with "
            "--features dspark or eagle3, or --layers"
        )
    return torch.cat([row[f"block_{i}_hidden"] for i in sorted(layers)], dim=-1)


def dspark_blocks(
    row: Row,
    block: int,
    *,
    layers: Sequence[int],
    anchors: torch.Tensor | Sequence[int] | None = None,
) -> DsparkBlocks:
    """The blocks of one row.

    block: tokens of a block, the known one included, at least 2; layers: the blocks to use, usually
    `semantics.layers["dspark"]`; anchors: all n >= 1 whose next token is supervised by default.
    Raises PipelineError.
    """
    ids, mask = row["input_ids"].long(), row["loss_mask"].bool()
    length = len(ids)
    if block < 2:
        raise PipelineError(f"a block of {block} tokens predicts nothing")
    if anchors is None:
        at = mask[1:].nonzero()[:, 0]
        at = at[at >= 1]
    else:
        at = torch.as_tensor(anchors, dtype=torch.int64)
    if len(at) and not (int(at.min()) >= 1 and int(at.max()) < length):
        raise PipelineError(f"anchors {at.tolist()} must lie in [1, {length})")
    places = at[:, None] + torch.arange(block)  # n + j
    inside = places < length
    clamped = places.clamp(max=length - 1)
    supervised = (mask[clamped] & inside)[:, 1:]
    unbroken = supervised.long().cumprod(dim=1).bool()
    teacher = (places - 1).clamp(max=length - 1)
    return DsparkBlocks(
        anchors=at,
        token_ids=torch.where(inside, ids[clamped], NO_LABEL),
        positions=row["position_offset"] + places,
        label_mask=torch.cat([torch.zeros(len(at), 1, dtype=torch.bool), unbroken], dim=1),
        teacher_ids=row["teacher_top_ids"][teacher].long(),
        teacher_logprobs=row["teacher_top_logprobs"][teacher],
        context=side_by_side(row, layers),
        context_mask=visible_rows(at, length, None),
    )


def eagle3_examples(row: Row, *, layers: Sequence[int]) -> Eagle3Examples:
    """The examples of one row; layers: usually `semantics.layers["eagle3"]`.

    Raises PipelineError if one of the blocks was not extracted.
    """
    ids = row["input_ids"].long()
    final = row.get("final_hidden")
    return Eagle3Examples(
        token_ids=ids[1:-1],
        hidden=side_by_side(row, layers)[:-2],
        positions=row["position_offset"] + torch.arange(max(0, len(ids) - 2)),
        label_ids=ids[2:],
        label_mask=row["loss_mask"][2:].bool(),
        teacher_ids=row["teacher_top_ids"][1:-1].long(),
        teacher_logprobs=row["teacher_top_logprobs"][1:-1],
        final_hidden=None if final is None else final[1:-1],
    )
