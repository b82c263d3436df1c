"""llama.cpp's C interface as this package uses it: the library, a model, a context, its capture.

Nothing here knows what the captured tensors mean; `llamacpp.py` does. llama_cpp is imported on
first use, so that the rest of the package works without it.
"""

import ctypes
import functools
import importlib
import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.errors import PipelineError
from pipeline.models.base import Int32Array

log = logging.getLogger("pipeline.llamacpp")

# ggml_log_level (debug, info, warn, error) -> logging level, one or two lower: llama.cpp prints
# pages at its INFO for every load, and warns of harmless things such as a short context.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUED = 5  # the text goes on from the previous call


class LogRouter:
    """Joins llama.cpp's log pieces into lines for `logging`, and keeps the latest complaints.

    The pieces are bytes cut anywhere, also inside a character: only whole lines are decoded, and
    whatever is still not UTF-8 is replaced, since an exception must not cross into C.
    """

    def __init__(self) -> None:
        self.complaints: deque[str] = deque(maxlen=4)
        self._level = logging.DEBUG
        self._line = b""

    def __call__(self, level: int, text: bytes, _user_data: object = None) -> None:
        """Take one piece; level is a ggml_log_level."""
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        *lines, self._line = (self._line + (text or b"")).split(b"\n")
        for line in lines:
            message = line.decode("utf-8", errors="replace").strip()
            if message:
                log.log(self._level, "%s", message)
                if self._level == logging.ERROR:
                    self.complaints.append(message)

    def last_words(self) -> str:
        """What llama.cpp complained of since the last call, as one line."""
        words = "; ".join(self.complaints) or "it gave no reason"
        self.complaints.clear()
        return words


class Library:
    """llama_cpp's functions (`api`), the few of ggml it does not wrap, and its log."""

    def __init__(self) -> None:
        try:
            self.api: Any = importlib.import_module("llama_cpp")
        except ImportError as error:
            raise PipelineError(
                "the llamacpp backend needs llama-cpp-python: "
                "pip install 'drafter-features[llamacpp]'"
            ) from error
        self.version = f"llama-cpp-python {self.api.__version__}"
        # Its import installs a log callback that raises on partial UTF-8: replace it, and keep
        # ours referenced for as long as llama.cpp may call it.
        self.log = LogRouter()
        self._log_callback = self.api.llama_log_callback(self.log)
        self.api.llama_log_set(self._log_callback, None)
        self.api.llama_backend_init()
        folder = Path(str(self.api.__file__)).parent / "lib"
        found = sorted(folder.glob("*ggml-base.*"))
        if not found:
            raise PipelineError(
                f"{folder} has no ggml-base library: reinstall llama-cpp-python==0.3.36"
            )
        ggml = ctypes.CDLL(str(found[0]))
        self.tensor_name = ggml.ggml_get_name
        self.tensor_name.argtypes, self.tensor_name.restype = [ctypes.c_void_p], ctypes.c_char_p
        self.tensor_bytes = ggml.ggml_nbytes
        self.tensor_bytes.argtypes, self.tensor_bytes.restype = [ctypes.c_void_p], ctypes.c_size_t
        self.tensor_elements = ggml.ggml_nelements
        self.tensor_elements.argtypes = [ctypes.c_void_p]
        self.tensor_elements.restype = ctypes.c_int64
        self.tensor_get = ggml.ggml_backend_tensor_get
        self.tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
        self.tensor_get.restype = None


@functools.cache
def library() -> Library:
    """The library, loaded once. Raises PipelineError where llama-cpp-python is missing."""
    return Library()


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

        Raises PipelineError where llama.cpp cannot allocate it.
        """
        self._lib, self._vocab_size, self.batch_tokens = model.lib, model.vocab_size, batch_tokens
        self.capture = capture
        params = self._lib.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = cells, sequences
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_outputs_max = outputs
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kv_type
        params.flash_attn_type = flash_attention
        params.kv_unified = True  # else ubatches are cut across sequences, out of batch order
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
        self._allocate_batch(batch_tokens)

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
        """Run n <= batch_tokens tokens, all arrays [n]. Raises PipelineError on any failure."""
        count = tokens.shape[0]
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
