"""The versions a worker runs; light, so that a driver can ask without loading torch."""

import contextlib
import importlib.metadata

import pipeline


def versions() -> dict[str, str]:
    """What must agree between driver and workers, since it can change the bytes."""
    names = ("drafter-features", "torch", "transformers", "llama-cpp-python")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # The code's own version, since a checkout that is not installed has no metadata.
    return {**found, "drafter-features": pipeline.__version__}
