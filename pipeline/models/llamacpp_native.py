"""A model, a context and its capture, over llama.cpp's C interface.

Nothing here knows what the captured tensors mean; `llamacpp_forward.py` does.
"""

import ctypes
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import PipelineError
from pipeline.models.base import Int32Array
from pipeline.models.llamacpp_library import Library, library


class Capture:
    """Copies named tensors out of a running graph.

    wanted: tensor name -> shape of one token's row. A name that occurs twice in a graph (K before
    and after RoPE) keeps its last occurrence, which is only right because a decode call is one
    graph: `Context` gives it at most n_ubatch tokens.
    """

    def __init__(self, lib: Library) -> None:
        self.wanted: Mapping[bytes, tuple[int, ...]] = {}
        self._lib = lib
        self._taken: dict[bytes, torch.Tensor] = {}
        self._error: Exception | None = None
        self.callback = lib.api.llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def _on_tensor(self, tensor: int, ask: bool, _user_data: int | None) -> bool:
        try:
            name = self._lib.tensor_name(tensor)
            if ask or name not in self.wanted:
                return name in self.wanted
            count, size = self._lib.tensor_elements(tensor), self._lib.tensor_bytes(tensor)
            if size != 4 * count:
                raise PipelineError(
                    f"llama.cpp's tensor {name.decode()} is not contiguous float32: "
                    "this version of llama-cpp-python is not supported, install 0.3.36"
                )
            copy = torch.empty(count, dtype=torch.float32)
            self._lib.tensor_get(tensor, copy.data_ptr(), 0, size)
            self._taken[name] = copy
            return True
        except Exception as error:  # must not cross into C; `take` raises it
            self._error = error
            return False

    def take(self, tokens: int) -> dict[bytes, torch.Tensor]:
        """float32 [tokens, *shape] for each wanted name, of the decode call just made.

        Raises PipelineError for a tensor that the graph lacks or that has another size.
        """
        taken, self._taken = self._taken, {}
        error, self._error = self._error, None
        if error is not None:
            raise error
        for name, shape in self.wanted.items():
            if name not in taken or taken[name].numel() != tokens * int(np.prod(shape)):
                found = f"has {taken[name].numel()} elements" if name in taken else "is missing"
                raise PipelineError(
                    f"llama.cpp's graph: tensor {name.decode()} {found}, expected "
                    f"{(tokens, *shape)}: install llama-cpp-python==0.3.36, which this was made for"
                )
        return {name: taken[name].view(tokens, *shape) for name, shape in self.wanted.items()}


class Model:
    """A loaded GGUF file."""

    def __init__(self, path: Path, *, n_gpu_layers: int) -> None:
        """Raises PipelineError where the file is missing or llama.cpp refuses it."""
        self.lib = library()
        self.path = path
        if not path.is_file():
            raise PipelineError(f"{path}: there is no such GGUF file")
        params = self.lib.api.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = False  # AMX repacking aborts on very small tensors
        self.lib.log.complaints.clear()
        self.handle = self.lib.api.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise PipelineError(
                f"{path}: llama.cpp cannot load it ({self.lib.log.last_words()}); check that the "
                "file is complete and its architecture known to this llama-cpp-python"
            )
        self.vocab_size = int(
            self.lib.api.llama_vocab_n_tokens(self.lib.api.llama_model_get_vocab(self.handle))
        )

    def close(self) -> None:
        """Free the weights; contexts of this model must be closed before."""
        if self.handle:
            self.lib.api.llama_model_free(self.handle)
            self.handle = None


class Context:
    """A KV cache of `cells` tokens shared by up to `sequences` sequences, and its decode call."""

    def __init__(
        self,
        model: Model,
        *,
        cells: int,
        batch_tokens: int,
        sequences: int,
        outputs: int,
        threads: int,
        kv_type: int,
        flash_attention: int,
        capture: Capture | None,
    ) -> None:
        """batch_tokens: most tokens of one decode call; outputs: most rows of logits of one.

        Raises ValueError unless sequences <= outputs <= batch_tokens, where llama.cpp would abort
        the process, and PipelineError where it cannot make the context.
        """
        if not sequences <= outputs <= batch_tokens:
            raise ValueError(f"{sequences} sequences, {outputs} outputs, {batch_tokens} tokens")
        self.sequences = sequences
        self._lib, self._vocab_size, self.capture = model.lib, model.vocab_size, capture
        params = self._lib.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = cells, sequences
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kv_type
        params.flash_attn_type = flash_attention
        params.kv_unified = True  # else ubatches are cut across sequences, out of batch order
        # Generation needs no more of a sliding layer than its window: less memory, less attention.
        params.swa_full = capture is not None
        if capture is not None:
            params.cb_eval = capture.callback
        self._lib.log.complaints.clear()
        self.handle = self._lib.api.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise PipelineError(
                f"{model.path}: llama.cpp cannot make a context of {cells} tokens "
                f"({self._lib.log.last_words()}); lower the context length or free memory"
            )
        self._memory = self._lib.api.llama_get_memory(self.handle)
        # llama.cpp may grant less than asked for, and aborts the process on a larger batch.
        self.batch_tokens = int(self._lib.api.llama_n_ubatch(self.handle))
        self._allocate_batch(self.batch_tokens)

    def _allocate_batch(self, size: int) -> None:
        """The arrays of one llama_batch, each token in exactly one sequence, owned by numpy."""
        self._tokens, self._positions, self._sequence_ids = (
            np.zeros(size, dtype=np.int32) for _ in range(3)
        )
        self._logits_flags = np.zeros(size, dtype=np.int8)
        self._sequence_counts = np.ones(size, dtype=np.int32)
        self._sequence_pointers = (ctypes.POINTER(ctypes.c_int32) * size)(
            *(
                ctypes.cast(self._sequence_ids[i:].ctypes.data, ctypes.POINTER(ctypes.c_int32))
                for i in range(size)
            )
        )
        self._batch = self._lib.api.llama_batch()
        for name, array, kind in (
            ("token", self._tokens, ctypes.c_int32),
            ("pos", self._positions, ctypes.c_int32),
            ("n_seq_id", self._sequence_counts, ctypes.c_int32),
            ("logits", self._logits_flags, ctypes.c_int8),
        ):
            setattr(self._batch, name, array.ctypes.data_as(ctypes.POINTER(kind)))
        self._batch.seq_id = ctypes.cast(
            self._sequence_pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
        )

    def decode(
        self,
        tokens: Int32Array,
        positions: Int32Array,
        sequence_ids: Int32Array,
        wants_logits: npt.NDArray[np.bool_],
    ) -> None:
        """Run 1 <= n <= batch_tokens tokens, all arrays [n].

        Raises ValueError for another n, and PipelineError for any failure of llama.cpp.
        """
        count = tokens.shape[0]
        if not 1 <= count <= self.batch_tokens:
            raise ValueError(f"{count} tokens in a decode call of 1 to {self.batch_tokens}")
        self._tokens[:count], self._positions[:count] = tokens, positions
        self._sequence_ids[:count], self._logits_flags[:count] = sequence_ids, wants_logits
        self._batch.n_tokens = count
        self._lib.log.complaints.clear()
        status = self._lib.api.llama_decode(self.handle, self._batch)
        if status != 0:
            raise PipelineError(
                f"llama.cpp's decode of {count} tokens failed with status {status} "
                f"({self._lib.log.last_words()}); 1 means a full context, 2 or below 0 usually "
                "too little memory: lower the context length or the number of sequences"
            )

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """[rows, V] of the last decode call, in batch order; a view that the next one overwrites.

        rows: how many tokens of that call wanted logits.
        """
        pointer = self._lib.api.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(pointer, (rows, self._vocab_size))

    def clear(self) -> None:
        """Forget every sequence."""
        self._lib.api.llama_memory_clear(self._memory, False)

    def forget(self, sequence_id: int) -> None:
        """Forget one sequence; its cells become free."""
        self._lib.api.llama_memory_seq_rm(self._memory, sequence_id, -1, -1)

    def close(self) -> None:
        """Free the KV cache and compute buffers."""
        if self.handle:
            self._lib.api.llama_free(self.handle)
            self.handle = None
