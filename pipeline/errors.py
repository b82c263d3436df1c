"""The errors of this package.

`PipelineError` is something the user must mend: its message says what is wrong, where, and what
to do, and the command line prints it alone and exits with 2. `RowReject` is trouble with one
input row: the row goes to rejects.jsonl with its reason and the run goes on.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import NoReturn


class PipelineError(Exception):
    """Bad input or settings; the message is all the user needs to see."""

    exit_code = 2


class IncompleteError(PipelineError):
    """The run stopped half-way; what is committed stays and the same command goes on from it."""

    exit_code = 3


class StorageError(IncompleteError):
    """The output could not be written: disk full, or object storage that fails or lies."""


def no_space(out: str) -> StorageError:
    """The error for a disk that is full in the middle of a run."""
    return StorageError(
        f"--out {out}: no space left; what is committed is whole, and the same command goes on "
        "from it once there is space"
    )


class RowReject(Exception):
    """One input row cannot be used; the run goes on without it.

    reason: a short code that rejects are counted by, such as `bad_json`.
    detail: one sentence for the person who looks at that row.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@contextlib.contextmanager
def exit_on_error(*, as_json: bool = False) -> Iterator[None]:
    """Around a command: print a PipelineError alone on stderr and exit with its code.

    as_json: as one JSON object, like the lines of --log-json.
    """
    try:
        yield
    except PipelineError as error:
        code, said = error.exit_code, f"error: {error}"
    except KeyboardInterrupt:
        again = shlex.join([sys.executable, *sys.argv])
        code, said = 130, f"interrupted; what is committed stays. To go on:\n{again}"
    else:
        return
    if as_json:
        said = json.dumps({"time": time.time(), "event": "error", "exit_code": code, "text": said})
    print(said, file=sys.stderr)
    sys.exit(code)


def run_program(app: Callable[[], object]) -> NoReturn:
    """Run a typer app as a whole program and leave with its exit code.

    Not by sys.exit: Arrow's threads may still be dropping a column's extension type, a Python
    object, and abort the process (code 134) if the interpreter goes away beneath them.
    """
    code: str | int | None = 0
    try:
        with exit_on_error():
            app()
    except SystemExit as done:
        code = done.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
