"""The llama.cpp library: loaded on first use, its log routed, the ggml functions the capture needs.

The rest of the package works without llama-cpp-python.
"""

import ctypes
import functools
import importlib
import logging
from collections import deque
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError

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
