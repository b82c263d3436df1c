"""The llama.cpp backend: a GGUF target model, run by the runtime that serves it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from pipeline.errors import PipelineError
from pipeline.models.base import (
    Generation,
    PositionedRow,
    Prompt,
    RowOutput,
    Sampling,
    TeacherRows,
)
from pipeline.models.llamacpp_generate import ContinuousBatch, answer_limits
from pipeline.models.llamacpp_geometry import GRAPH_NAMES, geometry_of, read_metadata
from pipeline.models.llamacpp_native import Capture, Context, Model
from pipeline.models.sampling import check_sampling

# Bytes of logits per decode call: 256 tokens of a 262144-word vocabulary. llama.cpp holds them
# twice (compute buffer, output buffer) and their reduction needs about as much again.
_LOGITS_BYTES = 2**28

_GGML_TYPES = {"float32": 0, "float16": 1}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
_HIDDEN_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class LlamaCppTarget:
    """A `TargetModel` over one GGUF file; not safe for use from several threads at once.

    Captures K/V as they enter the cache, rounded to the cache's type. Rows in one batch share
    matrix products whose rounding depends on the batch's size, so a row equals itself alone to
    about 1e-5, not bit for bit. Close it, or use it in a `with` block, to free its memory.
    """

    backend = "llamacpp"

    def __init__(
        self,
        path: Path,
        *,
        hidden_dtype: str = "float32",
        kv_dtype: str = "float16",
        threads: int,
        context_tokens: int,
        n_gpu_layers: int = 0,
        flash_attention: Literal["auto", "on", "off"] = "auto",
        max_sequences: int = 8,
        eos_ids: frozenset[int],
    ) -> None:
        """Load the model.

        hidden_dtype: float32, float16 or bfloat16, what hidden states are rounded to.
        kv_dtype: float16 or float32, the type of llama.cpp's KV cache.
        context_tokens: cells of the KV cache: the longest row, and in `generate` the prompts and
            answers of all the rows decoded together. max_sequences: most rows decoded together.
        n_gpu_layers: blocks on the GPU, -1 for all. eos_ids: ids that end an answer.
        Raises PipelineError for a setting out of range, a file that llama.cpp cannot load, or an
        architecture whose graph is not known.
        """
        _check_choice("hidden_dtype", hidden_dtype, _HIDDEN_DTYPES)
        _check_choice("kv_dtype", kv_dtype, _GGML_TYPES)
        _check_choice("flash_attention", flash_attention, _FLASH_ATTENTION)
        for name, number in (
            ("threads", threads),
            ("context_tokens", context_tokens),
            ("max_sequences", max_sequences),
        ):
            if number < 1:
                raise PipelineError(f"{name} must be at least 1, not {number}")
        self._threads, self._cells, self._sequences = threads, context_tokens, max_sequences
        self._kv_type = _GGML_TYPES[kv_dtype]
        self._flash_attention = _FLASH_ATTENTION[flash_attention]
        self._context: Context | None = None
        self._model = Model(path, n_gpu_layers=n_gpu_layers)
        try:
            self.backend_version = self._model.lib.version
            self.geometry = geometry_of(
                path,
                read_metadata(path),
                vocab_size=self._model.vocab_size,
                hidden_dtype=hidden_dtype,
                kv_dtype=kv_dtype,
            )
            self.eos_ids = frozenset(eos_ids)
            outside = sorted(i for i in eos_ids if not 0 <= i < self.geometry.vocab_size)
            if outside:
                raise PipelineError(
                    f"{path}: EOS ids {outside} lie outside the vocabulary of "
                    f"{self.geometry.vocab_size}: correct them in the file or the settings"
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LlamaCppTarget":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the weights; the object cannot be used afterwards."""
        if self._context is not None:
            self._context.close()
            self._context = None
        self._model.close()

    def _empty_context(self, *, capturing: bool) -> Context:
        """The context for one of the two jobs; only one exists at a time, to save its KV cache.

        Generation runs without the capture hook, which would split every graph.
        """
        if not self._model.handle:
            raise PipelineError(f"{self._model.path}: this target model has been closed")
        if self._context is not None and (self._context.capture is not None) != capturing:
            self._context.close()
            self._context = None
        if self._context is None:
            batch_tokens = min(self._cells, 512)
            if capturing:
                batch_tokens = min(
                    batch_tokens, max(32, _LOGITS_BYTES // (4 * self.geometry.vocab_size))
                )
            self._context = Context(
                self._model,
                cells=self._cells,
                batch_tokens=max(batch_tokens, self._sequences),
                sequences=self._sequences,
                outputs=batch_tokens if capturing else self._sequences,
                threads=self._threads,
                kv_type=self._kv_type,
                flash_attention=self._flash_attention,
                capture=Capture(self._model.lib) if capturing else None,
            )
        self._context.clear()
        return self._context

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generation]:
        """Answer each prompt, in order; several are decoded together, each with its own seed.

        An answer also ends, with finish_reason length, where the context is full. Raises
        PipelineError, before anything is decoded, for a prompt that leaves no room.
        """
        check_sampling(sampling)
        for index, prompt in enumerate(prompts):
            self._check_ids(f"prompt {index}", prompt.ids)
        room = min(self._cells, self.geometry.context_length)
        limits = answer_limits(prompts, sampling, room=room)
        context = self._empty_context(capturing=False)
        batch = ContinuousBatch(
            context, sequences=self._sequences, cells=self._cells, eos_ids=self.eos_ids
        )
        return batch.run(prompts, limits, sampling)

    def forward(
        self, rows: Sequence[PositionedRow], *, top_k: int, block_layers: Sequence[int] = ()
    ) -> list[RowOutput]:
        """One teacher-forced pass per row; short rows share decode calls.

        block_layers: 0-based blocks whose output is wanted, each once. Raises PipelineError for
        an empty or over-long row, a position past the trained context, an id outside the
        vocabulary, or a block that does not exist.
        """
        if not 1 <= top_k <= self.geometry.vocab_size:
            raise PipelineError(f"top_k must be 1 to {self.geometry.vocab_size}, not {top_k}")
        layers = self.geometry.num_layers
        if len(set(block_layers)) < len(block_layers) or any(
            not 0 <= i < layers for i in block_layers
        ):
            raise PipelineError(
                f"block layers {list(block_layers)}: each must be 0 to {layers - 1}, and named once"
            )
        for index, row in enumerate(rows):
            self._check_row(f"row {index}", row)
        context = self._empty_context(capturing=True)
        outputs: list[RowOutput] = []
        for group in _group_rows(rows, tokens=context.batch_tokens, sequences=self._sequences):
            context.clear()
            outputs += self._forward_group(context, group, top_k, block_layers)
        return outputs

    def _check_row(self, name: str, row: PositionedRow) -> None:
        self._check_ids(name, row.ids)
        length = len(row.ids)
        if length > self._cells:
            raise PipelineError(
                f"{name} has {length} tokens, more than the context of {self._cells}: "
                "raise the context length or drop the row"
            )
        if row.offset < 0 or row.offset + length > self.geometry.context_length:
            raise PipelineError(
                f"{name}: positions {row.offset} to {row.offset + length - 1} leave the trained "
                f"context of {self.geometry.context_length}: lower the position shift"
            )

    def _check_ids(self, name: str, ids: np.ndarray) -> None:
        if len(ids) == 0:
            raise PipelineError(f"{name} has no tokens")
        bad = np.flatnonzero((ids < 0) | (ids >= self.geometry.vocab_size))
        if bad.size:
            raise PipelineError(
                f"{name}: token {bad[0]} has id {ids[bad[0]]}, outside the vocabulary of "
                f"{self.geometry.vocab_size}: the tokenizer is not this target model's"
            )

    def _forward_group(
        self,
        context: Context,
        rows: Sequence[PositionedRow],
        top_k: int,
        block_layers: Sequence[int],
    ) -> list[RowOutput]:
        """Rows that fit the context together, laid end to end: token n of the group is one row of
        every buffer, and a decode call fills the next `batch_tokens` of them."""
        assert context.capture is not None
        context.capture.wanted = self._wanted(block_layers)
        ids = np.concatenate([row.ids for row in rows]).astype(np.int32)
        positions = np.concatenate(
            [row.offset + np.arange(len(row.ids), dtype=np.int32) for row in rows]
        ).astype(np.int32)
        sequence_ids = np.repeat(
            np.arange(len(rows), dtype=np.int32), [len(row.ids) for row in rows]
        )
        # The last token of a row has no next one; whatever stands here is not read.
        next_ids = torch.from_numpy(np.append(ids[1:], ids[:1]).astype(np.int64))
        captured = self._buffers(len(ids), context.capture.wanted)
        teacher_parts = []
        for start in range(0, len(ids), context.batch_tokens):
            part = slice(start, min(start + context.batch_tokens, len(ids)))
            count = part.stop - part.start
            context.decode(
                ids[part], positions[part], sequence_ids[part], np.ones(count, dtype=np.bool_)
            )
            for name, tensor in context.capture.take(count).items():
                captured[name][part] = tensor
            logits = torch.from_numpy(context.logits(count))
            teacher_parts.append(_teacher_rows(logits, next_ids[part], top_k))
        teacher = [torch.cat(column) for column in zip(*teacher_parts, strict=True)]
        ends = np.cumsum([len(row.ids) for row in rows])
        return [
            self._row_output(
                slice(int(end) - len(row.ids), int(end)), captured, teacher, block_layers
            )
            for row, end in zip(rows, ends, strict=True)
        ]

    def _wanted(self, block_layers: Sequence[int]) -> dict[bytes, tuple[int, ...]]:
        names, hidden = GRAPH_NAMES[self.geometry.architecture], (self.geometry.hidden_size,)
        wanted: dict[bytes, tuple[int, ...]] = {names.final_hidden.encode(): hidden}
        for kv in self.geometry.shared_kv.values():
            for name in (names.key, names.value):
                wanted[name.format(kv.layer).encode()] = (kv.kv_heads, kv.head_dim)
        for block in block_layers:
            wanted[names.block.format(block).encode()] = hidden
        return wanted

    def _buffers(
        self, tokens: int, wanted: Mapping[bytes, tuple[int, ...]]
    ) -> dict[bytes, torch.Tensor]:
        hidden, kv = self.geometry.hidden_dtype, self.geometry.kv_dtype
        return {
            name: torch.empty(
                (tokens, *shape), dtype=_HIDDEN_DTYPES[hidden if len(shape) == 1 else kv]
            )
            for name, shape in wanted.items()
        }

    def _row_output(
        self,
        part: slice,
        captured: Mapping[bytes, torch.Tensor],
        teacher: Sequence[torch.Tensor],
        block_layers: Sequence[int],
    ) -> RowOutput:
        names = GRAPH_NAMES[self.geometry.architecture]
        shared_kv = {}
        for kind, kv in self.geometry.shared_kv.items():
            key = captured[names.key.format(kv.layer).encode()][part]
            if names.interleaved_rope:
                key = torch.cat([key[..., 0::2], key[..., 1::2]], dim=-1)
            shared_kv[kind] = (key, captured[names.value.format(kv.layer).encode()][part])
        top_ids, top_logprobs, tail_mass, next_logprobs = (column[part] for column in teacher)
        return RowOutput(
            final_hidden=captured[names.final_hidden.encode()][part],
            shared_kv=shared_kv,
            teacher=TeacherRows(
                top_ids=top_ids,
                top_logprobs=top_logprobs,
                tail_mass=tail_mass,
                token_logprobs=torch.cat([torch.zeros(1), next_logprobs[:-1]]),
            ),
            block_hidden={i: captured[names.block.format(i).encode()][part] for i in block_layers},
        )


def _check_choice(name: str, value: str, choices: Mapping[str, object]) -> None:
    if value not in choices:
        raise PipelineError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _group_rows(
    rows: Sequence[PositionedRow], *, tokens: int, sequences: int
) -> list[list[PositionedRow]]:
    """Consecutive rows that fit one decode call; a longer row stands alone.

    More rows per group would save nothing: the call is full, and every token's attention runs
    over (masked) cells of all the rows in the context.
    """
    groups: list[list[PositionedRow]] = []
    used = 0
    for row in rows:
        if not groups or len(groups[-1]) == sequences or used + len(row.ids) > tokens:
            groups.append([])
            used = 0
        groups[-1].append(row)
        used += len(row.ids)
    return groups


def _teacher_rows(
    logits: torch.Tensor, next_ids: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 [n, V], int64 [n] -> top_ids int32 [n, K], top_logprobs float32 [n, K],
    tail_mass float32 [n], next_logprobs float32 [n]; ties in the top K to the lower id."""
    log_norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    border = torch.topk(logits, top_k, dim=-1).values[:, -1:]
    top_ids = torch.empty((logits.shape[0], top_k), dtype=torch.int64)
    for row in range(logits.shape[0]):
        at_least = torch.nonzero(logits[row] >= border[row])[:, 0]
        order = torch.sort(logits[row, at_least], descending=True, stable=True).indices
        top_ids[row] = at_least[order[:top_k]]
    top_logprobs = logits.gather(1, top_ids) - log_norm
    tail_mass = (1 - top_logprobs.double().exp().sum(dim=-1)).clamp(min=0).float()
    next_logprobs = (logits.gather(1, next_ids[:, None]) - log_norm)[:, 0]
    return top_ids.int(), top_logprobs, tail_mass, next_logprobs
