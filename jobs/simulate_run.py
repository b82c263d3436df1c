"""Try out the scheduling of a huge run without a model: many shards, many workers, random deaths.

python jobs/simulate_run.py --shards 10000 --workers 64 --deaths 0.005

Real Ray actors publish real (tiny) files with real records; what is left out is the work.
"""

import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

ROOT = str(Path(__file__).resolve().parent.parent)  # of the packages `pipeline` and `jobs`
sys.path.insert(0, ROOT)

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import typer

from jobs.actors import Loaded
from jobs.ray_pool import RayPool
from pipeline.errors import exit_on_error
from pipeline.manifest import Commit, RunFolder, make_commit
from pipeline.settings import Settings
from pipeline.shards import ids_sha256
from pipeline.tasks import RowRange, ShardTask, Unit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FINGERPRINT = "0" * 64


class SimulatedActor:
    """Publishes a tiny file for each task, or dies; works `seconds` at each."""

    def load(self, spec: tuple[str, float, float]) -> Loaded:
        out, self.seconds, self.deaths = spec
        self.folder = RunFolder(out)
        self.random = random.Random(os.urandom(8))
        return Loaded.here()

    def execute(self, unit: Unit) -> Commit | None:
        time.sleep(self.seconds)
        dies = self.random.random() < self.deaths
        if dies and self.random.random() < 0.5:
            os._exit(1)
        assert isinstance(unit, ShardTask)
        staged = self.folder.stage(unit.name)
        pq.write_table(pa.table({"name": [unit.name]}), staged)
        commit = make_commit(
            staged,
            folder="data",
            stem=unit.name,
            name=unit.name,
            kind="shard",
            rows=unit.rows,
            tokens=0,
            supervised_tokens=0,
            ids_sha256=ids_sha256([unit.name]),
            inputs_sha256=unit.inputs_sha256,
            attempt=unit.attempt,
            fingerprint=FINGERPRINT,
            seconds=self.seconds,
        )
        commit = self.folder.publish(staged, commit)
        if dies:
            os._exit(1)  # after the work: the task is done twice, its record stands once
        return commit


def simulated_tasks(count: int) -> list[ShardTask]:
    """`count` shards of ten rows each."""
    ranges = (RowRange("rollouts/none.parquet", 0, 10),)
    return [ShardTask(index=i, total=count, ranges=ranges) for i in range(count)]


def driver_memory() -> float:
    """This process's peak so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


@app.command()
def main(
    shards: Annotated[int, typer.Option(min=1, help="How many.")] = 10_000,
    workers: Annotated[int, typer.Option(min=1, help="Actors at once.")] = 64,
    deaths: Annotated[float, typer.Option(help="Chance that a worker dies at a shard.")] = 0.005,
    seconds: Annotated[float, typer.Option(help="Pretended work of a shard.")] = 0.1,
) -> None:
    """Simulate a run and say what scheduling it cost."""
    with exit_on_error(), tempfile.TemporaryDirectory(prefix="simulated-") as out:
        ray.init(
            address="local",
            num_cpus=workers,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
        )
        settings = Settings.check(target="-", prompts="-", out=out, workers=workers)
        died: list[str] = []
        pool = RayPool((out, seconds, deaths), settings, died.append, SimulatedActor)
        started, found, memory = time.monotonic(), [], []
        for commit in pool(list(simulated_tasks(shards))):
            found.append(commit.name)
            if len(found) % max(1, shards // 10) == 0:
                elapsed = time.monotonic() - started
                memory.append(driver_memory())
                print(f"{len(found):,} shards, {elapsed:.0f} s, driver {memory[-1]:.0f} MB")
        elapsed = time.monotonic() - started
        folder = RunFolder(out)
        named = sorted(name.rsplit("-", 1)[0] for name in folder.storage.list("data"))
        exactly_once = sorted(found) == sorted(folder.read_commits()) == named
        ray.shutdown()
    print(
        f"{shards:,} shards on {workers} workers, {len(died)} deaths, {elapsed:.0f} s: "
        f"{elapsed / shards * 1000:.1f} ms a shard; driver memory {memory[0]:.0f} MB after the "
        f"first tenth, {memory[-1]:.0f} MB at the end; every shard exactly once: {exactly_once}"
    )
    if not exactly_once:
        sys.exit(1)


if __name__ == "__main__":
    app()
