"""Scheduling on a cluster of three nodes with logical GPUs; actors publish, but load no model."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PipelineError
from pipeline.manifest import Commit, RunFolder
from pipeline.settings import Settings

ray = pytest.importorskip("ray", reason="Ray tests: pip install 'drafter-features[ray]'")

from jobs import ray_pool  # noqa: E402
from jobs.ray_pool import RayPool, plan_actors  # noqa: E402
from jobs.simulate_run import SimulatedActor, simulated_tasks  # noqa: E402

ROOT = Path(__file__).parent.parent
NODE = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 * 2**20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without CPUs and two nodes of two CPUs and two logical GPUs each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(ray_pool, "POLL_SECONDS", 0.5)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**NODE)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ray.init(
        address=cluster.address,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class GpuActor(SimulatedActor):
    """Writes down which GPUs it was given, and where."""

    def load(self, spec: Any) -> Any:
        said = super().load(spec)
        gpus = ",".join(sorted(str(i) for i in ray.get_gpu_ids()))
        (Path(spec[0]) / f"{said.node_id}.{os.getpid()}.gpus").write_text(gpus)
        return said


def settings(out: Path, **changes: Any) -> Settings:
    return Settings.check(target="-", prompts="-", out=str(out), **changes)


def run_all(pool: RayPool, count: int) -> list[Commit]:
    return list(pool(list(simulated_tasks(count))))


def pool_of(out: Path, seconds: float, lines: list[str], **changes: Any) -> RayPool:
    out.mkdir(exist_ok=True)
    return RayPool((str(out), seconds, 0.0), settings(out, **changes), lines.append, GpuActor)


def gpus_seen(out: Path) -> dict[str, list[str]]:
    """Node id -> the GPUs of each actor that lived there."""
    seen: dict[str, list[str]] = {}
    for path in sorted(out.glob("*.gpus")):
        seen.setdefault(path.name.split(".")[0], []).append(path.read_text())
    return {node: sorted(gpus) for node, gpus in seen.items()}


def test_one_gpu_or_several_for_each_worker(cluster: Any, tmp_path: Path) -> None:
    """Asked for more than a node has, it says so instead of waiting."""
    lines: list[str] = []
    pool = pool_of(tmp_path / "one", 0.2, lines)
    assert pool.size == 4
    assert len(run_all(pool, 12)) == 12
    assert list(gpus_seen(tmp_path / "one").values()) == [["0", "1"], ["0", "1"]]
    del pool
    pool = pool_of(tmp_path / "two", 0.2, lines, gpus_per_worker=2)
    assert pool.size == 2
    assert len(run_all(pool, 4)) == 4
    assert list(gpus_seen(tmp_path / "two").values()) == [["0,1"], ["0,1"]]
    with pytest.raises(PipelineError, match=r"4 GPUs on 3 node\(s\), enough for 0"):
        plan_actors(settings(tmp_path, gpus_per_worker=3))
    with pytest.raises(PipelineError, match="--workers 5 with --threads 1, --gpus-per-worker 1"):
        plan_actors(settings(tmp_path, workers=5))


@pytest.mark.slow
def test_nodes_that_die_and_join_while_a_run_goes_on(cluster: Any, tmp_path: Path) -> None:
    """A lost node costs no attempt; a new one gets workers; every shard exactly once.

    There is work for a while: on a busy machine the workers of a joined node start late.
    """
    lines: list[str] = []
    out = tmp_path / "out"
    pool = pool_of(out, 0.15, lines)
    lost = cluster.list_all_nodes()[-1]
    commits: list[Commit] = []
    for commit in pool(list(simulated_tasks(300))):
        commits.append(commit)
        if len(commits) == 10:
            cluster.remove_node(lost, allow_graceful=False)
        if len(commits) == 20:
            cluster.add_node(**NODE)
    assert sorted(c.name for c in commits) == [f"train-{i:05d}" for i in range(300)]
    assert sorted(RunFolder(out).read_commits()) == sorted(c.name for c in commits)
    assert all(commit.attempt == 1 for commit in commits), lines
    assert any("worker died" in line for line in lines)
    assert len(gpus_seen(out)) == 3  # nodes, the joined one included


def test_a_preempted_node_is_no_attempt(cluster: Any, tmp_path: Path) -> None:
    """Drained as a cloud takes a spot machine away, then gone."""
    lines: list[str] = []
    pool = pool_of(tmp_path / "out", 0.15, lines)
    taken = cluster.list_all_nodes()[-1]
    ray_program = str(Path(sys.executable).parent / "ray")
    drain = [ray_program, "drain-node", "--address", cluster.address]
    drain += ["--node-id", taken.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    drain += ["--reason-message", "spot", "--deadline-remaining-seconds", "1"]

    def take() -> None:
        subprocess.run(drain, check=True, capture_output=True)
        time.sleep(1)
        cluster.remove_node(taken, allow_graceful=False)

    taker = threading.Thread(target=take)
    commits: list[Commit] = []
    for commit in pool(list(simulated_tasks(100))):
        commits.append(commit)
        if len(commits) == 5:
            taker.start()
    taker.join()
    assert len({c.name for c in commits}) == 100
    assert all(commit.attempt == 1 for commit in commits), lines
