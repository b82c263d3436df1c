"""Templates of strangers: no code, no endless loops, no gigabytes, and no harm done to others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest
from run_files import settings_of

from pipeline import template_process
from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.template_process import TemplateLimit, TemplateRenderer

CHAT = [{"role": "user", "content": "Hi"}]
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set x = 'x' * 1000000000 %}{{ x }}{{ x }}"
# Doubles a text of ten characters 24 times: within the memory, past the output limit.
LONG = (
    "{% set n = namespace(t='0123456789') %}"
    "{% for i in range(24) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
)


@pytest.fixture
def renderer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(template_process, "TIME_LIMIT", 2.0)
    renderer = TemplateRenderer()
    yield renderer
    renderer.stop()


def render(renderer: TemplateRenderer, template: str, **names: Any) -> str:
    return renderer.render(template, CHAT, add_generation_prompt=True, names=names)


def test_a_template_renders_with_its_names(renderer: TemplateRenderer) -> None:
    assert render(renderer, PLAIN, bos_token="<s>") == "<s>[user: Hi]"
    assert render(renderer, "{{ add_generation_prompt }} {{ '\u2028é😀' }}") == "True \u2028é😀"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "more than 2 s"),
        (HUGE, "MemoryError|renderer died"),
        (LONG, "167,772,160 characters of text"),
    ],
)
def test_what_never_ends_or_fills_the_memory_is_stopped(
    template: str, message: str, renderer: TemplateRenderer
) -> None:
    """G2; and the next render is none the worse."""
    render(renderer, PLAIN)  # the child's start does not count
    started = time.monotonic()
    with pytest.raises(TemplateLimit, match=message):
        render(renderer, template)
    assert time.monotonic() - started < 8
    assert render(renderer, PLAIN) == "[user: Hi]"


def test_a_template_cannot_run_code(renderer: TemplateRenderer, tmp_path: Path) -> None:
    """G1: a security error, and no side effect."""
    mark = tmp_path / "mark"
    reach = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{mark}"
    system = "{{ cycler.__init__.__globals__.os.system('touch " + str(mark) + "') }}"
    for template in (reach, system):
        with pytest.raises(jinja2.exceptions.SecurityError):
            render(renderer, template)
    assert not mark.exists()


def test_errors_keep_their_kind(renderer: TemplateRenderer) -> None:
    with pytest.raises(jinja2.TemplateSyntaxError) as syntax:
        render(renderer, "\n{% for %}")
    assert syntax.value.lineno == 2
    with pytest.raises(RuntimeError, match="TemplateError: no system turns"):
        render(renderer, "{{ raise_exception('no system turns') }}")


def test_a_killed_child_is_replaced(renderer: TemplateRenderer) -> None:
    render(renderer, PLAIN)
    child = renderer._child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert render(renderer, PLAIN) == "[user: Hi]"


def test_the_child_goes_with_its_parent() -> None:
    code = (
        "from pipeline.template_process import RENDERER as r; import os, sys\n"
        "r.render('x', [], add_generation_prompt=False, names={})\n"
        "print(r._child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    child.wait(timeout=20)


def test_the_child_needs_no_torch(renderer: TemplateRenderer) -> None:
    render(renderer, PLAIN)
    assert renderer._child is not None
    maps = Path(f"/proc/{renderer._child.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_a_run_with_such_a_template_ends_before_it_begins(tiny_run: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(LONG)
    out = tmp_path / "out"
    with pytest.raises(PipelineError, match="characters of text; do not use this file"):
        execute(settings_of(tiny_run, out=str(out), chat_template=str(template)), LocalWorker)
    assert not [p for p in out.rglob("*") if p.is_file() and p.name != ".lock"]


def test_one_row_over_the_limit_is_rejected_and_the_rest_kept(
    tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """A template that explodes on one conversation only."""
    chatml = json.loads((tiny_llama_dir / "tokenizer_config.json").read_text()).get("chat_template")
    chatml = chatml or (tiny_llama_dir / "chat_template.jinja").read_text()
    bomb = (
        "{% if messages | length == 1 and 'Why?' in messages[0].content %}" + LONG + "{% endif %}"
    )
    template = tmp_path / "template.jinja"
    template.write_text(chatml + bomb)
    settings = settings_of(
        tiny_run, out=str(tmp_path / "out"), chat_template=str(template), max_new_tokens=4
    )
    manifest = execute(settings, LocalWorker)
    assert manifest["rejected"]["template_limit"] == 1
    assert manifest["rows_out"] == 6
