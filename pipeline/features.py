"""From a forward pass to named columns: pure functions, one row or one chunk at a time.

Alignment is DESIGN §3: 0-based token t, T tokens, absolute position `position_offset + t`;
teacher row t is the distribution of x_{t+1}; target [t, k-1] is x_{t+k}.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.models.base import Int32Array, RowOutput
from pipeline.schema import Layout

NO_TARGET = -100  # the field's ignore index, where the row has no token t+k

_CACHED_BYTES = 8 * 2**20  # of float32 logits at a time on a CPU

TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def exact_top_k(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top k of each row, by falling value, ties to the lower id.

    logits: float [N, V]. Returns values [N, k] and int64 ids [N, k]. torch.topk picks any of
    several equal values, and bfloat16 logits are full of them, so its k-th value serves only as
    the threshold: everything at or above it is gathered in id order and sorted stably.
    """
    threshold = torch.topk(logits, k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    kept = logits >= threshold
    row, ids = kept.nonzero(as_tuple=True)  # row by row, ids rising within a row
    counts = kept.sum(dim=-1)
    first = counts.cumsum(0) - counts
    column = torch.arange(row.numel(), device=logits.device) - first[row]
    width = max(k, int(counts.max()))  # a row of NaN keeps nothing: the caller rejects it later
    values = logits.new_full((logits.shape[0], width), -torch.inf)
    values[row, column] = logits[row, ids]
    candidates = ids.new_zeros((logits.shape[0], width))
    candidates[row, column] = ids
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return values[:, :k], candidates.gather(1, order[:, :k])


def teacher_rows(
    logits: torch.Tensor, next_ids: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Reduce a chunk of logits to what is stored of it.

    logits: [N, V] after the soft-cap, any float dtype; next_ids: int64 [N], x_{t+1} of each row
    (any valid id where there is none). Returns top_ids int32 [N, K], top_logprobs float32 [N, K]
    (log-softmax in float32 over all V), tail_mass float32 [N], and next_logprobs float32 [N].
    """
    # On a CPU a few rows at a time, which stay in the cache from one step to the next: 3.7 times as
    # fast for a vocabulary of 49152.
    step = len(logits) or 1
    if logits.device.type == "cpu":
        step = max(1, _CACHED_BYTES // (4 * logits.shape[-1]))
    parts = [
        _teacher_rows(logits[i : i + step].float(), next_ids[i : i + step], top_k)
        for i in range(0, max(1, len(logits)), step)
    ]
    ids, top_logprobs, tail, next_logprobs = (torch.cat(c) for c in zip(*parts, strict=True))
    return ids, top_logprobs, tail, next_logprobs


def _teacher_rows(
    logits: torch.Tensor, next_ids: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`teacher_rows` of a chunk of float32 logits.

    Ranks are of the log-probabilities, not of the logits: float32 logits that differ in the last
    bit may come to the same log-probability, and ties are a promise about what is stored.
    """
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    size = logits.shape[-1]
    k, wide = min(top_k, size), min(4 * top_k, size)
    values, ids = torch.topk(logits, wide, dim=-1, sorted=False)
    ids, order = ids.sort(dim=-1)
    logprobs, order = torch.sort(
        values.gather(1, order) - log_norm, dim=-1, descending=True, stable=True
    )
    top_ids, top_logprobs = ids.gather(1, order)[:, :k].contiguous(), logprobs[:, :k].contiguous()
    if wide < size:
        # Where more values tie with the k-th than were taken, topk may have taken any of them.
        doubtful = (~(logprobs[:, k - 1] > logprobs[:, -1])).nonzero()[:, 0]
        if len(doubtful):
            exact = exact_top_k(logits[doubtful] - log_norm[doubtful], k)
            top_logprobs[doubtful], top_ids[doubtful] = exact
    tail = (1.0 - top_logprobs.double().exp().sum(dim=-1)).clamp(min=0.0).float()
    next_logprobs = (logits.gather(1, next_ids[:, None]) - log_norm)[:, 0]
    return top_ids.int(), top_logprobs, tail, next_logprobs


def k_step_targets(
    input_ids: Int32Array, loss_mask: npt.NDArray[np.uint8], depth: int
) -> tuple[Int32Array, npt.NDArray[np.uint8]]:
    """target_ids int32 [T, depth] and target_mask uint8 [T, depth] of one row.

    [t, k-1] is x_{t+k}, NO_TARGET past the end. The mask is 1 iff loss_mask[t+1..t+k] are all 1:
    x_{t+k} exists, is supervised, and sits in the same turn span as x_{t+1} (two spans never
    touch, since a template prints a header between them).
    """
    length = len(input_ids)
    target_ids = np.full((length, depth), NO_TARGET, dtype=np.int32)
    target_mask = np.zeros((length, depth), dtype=np.uint8)
    unbroken = np.ones(length, dtype=np.uint8)
    for k in range(1, min(depth, length - 1) + 1):
        reach = length - k
        unbroken = unbroken[:reach] & loss_mask[k:]
        target_ids[:reach, k - 1] = input_ids[k:]
        target_mask[:reach, k - 1] = unbroken
    return target_ids, target_mask


def feature_columns(
    output: RowOutput,
    input_ids: Int32Array,
    loss_mask: npt.NDArray[np.uint8],
    layout: Layout,
) -> dict[str, npt.NDArray[Any]]:
    """The array columns of one row, as stored: float32 for every float dtype (exact), int32, uint8.

    Only the layout's columns are computed. Raises KeyError for a column nothing here makes.
    """
    depth = next((c.shape[1] for c in layout.columns if c.name == "target_ids"), None)
    tensors: dict[str, torch.Tensor] = {
        "final_hidden": output.final_hidden,
        "token_logprobs": output.teacher.token_logprobs,
        "teacher_top_ids": output.teacher.top_ids,
        "teacher_top_logprobs": output.teacher.top_logprobs,
        "teacher_tail_mass": output.teacher.tail_mass,
    }
    tensors |= {f"block_{i}_hidden": hidden for i, hidden in output.block_hidden.items()}
    for kind, (key, value) in output.shared_kv.items():
        tensors |= {f"{kind}_key": key, f"{kind}_value": value}
    arrays: dict[str, npt.NDArray[Any]] = {"input_ids": input_ids, "loss_mask": loss_mask}
    if depth is not None:
        arrays["target_ids"], arrays["target_mask"] = k_step_targets(input_ids, loss_mask, depth)
    for column in layout.columns:
        if column.shape and column.name not in arrays:
            tensor = tensors[column.name]
            arrays[column.name] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return {column.name: arrays[column.name] for column in layout.columns if column.shape}
