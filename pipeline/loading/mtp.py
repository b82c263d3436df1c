"""Examples for a multi-token-prediction head (the Gemma-4 assistant), as DESIGN §3 pairs them.

The head drafts when tokens up to n are known: it gets embed(x_n) and h_{n-1}, K/V rows [:n] of the
target model, and the one position `position_offset + n` at every depth. Depth k predicts x_{n+k}.
n is an anchor. Symbols: A anchors, T tokens of a row, D hidden size, K top-k, B rows of a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.errors import PipelineError
from pipeline.loading.reading import Row

KINDS = ("sliding", "full")


@dataclass(frozen=True, kw_only=True)
class MtpExamples:
    """One row's examples.

    anchors: int64 [A], the last known token n of each
    token_ids: int64 [A], x_n; embed it with the target model's own (scaled) embedding
    hidden: [A, D], h_{n-1}
    positions: int64 [A], position_offset + n, for every depth
    label_ids: int64 [A, depth], x_{n+k}; -100 where the row has none
    label_mask: bool [A, depth], whether x_{n+1..n+k} are all supervised
    teacher_ids, teacher_logprobs: [A, depth, K], teacher row n+k-1; zeros past the row's end
    latent: [A, depth, D], h_{n+k-1}, what the head's own state stands for; zeros past the end
    kv: attention type -> K, V [T, heads, head_dim] of the whole row
    kv_mask: attention type -> bool [A, T], True for the rows an anchor may attend to
    """

    anchors: torch.Tensor
    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    label_ids: torch.Tensor
    label_mask: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_logprobs: torch.Tensor
    latent: torch.Tensor
    kv: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    kv_mask: Mapping[str, torch.Tensor]

    def sliced_kv(self, index: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Only the rows that example `index` may attend to: K, V [1, heads, rows, head_dim].

        The shape of transformers' `shared_kv_states`, under its names.
        """
        return {
            f"{kind}_attention": (_heads_first(key[keep])[None], _heads_first(value[keep])[None])
            for kind, (key, value) in self.kv.items()
            for keep in [self.kv_mask[kind][index]]
        }


def mtp_anchors(row: Row) -> torch.Tensor:
    """int64 [A]: every n >= 1 whose next token is supervised (n = 0 has no h_{n-1})."""
    anchors: torch.Tensor = row["target_mask"][:, 0].nonzero()[:, 0]
    return anchors[anchors >= 1]


def draw_anchors(row: Row, count: int, generator: torch.Generator) -> torch.Tensor:
    """At most `count` of `mtp_anchors`, drawn without repeats, rising."""
    anchors = mtp_anchors(row)
    chosen = torch.randperm(len(anchors), generator=generator)[:count]
    return anchors[chosen].sort().values


def mtp_examples(
    row: Row, anchors: torch.Tensor | Sequence[int], depth: int, *, window: int | None
) -> MtpExamples:
    """The examples of one row at the given anchors.

    window: rows that a sliding layer may see, `FeatureIndex.sliding_window`; None without such
    layers. Raises PipelineError for an anchor outside [1, T), or more depth than was extracted.
    """
    at = torch.as_tensor(anchors, dtype=torch.int64)
    length, stored = row["target_ids"].shape
    if not 1 <= depth <= stored:
        raise PipelineError(f"depth {depth}: the run was extracted with --depth {stored}")
    if len(at) and not (int(at.min()) >= 1 and int(at.max()) < length):
        raise PipelineError(
            f"row {row.get('sample_id', '?')}: anchors {at.tolist()} must lie in [1, {length})"
        )
    kv = {k: (row[f"{k}_key"], row[f"{k}_value"]) for k in KINDS if f"{k}_key" in row}
    if not kv:
        raise PipelineError("the rows have no K and V: read the columns of the mtp feature set")
    ahead = at[:, None] + torch.arange(depth)  # [A, depth], n+k-1
    inside = ahead < length
    clamped = ahead.clamp(max=length - 1)
    return MtpExamples(
        anchors=at,
        token_ids=row["input_ids"][at].long(),
        hidden=row["final_hidden"][at - 1],
        positions=row["position_offset"] + at,
        label_ids=row["target_ids"][at, :depth].long(),
        label_mask=row["target_mask"][at, :depth].bool(),
        teacher_ids=_where(inside, row["teacher_top_ids"][clamped].long()),
        teacher_logprobs=_where(inside, row["teacher_top_logprobs"][clamped]),
        latent=_where(inside, row["final_hidden"][clamped]),
        kv=kv,
        kv_mask={
            kind: visible_rows(at, length, window if kind == "sliding" else None) for kind in kv
        },
    )


def visible_rows(anchors: torch.Tensor, length: int, window: int | None) -> torch.Tensor:
    """bool [A, length]: K/V rows [:n], of a sliding layer only the last `window` of them."""
    rows = torch.arange(length)
    seen = rows < anchors[:, None]
    return seen if window is None else seen & (rows >= anchors[:, None] - window)


@dataclass(frozen=True, kw_only=True)
class MtpBatch:
    """Examples of B rows, padded to the longest row and the most anchors.

    Fields as in MtpExamples with a leading B. real: bool [B, A], False for padding anchors, which
    have no label and see row 0 alone, so that no softmax is empty.
    kv: transformers' name of the attention type -> K, V [B, heads, T, head_dim]
    kv_mask: the same names -> bool [B, 1, A, T], for scaled_dot_product_attention
    """

    token_ids: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    label_ids: torch.Tensor
    label_mask: torch.Tensor
    teacher_ids: torch.Tensor
    teacher_logprobs: torch.Tensor
    latent: torch.Tensor
    real: torch.Tensor
    kv: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    kv_mask: Mapping[str, torch.Tensor]


def collate_mtp(examples: Sequence[MtpExamples]) -> MtpBatch:
    """Pad and stack the examples of several rows."""
    kinds = examples[0].kv
    length = max(key.shape[0] for e in examples for key, _ in e.kv.values())
    most = max(len(e.anchors) for e in examples)

    def stack(name: str, fill: int = 0) -> torch.Tensor:
        return torch.stack([_pad(getattr(e, name), most, fill) for e in examples])

    masks = {}
    for kind in kinds:
        parts = [_pad(_pad(e.kv_mask[kind].T, length, 0).T, most, 0) for e in examples]
        mask = torch.stack(parts)
        mask[..., 0] |= ~mask.any(dim=-1)
        masks[f"{kind}_attention"] = mask[:, None]
    return MtpBatch(
        token_ids=stack("token_ids"),
        hidden=stack("hidden"),
        positions=stack("positions"),
        label_ids=stack("label_ids", -100),
        label_mask=stack("label_mask"),
        teacher_ids=stack("teacher_ids"),
        teacher_logprobs=stack("teacher_logprobs"),
        latent=stack("latent"),
        real=torch.stack([torch.arange(most) < len(e.anchors) for e in examples]),
        kv={
            f"{kind}_attention": (
                torch.stack([_heads_first(_pad(e.kv[kind][0], length, 0)) for e in examples]),
                torch.stack([_heads_first(_pad(e.kv[kind][1], length, 0)) for e in examples]),
            )
            for kind in kinds
        },
        kv_mask=masks,
    )


def assistant_step(
    assistant: Any, embeddings: torch.Tensor, hidden: torch.Tensor, batch: MtpBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """One depth of transformers' Gemma4AssistantForCausalLM for all anchors of a batch at once.

    embeddings, hidden: [B, A, D], of the last token and of the state that goes with it. Returns
    logits [B, A, V] and the state for the next depth [B, A, D]. Its own forward knows no mask per
    anchor: masking unsliced K/V there leaks the future or empties the sliding mask.
    """
    inputs = assistant.pre_projection(torch.cat([embeddings, hidden], dim=-1))
    state = assistant.model(
        inputs_embeds=inputs,
        attention_mask=dict(batch.kv_mask),
        position_ids=batch.positions,
        shared_kv_states=dict(batch.kv),
        use_cache=False,
        # All of them. As a number (0 by default) transformers 5.24 slices per-layer inputs, which
        # the assistant does not have.
        logits_to_keep=torch.arange(inputs.shape[1]),
    ).last_hidden_state
    return assistant.lm_head(state), assistant.post_projection(state)


def _where(inside: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.where(inside[..., None], values, torch.zeros((), dtype=values.dtype))


def _heads_first(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, 1)


def _pad(values: torch.Tensor, size: int, fill: int) -> torch.Tensor:
    """Fill up the first axis."""
    if len(values) == size:
        return values
    padding = values.new_full((size - len(values), *values.shape[1:]), fill)
    return torch.cat([values, padding])
