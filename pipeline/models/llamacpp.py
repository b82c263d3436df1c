"""The llama.cpp backend: a GGUF target model, run by the runtime that serves it."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.errors import PipelineError
from pipeline.features import TORCH_DTYPES
from pipeline.gguf import gguf_config, read_gguf
from pipeline.models.base import (
    Generation,
    Geometry,
    Int32Array,
    PositionedRow,
    Prompt,
    RowOutput,
    Sampling,
)
from pipeline.models.hf_geometry import geometry_of, meta_model
from pipeline.models.llamacpp_forward import GRAPH_NAMES, ForwardPass, GraphNames, group_rows
from pipeline.models.llamacpp_generate import ContinuousBatch, answer_limits
from pipeline.models.llamacpp_native import Capture, Context, Model
from pipeline.models.sampling import check_sampling

# Bytes of logits per decode call: 256 tokens of a 262144-word vocabulary. llama.cpp holds them
# twice (compute buffer, output buffer) and their reduction needs about as much again.
_LOGITS_BYTES = 2**28

_MAX_SEQUENCES = 256
_GGML_TYPES = {"float32": 0, "float16": 1}
_FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}


class LlamaCppTarget:
    """A `TargetModel` over one GGUF file; not safe for use from several threads at once.

    Captures K/V as they enter the cache, rounded to the cache's type. The same calls give the same
    bytes, but a row's batch mates change the order of sums, which llama.cpp's float16 rounding of
    activations grows to about 2e-4 (relative L2): max_sequences=1 makes rows exactly independent.
    Close it, or use it in a `with` block, to free its memory.
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
        _check_choice("hidden_dtype", hidden_dtype, TORCH_DTYPES)
        _check_choice("kv_dtype", kv_dtype, _GGML_TYPES)
        _check_choice("flash_attention", flash_attention, _FLASH_ATTENTION)
        for name, number in (
            ("threads", threads),
            ("context_tokens", context_tokens),
            ("max_sequences", max_sequences),
        ):
            if number < 1:
                raise PipelineError(f"{name} must be at least 1, not {number}")
        if max_sequences > _MAX_SEQUENCES:
            raise PipelineError(
                f"max_sequences must be at most {_MAX_SEQUENCES}, llama.cpp's limit"
            )
        self._threads, self._cells, self._sequences = threads, context_tokens, max_sequences
        self._kv_type = _GGML_TYPES[kv_dtype]
        self._flash_attention = _FLASH_ATTENTION[flash_attention]
        self._context: Context | None = None
        self._names, geometry = _read_file(path)
        self.geometry = replace(geometry, hidden_dtype=hidden_dtype, kv_dtype=kv_dtype)
        self.eos_ids = frozenset(eos_ids)
        outside = sorted(i for i in eos_ids if not 0 <= i < geometry.vocab_size)
        if outside:
            raise PipelineError(
                f"{path}: EOS ids {outside} lie outside the vocabulary of {geometry.vocab_size}: "
                "correct them in the file or the settings"
            )
        self._model = Model(path, n_gpu_layers=n_gpu_layers)
        self.backend_version = self._model.lib.version
        if self._model.vocab_size != geometry.vocab_size:
            self._model.close()
            raise PipelineError(
                f"{path}: llama.cpp sees {self._model.vocab_size} tokens, the file's token "
                f"embedding has {geometry.vocab_size} rows: convert the model again"
            )

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
            sequences = min(self._sequences, batch_tokens)
            self._context = Context(
                self._model,
                cells=self._cells,
                batch_tokens=batch_tokens,
                sequences=sequences,
                outputs=batch_tokens if capturing else sequences,
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
            context, sequences=context.sequences, cells=self._cells, eos_ids=self.eos_ids
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
        assert context.capture is not None
        forward_pass = ForwardPass(
            context,
            context.capture,
            self.geometry,
            self._names,
            top_k=top_k,
            block_layers=block_layers,
        )
        groups = group_rows(rows, tokens=context.batch_tokens, sequences=context.sequences)
        return [output for group in groups for output in forward_pass.run(group)]

    def _check_row(self, name: str, row: PositionedRow) -> None:
        self._check_ids(name, row.ids)
        length = len(row.ids)
        if length > self._cells:
            raise PipelineError(
                f"{name} has {length} tokens, more than the context of {self._cells}: "
                "raise the context length or drop the row"
            )
        if row.offset and not self.geometry.can_shift:
            raise PipelineError(
                f"{name} is shifted by {row.offset}, but this target model's RoPE depends on the "
                "length: use no position shift"
            )
        if row.offset < 0 or row.offset + length > self.geometry.context_length:
            raise PipelineError(
                f"{name}: positions {row.offset} to {row.offset + length - 1} leave the trained "
                f"context of {self.geometry.context_length}: lower the position shift"
            )

    def _check_ids(self, name: str, ids: Int32Array) -> None:
        if len(ids) == 0:
            raise PipelineError(f"{name} has no tokens")
        bad = np.flatnonzero((ids < 0) | (ids >= self.geometry.vocab_size))
        if bad.size:
            raise PipelineError(
                f"{name}: token {bad[0]} has id {ids[bad[0]]}, outside the vocabulary of "
                f"{self.geometry.vocab_size}: the tokenizer is not this target model's"
            )


def _read_file(path: Path) -> tuple[GraphNames, Geometry]:
    """What the headers say; raises PipelineError before any weight is loaded."""
    file = read_gguf(path)
    if file.architecture not in GRAPH_NAMES:
        raise PipelineError(
            f"{path}: architecture {file.architecture!r} is not supported by the llamacpp "
            f"backend, which knows {', '.join(sorted(GRAPH_NAMES))}"
        )
    return GRAPH_NAMES[file.architecture], geometry_of(meta_model(gguf_config(file)))


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise PipelineError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
