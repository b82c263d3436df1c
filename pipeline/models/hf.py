"""The transformers backend: generation and the one forward pass features come from.

K and V are taken where every transformers model hands them to its attention function: K after
k_norm and RoPE, V after v_norm, all T rows whatever the window. That is the same for all
architectures and equals `return_shared_kv_states` of Gemma-4 (tests/test_hf.py).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from pipeline.errors import PipelineError
from pipeline.features import exact_top_k, teacher_rows
from pipeline.models.base import (
    Generation,
    PositionedRow,
    Prompt,
    RowOutput,
    Sampling,
    TeacherRows,
)
from pipeline.models.hf_generate import Generator
from pipeline.models.hf_geometry import decoder_layers, geometry_of
from pipeline.models.host_copies import HostCopies
from pipeline.models.sampling import RowSampler

ATTENTION = "sdpa_recording"
# Bytes of float32 logits that exist at a time: [chunk, V], never [T, V] of a whole micro-batch. A
# GPU reads lm_head's weights once a chunk, so there a chunk must be worth that.
LOGITS_BYTES = {"cpu": 64 * 2**20, "gpu": 512 * 2**20}


def _recording_attention(
    module: torch.nn.Module, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any
) -> Any:
    record: Callable[[torch.Tensor, torch.Tensor], None] | None
    if (record := getattr(module, "record_kv", None)) is not None:
        record(key, value)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(ATTENTION, _recording_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class TransformersTarget:
    """A loaded causal language model behind the `TargetModel` protocol."""

    backend = "transformers"

    def __init__(
        self, model: Any, *, eos_ids: frozenset[int], max_length: int | None = None
    ) -> None:
        """model: loaded, on its device, in eval mode; max_length: tokens of the longest row.

        Raises PipelineError if its logits are not lm_head of the final norm plus a soft-cap,
        which `forward` relies on."""
        self.backend_version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.model = model
        self.model.set_attn_implementation(ATTENTION)
        self.geometry = geometry_of(model)
        context = self.geometry.context_length
        self.max_length = min(context, max_length or context)
        self.eos_ids = eos_ids
        self.device = next(model.parameters()).device
        self._kv: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._record = False
        for kind, kv in self.geometry.shared_kv.items():
            decoder_layers(model)[kv.layer].self_attn.record_kv = self._recorder(kind)
        parameters = inspect.signature(model.base_model.forward).parameters
        # Renamed in transformers 5.24; the old name goes in 5.40.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._check_logits()

    def _recorder(self, kind: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def record(key: torch.Tensor, value: torch.Tensor) -> None:
            if self._record:
                self._kv[kind] = (key, value)

        return record

    @torch.inference_mode()
    def _check_logits(self) -> None:
        ids = torch.arange(1, 6, device=self.device)[None] % self.geometry.vocab_size
        expected = self.model(input_ids=ids, use_cache=False).logits[0]
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        if not torch.equal(self._logits(hidden).to(expected.device), expected):
            raise PipelineError(
                f"{self.geometry.architecture}: logits are not lm_head(final norm) with a "
                "soft-cap; this architecture is not supported"
            )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> logits [N, V] after the soft-cap, in the arithmetic of the model."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        if (cap := self.geometry.logit_softcap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[PositionedRow], *, top_k: int, block_layers: Sequence[int] = ()
    ) -> list[RowOutput]:
        """One pass over a right-padded micro-batch; see `TargetModel.forward`.

        Where RoPE depends on the longest row, rows run one by one.
        """
        if not self.geometry.can_shift and len(rows) > 1:
            return [self.forward([row], top_k=top_k, block_layers=block_layers)[0] for row in rows]
        lengths = [len(row.ids) for row in rows]
        width = max(lengths)
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for b, row in enumerate(rows):
            ids[b, : lengths[b]] = torch.tensor(row.ids)
            mask[b, : lengths[b]] = 1
        offsets = torch.tensor([row.offset for row in rows])
        positions = offsets[:, None] + torch.arange(width)
        blocks: dict[int, torch.Tensor] = {}
        hooks = [
            decoder_layers(self.model)[i].register_forward_hook(_keep_output(blocks, i))
            for i in block_layers
        ]
        self._kv.clear()
        self._record = True
        try:
            hidden = self.model.base_model(
                input_ids=ids.to(self.device),
                attention_mask=mask.to(self.device),
                position_ids=positions.to(self.device),
                use_cache=False,
            ).last_hidden_state  # [B, T, D]
        finally:
            self._record = False
            for hook in hooks:
                hook.remove()
        real = mask.bool()
        places = real.nonzero(as_tuple=True)

        def own(padded: torch.Tensor) -> torch.Tensor:  # [B, T, …] -> [N, …], row by row
            b, t = (index.to(padded.device, non_blocking=True) for index in places)
            return padded[b, t]

        flat = own(hidden)
        copies = HostCopies()  # of states and K/V, under way while the teacher rows are computed
        states = copies.start(flat)
        shared_kv = {
            kind: tuple(copies.start(own(part.transpose(1, 2))) for part in pair)
            for kind, pair in self._kv.items()
        }
        block_states = {i: copies.start(own(block)) for i, block in blocks.items()}
        self._kv.clear()
        blocks.clear()
        # x_{t+1} of every token; the last token of a row has none: its value is dropped.
        teacher = self._teacher_rows(flat, torch.roll(ids, -1, dims=1)[real], top_k, copies)
        copies.wait()
        ends = np.cumsum(lengths).tolist()
        return [
            RowOutput(
                final_hidden=states[piece],
                shared_kv={kind: (k[piece], v[piece]) for kind, (k, v) in shared_kv.items()},
                teacher=_row_of(teacher, piece),
                block_hidden={i: block[piece] for i, block in block_states.items()},
            )
            for piece in (slice(end - n, end) for end, n in zip(ends, lengths, strict=True))
        ]

    def _teacher_rows(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, top_k: int, copies: HostCopies
    ) -> list[torch.Tensor]:
        """hidden [N, D], next_ids [N] -> `features.teacher_rows` of them, lm_head chunk by chunk.

        To be read after `copies.wait()`.
        """
        limit = LOGITS_BYTES["cpu" if hidden.device.type == "cpu" else "gpu"]
        chunk = max(1, limit // (4 * self.geometry.vocab_size))
        parts = []
        for i in range(0, len(hidden), chunk):
            logits = self._logits(hidden[i : i + chunk])
            following = next_ids[i : i + chunk].to(logits.device)
            parts.append(teacher_rows(logits, following, top_k))
        return [copies.start(torch.cat(column)) for column in zip(*parts, strict=True)]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation]:
        """Answer each prompt; finished rows leave at once, waiting prompts take their places.

        Raises PipelineError for a prompt that leaves no room for an answer.
        """
        for prompt in prompts:
            if not 0 < len(prompt.ids) < self.max_length:
                raise PipelineError(
                    f"a prompt of {len(prompt.ids)} tokens leaves no room for an answer in "
                    f"{self.max_length} tokens"
                )
        generator = Generator(
            prompts,
            sampling,
            step=self._last_logits,
            choose=self._choose,
            new_cache=lambda: DynamicCache(config=self.model.config),
            eos_ids=self.eos_ids,
            max_length=self.max_length,
            device=self.device,
        )
        return generator.run()

    def _last_logits(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        hidden = self.model.base_model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state
        return self._logits(hidden[:, -1])

    def _choose(self, logits: torch.Tensor, samplers: Sequence[RowSampler]) -> list[int]:
        if samplers[0].greedy:  # the arg-max of the teacher row, ties to the lower id
            greedy: list[int] = exact_top_k(logits.float(), 1)[1][:, 0].tolist()
            return greedy
        rows = logits.float().cpu().numpy()
        return [sampler(row) for sampler, row in zip(samplers, rows, strict=True)]


def _keep_output(store: dict[int, torch.Tensor], layer: int) -> Callable[..., None]:
    def hook(_module: Any, _inputs: Any, output: Any) -> None:
        store[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def _row_of(teacher: Sequence[torch.Tensor], piece: slice) -> TeacherRows:
    """One row's teacher rows; `teacher` as `features.teacher_rows` gives it for all rows."""
    top_ids, top_logprobs, tail, next_logprobs = (column[piece] for column in teacher)
    token_logprobs = torch.zeros(len(top_ids))
    token_logprobs[1:] = next_logprobs[:-1]
    return TeacherRows(top_ids, top_logprobs, tail, token_logprobs)
