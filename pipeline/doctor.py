"""`pipeline doctor`: whether this machine can run the pipeline, and what to do where it cannot.

Each check looks at one thing as a run would use it, and says `ok`, `warn` (works, but) or `fail`.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pipeline import __version__
from pipeline.errors import PipelineError
from pipeline.storage import open_storage
from pipeline.units import size_text

Status = Literal["ok", "warn", "fail"]
PROBE_BYTES = 64 * 2**20
SLOW_DISK = 100e6  # bytes/s; one GPU writes about this much
LITTLE_SPACE, NO_SPACE = 20e9, 2e9  # bytes: some shards, and not even two
LITTLE_SHARED = 512 * 2**20  # bytes; containers get 64 MiB by default
LITTLE_MEMORY = 8e9  # bytes
TIMEOUT = 10.0  # seconds for the Hub


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at and found; advice: what to do, empty if nothing."""

    name: str
    status: Status
    found: str
    advice: str = ""


def examine(out: str) -> Iterator[Check]:
    """All checks, in order. out: where a run would write; a file is written there and removed."""
    checks: tuple[Callable[[], Check], ...] = (
        check_python,
        check_torch,
        check_gpu,
        check_llama,
        check_ray,
        lambda: check_ray_auth(os.environ, Path.home()),
        check_memory,
        lambda: check_shared_memory(Path("/dev/shm")),
        lambda: check_space(out),
        lambda: check_disk_speed(out),
        check_hub,
    )
    for check in checks:
        try:
            yield check()
        except Exception as error:  # a doctor that breaks is of no help
            name = getattr(check, "__name__", "check").removeprefix("check_").strip("<>")
            text = f"{type(error).__name__}: {error}"
            yield Check(name=name, status="fail", found=text, advice="please report this")


def check_python() -> Check:
    found = f"{sys.version.split()[0]} at {sys.executable}, drafter-features {__version__}"
    return Check(name="python", status="ok", found=found)


def check_torch() -> Check:
    """torch and transformers load; a process of its own, since a broken build may crash it."""
    code = "import torch, transformers; print('torch', torch.__version__, "
    code += "'for CUDA ' + torch.version.cuda if torch.version.cuda else 'for CPUs', "
    code += "'transformers', transformers.__version__)"
    done = _python(code)
    if done.returncode == 0:
        return Check(name="torch", status="ok", found=done.stdout.strip())
    return Check(
        name="torch",
        status="fail",
        found=_complaint(done),
        advice="pip install -c constraints.txt torch transformers",
    )


def check_gpu() -> Check:
    """Every GPU multiplies a matrix; a GPU that torch cannot use is a finding."""
    there = _nvidia_devices()
    code = """
import torch
for i in range(torch.cuda.device_count()):
    x = torch.ones(64, 64, device=f"cuda:{i}", dtype=torch.bfloat16)
    assert (x @ x).float().sum().item() == 64**3
    free, total = torch.cuda.mem_get_info(i)
    print(f"{torch.cuda.get_device_name(i)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free")
"""
    done = _python(code)
    gpus = done.stdout.splitlines()
    if done.returncode != 0:
        advice = "compare the driver (nvidia-smi) with torch's CUDA; `--device cpu` still works"
        return Check(name="gpu", status="fail", found=_complaint(done), advice=advice)
    if gpus:
        return Check(name="gpu", status="ok", found="; ".join(gpus))
    if there:
        return Check(
            name="gpu",
            status="fail",
            found=f"{there} NVIDIA GPU(s), but torch sees none",
            advice="install a torch build for CUDA, and look at CUDA_VISIBLE_DEVICES",
        )
    advice = "fine for the demo and tests; a real target model needs a GPU"
    return Check(name="gpu", status="warn", found="no NVIDIA GPU: runs use the CPU", advice=advice)


def check_llama() -> Check:
    """llama-cpp-python loads; with a GPU here, its build must use it."""
    name = "llama.cpp"
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name=name,
            status="warn",
            found="llama-cpp-python is not installed: GGUF files run dequantised by transformers",
            advice="pip install 'drafter-features[llamacpp]' (compiles for some minutes)",
        )
    code = "import llama_cpp as l; l.llama_backend_init(); print(l.llama_supports_gpu_offload())"
    done = _python(code)
    rebuild = "pip install --force-reinstall --no-deps --no-cache-dir -c constraints.txt "
    rebuild += "llama-cpp-python"
    if done.returncode != 0:
        advice = f"it was perhaps built for another CPU or driver: {rebuild}"
        return Check(name=name, status="fail", found=_complaint(done), advice=advice)
    on_gpu = done.stdout.split()[-1] == "True"
    found = f"llama-cpp-python {version}, built for {'GPUs' if on_gpu else 'CPUs'}"
    if _nvidia_devices() and not on_gpu:
        advice = f"CMAKE_ARGS=-DGGML_CUDA=on {rebuild}"
        return Check(name=name, status="warn", found=found, advice=advice)
    return Check(name=name, status="ok", found=found)


def check_ray() -> Check:
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            name="ray",
            status="warn",
            found="not installed: only `pipeline rollout` and `pipeline extract` run, unspread",
            advice="pip install -c constraints.txt 'drafter-features[ray]'",
        )
    address = os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        advice = "runs join that cluster; `unset RAY_ADDRESS` for a private one"
        found = f"{version}, RAY_ADDRESS is {address}"
        return Check(name="ray", status="warn", found=found, advice=advice)
    return Check(name="ray", status="ok", found=version)


def check_ray_auth(environ: Any, home: Path) -> Check:
    """The trap: a token that some local Ray left makes `ray start` ask for it, but not offer it."""
    mode = environ.get("RAY_AUTH_MODE")
    file = Path(environ.get("RAY_AUTH_TOKEN_PATH") or home / ".ray" / "auth_token")
    token = bool(environ.get("RAY_AUTH_TOKEN")) or file.is_file()
    name = "ray authentication"
    if mode == "token" and not token:
        found = f"RAY_AUTH_MODE=token, but there is no token in RAY_AUTH_TOKEN or {file}"
        advice = "ray get-auth-token --generate >/dev/null"
        return Check(name=name, status="fail", found=found, advice=advice)
    if mode is None and token:
        return Check(
            name=name,
            status="warn",
            found=f"a token is there ({file}) and RAY_AUTH_MODE is not set: `ray start` then asks "
            "for the token and `ray job submit` fails with 401",
            advice="export RAY_AUTH_MODE=token, before `ray start` and before `ray job submit`",
        )
    if mode == "disabled":
        advice = "only where nobody else reaches Ray's ports: it runs code of whoever does"
        return Check(name=name, status="ok", found="disabled", advice=advice)
    return Check(name=name, status="ok", found="by token" if mode else "no token, no mode")


def check_memory() -> Check:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")  # of the container, if there is one
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, int(text))
    found = f"{size_text(free)} available, {os.cpu_count()} CPUs"
    if free < LITTLE_MEMORY:
        advice = "`--dry-run` says what a worker takes; lower --workers and --batch-tokens"
        return Check(name="memory", status="warn", found=found, advice=advice)
    return Check(name="memory", status="ok", found=found)


def check_shared_memory(path: Path) -> Check:
    """Ray keeps its object store there; ours passes only commit records through it."""
    name = "shared memory"
    if not path.is_dir():
        found, advice = f"no {path}", "Ray falls back to the disk, which works but is slower"
        return Check(name=name, status="warn", found=found, advice=advice)
    usage = shutil.disk_usage(path)
    found = f"{size_text(usage.free)} of {size_text(usage.total)} free in {path}"
    if usage.free < LITTLE_SHARED:
        advice = "give the container more (docker run --shm-size=2g; Kubernetes: a Memory emptyDir)"
        return Check(name=name, status="warn", found=found, advice=advice)
    return Check(name=name, status="ok", found=found)


def check_space(out: str) -> Check:
    """Space at OUT, or, where OUT is object storage, for the scratch files on this machine."""
    name, remote = "disk space", "://" in out
    where = tempfile.gettempdir() if remote else out
    free = open_storage(where).free_bytes() or 0
    found = f"{size_text(free)} free at {where}{' (scratch)' if remote else ''}"
    advice = "`--dry-run` says what a run takes; name another directory"
    if remote:
        advice = "point TMPDIR at a larger disk; two shards a worker must fit"
    if free < LITTLE_SPACE:
        status: Status = "fail" if free < NO_SPACE else "warn"
        return Check(name=name, status=status, found=found, advice=advice)
    return Check(name=name, status="ok", found=found)


def check_disk_speed(out: str) -> Check:
    """A file of 64 MiB that no compression shortens, written, synced and removed."""
    name = "disk speed"
    data = os.urandom(PROBE_BYTES)
    probe = f"doctor-{uuid.uuid4().hex}"
    try:
        started = time.monotonic()
        if "://" in out:
            storage = open_storage(out)
            storage.replace(probe, data)
            seconds = time.monotonic() - started
            storage.remove(probe)
        else:
            seconds = _write(_existing(Path(out)) / f".{probe}", data)
    except (OSError, PipelineError) as error:
        advice = "name a directory or bucket that this user may write to"
        return Check(name=name, status="fail", found=f"{out}: {error}", advice=advice)
    rate = PROBE_BYTES / max(seconds, 1e-6)
    found = f"{size_text(rate)}/s written at {out}"
    if rate < SLOW_DISK:
        advice = "workers may wait for it; a local NVMe disk or storage in the region is faster"
        return Check(name=name, status="warn", found=found, advice=advice)
    return Check(name=name, status="ok", found=found)


def check_hub() -> Check:
    """Whether target models, prompts and `pipeline push` can reach the Hub; all else is local."""
    import requests
    from huggingface_hub import constants, get_token

    name, token = "hub", "a token" if get_token() else "no token (hf auth login)"
    if constants.HF_HUB_OFFLINE:
        advice = "local models and prompts work; unset it to download or push"
        return Check(name=name, status="warn", found="HF_HUB_OFFLINE is set", advice=advice)
    try:
        answer = requests.head(constants.ENDPOINT, timeout=TIMEOUT, allow_redirects=True)
        answer.raise_for_status()
    except requests.RequestException as error:
        return Check(
            name=name,
            status="warn",
            found=f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}); {token}",
            advice="local models and prompts work; set HF_ENDPOINT or a proxy (HTTPS_PROXY), or "
            "HF_HUB_OFFLINE=1 so that nothing waits for it",
        )
    return Check(name=name, status="ok", found=f"{constants.ENDPOINT} answers; {token}")


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a traceback, or the signal that ended the process."""
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0:
        return f"crashes (signal {-done.returncode})"
    return lines[-1] if lines else f"exit code {done.returncode}"


def _nvidia_devices() -> int:
    """NVIDIA GPUs that the operating system shows, whatever torch makes of them."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path


def _write(path: Path, data: bytes) -> float:
    """Seconds to write and sync the file, which is then removed."""
    try:
        started = time.monotonic()
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return time.monotonic() - started
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
