"""Metadata keys of a GGUF file, read by their exact name; which ones were read is remembered."""

from typing import Any

import numpy as np

from pipeline.errors import PipelineError
from pipeline.gguf.reader import GGUFFile

# Keys that do not change what a text forward pass computes.
_IRRELEVANT = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})


class Keys:
    """The `{architecture}.*` keys of a file; remembers which ones were read."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        prefix = file.architecture + "."
        self._values = {
            k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)
        }
        self._unread = set(self._values) - _IRRELEVANT

    def fail(self, key: str, what: str) -> PipelineError:
        return PipelineError(f"{self.file.path}: the key {self.file.architecture}.{key} {what}")

    def has(self, key: str) -> bool:
        return key in self._values

    def raw(self, key: str) -> Any:
        """The value of a key that must exist."""
        if key not in self._values:
            raise self.fail(key, "is missing; convert the model again with a current llama.cpp")
        self._unread.discard(key)
        return self._values[key]

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; `default` where the key may be absent."""
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, f"is {value!r}; a non-negative integer is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number, shortened to the decimal that a float32 stands for.

        GGUF stores 1e-6 as float32 (9.99999997e-07); the shortest decimal of that float32 is what
        the source configuration said.
        """
        if default is not None and not self.has(key):
            return default
        value = self.raw(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"is {value!r}; a number is expected")
        if not 0 < value < float("inf"):
            raise self.fail(key, f"is {value!r}; a finite positive number is expected")
        return float(str(np.float32(value)))

    def per_layer(self, key: str, layers: int) -> list[int]:
        """An integer for each layer, whether the file holds one number or one per layer."""
        value = self.raw(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) != layers:
            raise self.fail(key, f"has {len(values)} values for {layers} layers")
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.fail(key, "holds something else than non-negative integers")
        return values

    def same(self, key: str, layers: int) -> int:
        """A per-layer integer that must be the same everywhere."""
        values = self.per_layer(key, layers)
        if len(set(values)) != 1:
            raise self.fail(key, f"differs between layers ({sorted(set(values))}): not supported")
        return values[0]

    def equal(self, key: str, value: Any, why: str) -> None:
        """A key that may be absent, and otherwise must have one value."""
        if self.has(key) and self.raw(key) != value:
            raise self.fail(key, f"is {self.raw(key)!r}; {value!r} is expected ({why})")

    def finish(self) -> None:
        """Refuse keys that nothing has read."""
        if self._unread:
            raise self.fail(
                min(self._unread),
                "is not known to this loader and may change what the model computes; "
                f"{len(self._unread)} such keys in all",
            )
