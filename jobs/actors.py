"""What runs in an actor's process."""

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from pipeline.manifest import Commit
from pipeline.tasks import Unit
from pipeline.versions import versions

if TYPE_CHECKING:
    from pipeline.forecast import Probe
    from pipeline.worker import WorkerSpec


class Loaded(NamedTuple):
    """What an actor says when it is ready; where: its process and machine, for people."""

    versions: dict[str, str]
    node_id: str
    where: str

    @classmethod
    def here(cls) -> "Loaded":
        node_id = ray.get_runtime_context().get_node_id()
        return cls(versions(), node_id, f"process {os.getpid()} on {os.uname().nodename}")


class WorkerActor:
    """A worker process. The model loads in `load`, whose exceptions arrive with their type."""

    def load(self, spec: "WorkerSpec") -> Loaded:
        from pipeline.worker import Worker  # torch and all, which a simulated run goes without

        gpus = ray.get_gpu_ids()
        # Ray narrows CUDA_VISIBLE_DEVICES to the actor's own GPUs, so the first is the right one.
        self.worker = Worker(spec, "cuda:0" if gpus else "cpu")
        return Loaded.here()

    def execute(self, unit: Unit) -> Commit | None:
        return self.worker.execute(unit)

    def probe(self, rows: list[dict[str, Any]]) -> "Probe":
        """See `pipeline.worker.Worker.probe`."""
        return self.worker.probe(rows)
