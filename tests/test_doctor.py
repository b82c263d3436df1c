"""`pipeline doctor` on this machine as it is, and in environments that are broken for real."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline import doctor
from pipeline.cli import app
from pipeline.doctor import Check, check_ray_auth, check_shared_memory, check_space


def run_doctor(out: Path, **environ: str) -> tuple[int, dict[str, Check]]:
    """A process of its own: the Hub's address is read when its library starts."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "doctor", "--out", str(out), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, **environ},
    )
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0), done.stderr
    return done.returncode, {c["name"]: Check(**c) for c in told["checks"]}


class Answering(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_what_works_here_is_ok_and_leaves_no_file(tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        code, checks = run_doctor(
            tmp_path / "new" / "run",
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
            HF_HUB_OFFLINE="0",
            HF_TOKEN="hf_of-the-test",
            RAY_AUTH_MODE="disabled",
        )
    finally:
        server.shutdown()
    assert code == 0
    assert {"python", "torch", "gpu", "llama.cpp", "ray", "memory", "disk speed"} <= set(checks)
    assert checks["python"].status == checks["torch"].status == checks["disk speed"].status == "ok"
    assert checks["hub"].status == "ok" and checks["hub"].found.endswith("answers; a token")
    assert "hf_of-the-test" not in str(checks)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_troubles_says_what_to_do(tmp_path: Path) -> None:
    """A directory that cannot be, packages that do not load, a closed port, a token, no mode."""
    for package in ("torch", "llama_cpp"):
        (tmp_path / f"{package}.py").write_text("raise OSError('libbroken.so: cannot open')\n")
    token = tmp_path / "token"
    token.write_text("t")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        environ = {
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parent.parent}",
            "HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        environ.pop("RAY_AUTH_MODE", None)
        environ.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-m", "pipeline.cli", "doctor", "--out", "/proc/run"]
        done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    shown = done.stdout
    assert "fail torch: OSError: libbroken.so: cannot open\n     pip install -c" in shown
    if "llama-cpp-python is not installed" not in shown:
        assert "fail llama.cpp: OSError: libbroken.so" in shown
    assert "fail disk speed: /proc/run: " in shown
    assert "warn hub: http://127.0.0.1" in shown and "HF_HUB_OFFLINE=1" in shown
    assert "warn ray authentication: a token is there" in shown
    assert "export RAY_AUTH_MODE=token" in shown


@pytest.mark.parametrize(
    ("mode", "token", "status", "advice"),
    [
        (None, False, "ok", ""),
        (None, True, "warn", "export RAY_AUTH_MODE=token"),
        ("token", True, "ok", ""),
        ("token", False, "fail", "ray get-auth-token --generate"),
        ("disabled", True, "ok", "only where nobody else reaches"),
    ],
)
def test_the_ray_trap(
    tmp_path: Path, mode: str | None, token: bool, status: str, advice: str
) -> None:
    if token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("t")
    check = check_ray_auth({"RAY_AUTH_MODE": mode} if mode else {}, tmp_path)
    assert check.status == status and check.advice.startswith(advice)


def test_little_space_and_little_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By limits above what is there, since filling the disk would hurt others."""
    assert check_space(str(tmp_path)).status in ("ok", "warn")
    monkeypatch.setattr(doctor, "LITTLE_SPACE", 1e18)
    assert check_space(str(tmp_path)).status == "warn"
    monkeypatch.setattr(doctor, "NO_SPACE", 1e18)
    failed = check_space("s3://bucket/run")
    assert failed.status == "fail" and "(scratch)" in failed.found and "TMPDIR" in failed.advice
    assert check_shared_memory(tmp_path).status == "ok"
    monkeypatch.setattr(doctor, "LITTLE_SHARED", 1e18)
    assert "--shm-size" in check_shared_memory(tmp_path).advice
    assert check_shared_memory(tmp_path / "none").status == "warn"


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def check_memory() -> Check:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "check_memory", check_memory)
    monkeypatch.setattr(doctor, "_python", lambda code: subprocess.CompletedProcess([], -4, "", ""))
    result = CliRunner().invoke(app, ["doctor", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "fail memory: RuntimeError: no such thing" in result.output
    assert "fail torch: crashes (signal 4)" in result.output
    assert "disk speed" in result.output
