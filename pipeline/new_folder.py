"""A folder that is there as a whole or not at all."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import PipelineError


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Fill the folder that this gives; at the end it becomes `out`, or, on an error, nothing.

    Raises PipelineError if `out` exists or cannot be written.
    """
    if out.exists():
        raise PipelineError(f"{out}: exists already; name a new directory by -o")
    staged = out.parent / f".{out.name}.partial"
    try:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        yield staged
        staged.rename(out)
    except OSError as error:
        raise PipelineError(f"{out}: cannot write: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
