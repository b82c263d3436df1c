"""Chat templates of strangers, rendered in a process of their own: bounded time, memory and output.

The sandbox keeps a template from running code; it does not keep it from looping for hours or from
building a string of gigabytes. So a child renders, one for this whole process, with its memory
limited; one that takes too long is killed and the next render starts another. `python -m
pipeline.template_process` is the child: JSON lines in, JSON lines out, no torch.
"""

import atexit
import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

TIME_LIMIT = 10.0  # seconds of one render; the longest conversations take milliseconds
MEMORY_LIMIT = 2**30  # bytes of address space of the child
OUTPUT_LIMIT = 64 * 2**20  # characters of one rendering
_START_LIMIT = 120.0  # seconds until a child on a loaded machine has started


class TemplateLimit(Exception):
    """A render took more time, memory or text than any conversation needs."""


class TemplateRenderer:
    """Renders in a child that is started when it is first needed; any thread may call."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(
        self,
        template: str,
        chat: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        names: Mapping[str, Any],
    ) -> str:
        """The template's text for a chat; names: what else the template may read (JSON values).

        Raises TemplateLimit; jinja2's TemplateSyntaxError and SecurityError; RuntimeError with
        what the template itself raised.
        """
        request = {
            "template": template,
            "chat": list(chat),
            "add_generation_prompt": add_generation_prompt,
            "names": dict(names),
        }
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n")
        kind = answer["kind"]
        if kind == "text":
            return str(answer["text"])
        if kind == "limit":
            raise TemplateLimit(answer["message"])
        if kind == "syntax":
            raise jinja2.TemplateSyntaxError(answer["message"], int(answer["line"]))
        if kind == "security":
            raise jinja2.exceptions.SecurityError(answer["message"])
        raise RuntimeError(answer["message"])

    def stop(self) -> None:
        """End the child; the next render starts another."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._child = None

    def _ask(self, line: bytes) -> dict[str, Any]:
        child = self._child
        if child is None or child.poll() is not None:
            child = self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer = self._read_line(child, TIME_LIMIT)
        except (BrokenPipeError, TemplateLimit) as error:
            self.stop()
            if isinstance(error, TemplateLimit):
                return {"kind": "limit", "message": str(error)}
            answer = b""
        if not answer:  # killed by the kernel, for its memory most likely
            self.stop()
            return {"kind": "limit", "message": "the renderer died, probably for want of memory"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def _start(self) -> "subprocess.Popen[bytes]":
        self.stop()
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pipeline.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for its parent
        )
        self._read_line(self._child, _START_LIMIT)
        return self._child

    def _read_line(self, child: "subprocess.Popen[bytes]", seconds: float) -> bytes:
        """A line of the child; b"" if it died. Raises TemplateLimit after `seconds`."""
        assert child.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            # It writes only whole answers, so once something is there the rest follows at once.
            if not selector.select(seconds):
                raise TemplateLimit(f"more than {seconds:.0f} s")
        return child.stdout.readline()


RENDERER = TemplateRenderer()
atexit.register(RENDERER.stop)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """In the child: one rendering, or what went wrong."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            conversations=[request["chat"]],
            chat_template=request["template"],
            add_generation_prompt=request["add_generation_prompt"],
            **request["names"],
        )
        text = rendered[0]
        if len(text) > OUTPUT_LIMIT:
            return {"kind": "limit", "message": f"{len(text):,} characters of text"}
        return {"kind": "text", "text": text}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "message": error.message or "", "line": error.lineno}
    except jinja2.exceptions.SecurityError as error:
        return {"kind": "security", "message": str(error)}
    except (MemoryError, RecursionError, OverflowError) as error:
        return {"kind": "limit", "message": f"more than a render needs ({type(error).__name__})"}
    except Exception as error:  # a template can raise what any expression can
        return {"kind": "raised", "message": f"{type(error).__name__}: {error}"[:1000]}


def _serve() -> None:
    """The child's loop, until its input ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # or it would outlive a killed parent while it renders
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    import transformers.utils.chat_template_utils  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, and nobody waits for an answer
        out.write(b"ready\n")
        out.flush()
        for line in sys.stdin.buffer:
            out.write(json.dumps(_answer(json.loads(line))).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    _serve()
