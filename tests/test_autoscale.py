"""--autoscale with Ray's own autoscaler, whose fake provider starts nodes as processes here."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings

ray = pytest.importorskip("ray", reason="Ray tests: pip install 'drafter-features[ray]'")

from jobs import ray_pool  # noqa: E402
from jobs.ray_pool import RayPool, plan_actors, release_nodes  # noqa: E402
from jobs.simulate_run import SimulatedActor, simulated_tasks  # noqa: E402

ROOT = Path(__file__).parent.parent
CONFIG: dict[str, Any] = {
    "cluster_name": "fake",
    "max_workers": 3,
    "idle_timeout_minutes": 0.05,
    "upscaling_speed": 10,
    "provider": {"type": "fake_multinode", "disable_node_updaters": True},
    "auth": {},
    "docker": {},
    "head_node_type": "ray.head.default",  # the fake provider knows it by this name
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "gpu": {
            "resources": {"CPU": 2, "GPU": 1, "object_store_memory": 100 * 2**20},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    },
    "file_mounts": {},
    "cluster_synced_files": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}


def settings(out: Path, **changes: object) -> Settings:
    values = {"target": "-", "prompts": "-", "out": str(out), "device": "cuda", **changes}
    return Settings.check(**values)


def requested(address: str, bundles: int) -> bool:
    """Whether `ray status` comes to say that so many bundles are asked of the autoscaler."""
    status = [str(Path(sys.executable).parent / "ray"), "status", "--address", address]
    for _ in range(10):
        shown = subprocess.run(status, capture_output=True, text=True, check=True).stdout
        said = shown.split("From request_resources:\n")[1].split("\n")[0].strip()
        found = re.fullmatch(r"{.*}: (\d+) from request_resources\(\)", said)
        if said == "(none)" if bundles == 0 else found and int(found[1]) == bundles:
            return True
        time.sleep(1)
    print(shown)
    return False


@pytest.fixture
def autoscaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of a head and no node yet, with this process connected to it."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_pool, "POLL_SECONDS", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"{ray.util.get_node_ip_address()}:{port}"
    provider = {**CONFIG["provider"], "gcs_address": address}
    config = tmp_path / "cluster.json"
    config.write_text(json.dumps({**CONFIG, "provider": provider}))
    command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"]
    command += [f"--port={port}", f"--autoscaling-config={config}", "--num-cpus=0"]
    command += ["--disable-usage-stats", "--include-dashboard=false", "--num-gpus=0"]
    command += ["--object-store-memory=100000000"]
    env = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    head = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path}},
        )
        yield address
    finally:
        ray.shutdown()
        head.terminate()
        head.wait(timeout=60)


@pytest.mark.slow
def test_nodes_come_when_asked_for(autoscaling: str, tmp_path: Path) -> None:
    """From no GPU at all to three workers; afterwards nothing is asked for any more."""
    lines: list[str] = []
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(PipelineError, match="has no GPU"):
        plan_actors(settings(out))
    asked = settings(out, autoscale=3)
    pool = RayPool((str(out), 1.0, 0.0), asked, lines.append, SimulatedActor)
    assert lines[0] == "--autoscale 3: waiting for the first node"
    assert pool.size >= 1
    commits = list(pool(list(simulated_tasks(60))))
    assert sorted(c.name for c in commits) == [f"train-{i:05d}" for i in range(60)]
    assert pool.size == 3
    assert requested(autoscaling, 3)
    release_nodes(asked)
    assert requested(autoscaling, 0)


def test_what_autoscale_needs_is_said_before_anything_runs(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for changes, said in (
        ({"device": "auto"}, "--autoscale: .* pass --device cuda or --device cpu"),
        ({"workers": 2}, "--workers and --autoscale are both given"),
    ):
        with pytest.raises(PipelineError, match=said):
            execute(settings(out, autoscale=2, **changes), LocalWorker)
