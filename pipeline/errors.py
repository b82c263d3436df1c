"""The errors of this package.

`PipelineError` is something the user must mend: its message says what is wrong, where, and what
to do, and the command line prints it alone and exits with 2. `RowReject` is trouble with one
input row: the row goes to rejects.jsonl with its reason and the run goes on.
"""

import contextlib
import sys
from collections.abc import Iterator


class PipelineError(Exception):
    """Bad input or settings; the message is all the user needs to see."""

    exit_code = 2


class IncompleteError(PipelineError):
    """The run stopped half-way; what is committed stays and the same command goes on from it."""

    exit_code = 3


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
def exit_on_error() -> Iterator[None]:
    """Around a command: print a PipelineError alone on stderr and exit with its code."""
    try:
        yield
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is committed", file=sys.stderr)
        sys.exit(130)
