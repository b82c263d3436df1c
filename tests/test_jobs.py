"""The Ray job: real Ray, real actors, real `ray job submit`."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_files import data_files, settings_of

from pipeline.errors import IncompleteError, PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings

ray = pytest.importorskip("ray", reason="Ray tests: pip install 'drafter-features[ray]'")

ROOT = Path(__file__).parent.parent
JOB = ROOT / "jobs" / "extract_mtp.py"
# Loopback only; see README for clusters with token authentication.
# The head's PATH is where a submitted job finds `python`: an activated environment sets it.
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_DEDUP_LOGS": "0",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}
CPUS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        address="local",
        num_cpus=CPUS,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()


def run_pool(settings: Settings, lines: list[str] | None = None) -> dict[str, Any]:
    from jobs.ray_pool import RayPool

    said = lines if lines is not None else []
    return execute(settings, lambda run: RayPool(run.spec, run.settings, said.append))


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_actors_gives_identical_files(
    workers: int, cluster: None, tiny_run: Path, tmp_path: Path
) -> None:
    """And the same as one process without Ray."""
    run_pool(settings_of(tiny_run, out=str(tmp_path / "out"), workers=workers))
    assert data_files(tmp_path / "out") == data_files(tiny_run)


def kill_first(title: str, killed: list[int]) -> None:
    """SIGKILL the first process whose title starts so, as soon as it appears."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not killed:
        for process in psutil.Process().children(recursive=True):
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if command and command[0].startswith(title):
                process.kill()
                killed.append(process.pid)
                return
        time.sleep(0.002)


def test_a_killed_actor_changes_nothing(cluster: None, tiny_run: Path, tmp_path: Path) -> None:
    killed: list[int] = []
    lines: list[str] = []
    killer = threading.Thread(target=kill_first, args=("ray::WorkerActor.execute", killed))
    killer.start()
    run_pool(settings_of(tiny_run, out=str(tmp_path / "out"), workers=2), lines)
    killer.join()
    assert killed and any("worker died (ActorDiedError" in line for line in lines)
    assert data_files(tmp_path / "out") == data_files(tiny_run)


def test_an_input_that_cannot_be_read_ends_the_run_as_resumable(
    cluster: None, tiny_run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    lines: list[str] = []

    def sabotage(line: str) -> None:
        lines.append(line)

    from jobs.ray_pool import RayPool

    def make(run: Any) -> Any:
        pool = RayPool(run.spec, run.settings, sabotage)
        plan_file = out / "plan" / "part-00001.parquet"
        plan_file.rename(plan_file.with_suffix(".gone"))
        return pool

    with pytest.raises(IncompleteError, match=r"plan/part-00001.parquet: cannot be read"):
        execute(settings_of(tiny_run, out=str(out)), make)
    assert sum(line.startswith("rollout-00001: StorageError") for line in lines) in (2, 3)
    (out / "plan" / "part-00001.gone").rename(out / "plan" / "part-00001.parquet")
    run_pool(settings_of(tiny_run, out=str(out)))
    assert data_files(out) == data_files(tiny_run)


def test_more_workers_than_the_cluster_holds_are_refused(
    cluster: None, tiny_run: Path, tmp_path: Path
) -> None:
    changes = {"out": str(tmp_path / "out"), "workers": 2, "threads": 2}
    with pytest.raises(
        PipelineError, match=f"has {CPUS} CPUs and 0 GPUs on 1 node.s., enough for 1"
    ):
        run_pool(settings_of(tiny_run, **changes))
    with pytest.raises(PipelineError, match="this Ray cluster has no GPU"):
        run_pool(settings_of(tiny_run, out=str(tmp_path / "gpu"), device="cuda"))


def arguments(settings: Settings, **changes: Any) -> list[str]:
    """As words of a command line; two of the nine rows are rejected, which is fine here."""
    values = {**settings.model_dump(exclude_none=True), "max_reject_fraction": 0.5, **changes}
    words: list[str] = []
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words += [option] * value
        elif isinstance(value, list):
            words += [word for part in value for word in (option, str(part))]
        else:
            words += [option, str(value)]
    return words


def test_the_job_as_a_plain_program(tiny_run: Path, tmp_path: Path) -> None:
    """From another directory, with a relative --out, as a user would."""
    settings = settings_of(tiny_run, out="out", workers=1)
    command = [sys.executable, str(JOB), *arguments(settings)]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "9 rows in = 7 out + 2 rejected (1 bad_json, 1 empty_conversation" in done.stdout
    assert "rollouts: 2/2 parts, 7 rows" in done.stderr
    assert data_files(tmp_path / "out") == data_files(tiny_run)


def test_too_many_rejects_are_exit_code_1_and_a_forecast_writes_nothing(
    tiny_run: Path, tmp_path: Path
) -> None:
    settings = settings_of(tiny_run, out=str(tmp_path / "out"), workers=1)
    done = run_job(arguments(settings, max_reject_fraction=0.1, dry_run=True))
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()
    assert "7 rows (2 rejected): " in done.stdout
    assert "with 1 workers" in done.stdout and "bytes a token" in done.stdout
    done = run_job(arguments(settings, max_reject_fraction=0.1))
    assert done.returncode == 1
    assert "22.2% of the rows were rejected and --max-reject-fraction is 10.0%" in done.stderr
    assert data_files(tmp_path / "out") == data_files(tiny_run)


def run_job(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(JOB), *words]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    "by", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_an_interrupted_job_says_how_to_go_on_and_does(
    by: signal.Signals, tiny_run: Path, tmp_path: Path
) -> None:
    """Ctrl-C, and SIGTERM as `ray job stop` sends it."""
    out = tmp_path / "out"
    settings = settings_of(tiny_run, out=str(out), workers=1, rollout_rows=1, max_new_tokens=400)
    command = [sys.executable, str(JOB), *arguments(settings)]
    job = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("commits/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    job.send_signal(by)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert "interrupted; what is committed stays. To go on:" in said
    again = shlex.split(said.splitlines()[-1])
    assert again == command
    done = len(list(out.glob("commits/*")))
    assert 1 <= done < 9
    assert subprocess.run(again, env=ENVIRONMENT, timeout=240).returncode == 0
    clean = tmp_path / "clean"
    execute(settings.model_copy(update={"out": str(clean)}), LocalWorker)
    assert data_files(out) == data_files(clean)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("target", "nowhere", "error: --target nowhere: not a .gguf file"),
        ("prompts", "nowhere.jsonl", "nowhere.jsonl"),
        ("top_p", 2, "error: --top-p:"),
    ],
)
def test_bad_options_end_with_one_line_and_code_2(
    option: str, value: Any, message: str, tiny_run: Path, tmp_path: Path
) -> None:
    words = arguments(settings_of(tiny_run, out=str(tmp_path / "out")), **{option: value})
    done = subprocess.run(
        [sys.executable, str(JOB), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def ray_dir() -> Iterator[Path]:
    """A temporary directory of the cluster's own, short enough for the paths of its sockets.

    A submitted job joins the cluster that last started in its cluster's directory, so in a shared
    one the job lands in whatever cluster another test has started meanwhile.
    """
    path = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    yield Path(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def head(ray_dir: Path) -> Iterator[str]:
    """A cluster as `ray start --head` makes it, stopped alone: `ray stop` would take all."""
    port, dashboard = free_port(), free_port()
    ray_program = str(Path(sys.executable).parent / "ray")
    options = [
        f"--temp-dir={ray_dir}",
        f"--port={port}",
        f"--dashboard-port={dashboard}",
        # The job agent's default port is fixed, and the cluster of the tests above holds it.
        f"--dashboard-agent-listen-port={free_port()}",
        "--num-cpus=2",
        f"--ray-client-server-port={free_port()}",
        "--object-store-memory=104857600",
        "--disable-usage-stats",
    ]
    process = subprocess.Popen(
        [ray_program, "start", "--head", "--block", *options],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{dashboard}"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "ray start ended at once"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", dashboard)) == 0:
                break
        time.sleep(0.2)
    yield address
    for child in [*psutil.Process(process.pid).children(recursive=True), process]:
        child.kill()
    process.wait(timeout=60)


def submit(address: str, job_arguments: list[str], working_dir: Path) -> Any:
    ray_program = str(Path(sys.executable).parent / "ray")
    command = [ray_program, "job", "submit", "--address", address]
    command += ["--working-dir", str(working_dir), "--", "python", "jobs/extract_mtp.py"]
    for _ in range(30):
        done = subprocess.run(
            [*command, *job_arguments],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=280,
        )
        if "No available agent" not in done.stderr:
            break
        time.sleep(1)  # the dashboard answers before the node's job agent has reported to it
    return done


def test_ray_job_submit(head: str, ray_dir: Path, tiny_run: Path, tmp_path: Path) -> None:
    """From a checkout in which somebody left a model of 150 MB (F10: the limit is 100 MiB)."""
    checkout = tmp_path / "checkout"
    for name in ("pipeline", "jobs", "schemas"):
        shutil.copytree(ROOT / name, checkout / name)
    shutil.copy(ROOT / ".rayignore", checkout)
    (checkout / "model-Q4_K_M.gguf").write_bytes(os.urandom(150_000_000))
    done = submit(head, arguments(settings_of(tiny_run, out=str(tmp_path / "out"))), checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert data_files(tmp_path / "out") == data_files(tiny_run)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["complete"] is True
    uploads = ray_dir.glob("session_latest/runtime_resources/working_dir_files/_ray_pkg_*")
    (upload,) = (path for path in uploads if path.is_dir())
    assert (upload / "pipeline/data/gemma4-nano/model.safetensors").is_file()
    assert not list(upload.glob("*.gguf"))
    relative = submit(head, arguments(settings_of(tiny_run, out="lost")), checkout)
    assert relative.returncode == 1  # Ray's own code for any failure
    assert "error: --out lost: must be absolute or a URL under `ray job submit`" in relative.stdout


def test_the_package_itself_never_imports_ray() -> None:
    for path in (ROOT / "pipeline").rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not [ln for ln in lines if ln.strip().startswith(("import ray", "from ray"))], path
