"""Spread units of work over Ray actors: plain actors, one unit in flight each, replaced when dead.

Ray's own retries are off: a retry against a node that is going down uses up its budget (and so
loses calls), while this loop knows which unit was lost and starts a fresh actor. Only task
descriptions and commit records of about a kilobyte pass through Ray.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayError, RayTaskError

from jobs.actors import Loaded, WorkerActor
from pipeline.errors import IncompleteError, PipelineError, StorageError
from pipeline.manifest import Commit
from pipeline.settings import Settings
from pipeline.task_queue import Failure, TaskQueue
from pipeline.tasks import Task, Unit
from pipeline.versions import versions

WAITING_EVERY = 60.0  # seconds between lines while no node is there
POLL_SECONDS = 5.0  # how often to look for new nodes and stuck workers
MAX_LOAD_FAILURES = 3  # of workers that died while loading, in a row
MAX_STORAGE_FAILURES = 3  # in a row; the storage's client has tried many times by then


@dataclass
class _Running:
    """A call in flight; unit: None while the actor loads."""

    actor: Any
    unit: Unit | None
    started: float = field(default_factory=time.monotonic)
    reported: float = 0.0

    @property
    def name(self) -> str:
        return self.unit.name if self.unit is not None else "starting a worker"


def plan_actors(settings: Settings) -> tuple[int, dict[str, float]]:
    """How many actors, and what each asks of Ray. Raises PipelineError if the cluster is short."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    cpus = int(sum(node.get("CPU", 0) for node in nodes))
    each = settings.gpus_per_worker
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and gpus > 0)
    if on_gpu and gpus == 0:
        raise PipelineError("--device cuda: this Ray cluster has no GPU")
    # An actor lives on one node, so what counts is what each node holds.
    most = sum(int(node.get("CPU", 0)) // settings.threads for node in nodes)
    if on_gpu:
        most = sum(
            min(int(node.get("GPU", 0)) // each, int(node.get("CPU", 0)) // settings.threads)
            for node in nodes
        )
    wanted = settings.workers or max(1, min(most, settings.autoscale or most))
    if wanted > most:
        gpu = f", --gpus-per-worker {each}" if on_gpu else ""
        raise PipelineError(
            f"--workers {wanted} with --threads {settings.threads}{gpu}: this Ray cluster has "
            f"{cpus} CPUs and {gpus} GPUs on {len(nodes)} node(s), enough for {most}"
        )
    return wanted, {"num_cpus": settings.threads, "num_gpus": float(each) if on_gpu else 0.0}


def request_nodes(settings: Settings, say: Callable[[str], None]) -> None:
    """With --autoscale: ask for the nodes of that many workers, and wait until one can start.

    The request stands until `release_nodes`: what is reclaimed in the meantime is replaced.
    """
    if not settings.autoscale:
        return
    one = {"CPU": settings.threads}
    if settings.device == "cuda":
        one["GPU"] = settings.gpus_per_worker
    request_resources(bundles=[one] * settings.autoscale)
    told = -WAITING_EVERY
    while True:
        try:
            plan_actors(settings)
            return
        except PipelineError:
            now = time.monotonic()
            if now - told >= WAITING_EVERY:
                told = now
                say(f"--autoscale {settings.autoscale}: waiting for the first node")
        time.sleep(POLL_SECONDS)


def release_nodes(settings: Settings) -> None:
    """Take back what `request_nodes` asked for, so that idle nodes go."""
    if settings.autoscale and ray.is_initialized():
        request_resources(bundles=[])


class RayPool:
    """An executor for `pipeline.run.execute`; its actors live from one stage to the next.

    With --workers 0 the pool follows the cluster: nodes that join get workers, and what ran on
    nodes that leave runs elsewhere.
    """

    def __init__(
        self,
        spec: Any,
        settings: Settings,
        say: Callable[[str], None],
        actor_class: type = WorkerActor,
    ) -> None:
        """spec: what `actor_class.load` takes; say: told of every fault, in a line."""
        request_nodes(settings, say)
        self._spec = ray.put(spec)
        self._settings = settings
        self.size, self._resources = plan_actors(settings)
        self._say = say
        self._actor: Any = ray.remote(actor_class)
        self._idle: list[Any] = []
        self._running: dict[Any, _Running] = {}  # by the result they will give
        self._homes: dict[Any, Loaded] = {}
        self._load_failures = 0
        self._storage_failures = 0
        self._polled = time.monotonic()

    def __call__(self, tasks: list[Task]) -> Iterator[Commit]:
        """Yield each task's record as it is committed.

        Raises IncompleteError for tasks that keep failing, once all others are done, and
        PipelineError where a worker cannot start.
        """
        queue = TaskQueue(tasks, self._say)
        while not queue.done:
            self._assign(queue)
            ready, _ = ray.wait(list(self._running), timeout=POLL_SECONDS)
            for result in ready:
                commit = self._settle(result, queue)
                if commit is not None:
                    yield commit
            if time.monotonic() - self._polled >= POLL_SECONDS:
                self._polled = time.monotonic()
                self._report_stuck()
                self._follow_cluster()
        queue.check()

    def probe(self, rows: list[dict[str, Any]]) -> Any:
        """`Worker.probe` on one fresh actor. Raises PipelineError if it cannot."""
        actor = self._start()
        try:
            ray.get(actor.load.remote(self._spec))
            return ray.get(actor.probe.remote(rows))
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, PipelineError):
                raise cause from None
            raise PipelineError(
                f"the rows tried could not be done ({type(cause).__name__}: {_first_words(cause)})"
            ) from error
        finally:
            ray.kill(actor)

    def _start(self) -> Any:
        options = {"max_restarts": 0, "max_task_retries": 0, **self._resources}
        return self._actor.options(**options).remote()

    def _assign(self, queue: TaskQueue) -> None:
        at_work = sum(running.unit is not None for running in self._running.values())
        alive = len(self._idle) + len(self._running)
        for _ in range(min(self.size, queue.waiting + at_work) - alive):
            actor = self._start()
            self._running[actor.load.remote(self._spec)] = _Running(actor, None)
        while self._idle and queue.waiting:
            actor, unit = self._idle.pop(), queue.next()
            self._running[actor.execute.remote(unit)] = _Running(actor, unit)

    def _settle(self, result: Any, queue: TaskQueue) -> Commit | None:
        """Take one result, or tell the queue what happened to the unit instead."""
        running = self._running.pop(result)
        try:
            value = ray.get(result)
        except RayTaskError as error:
            self._raised(running, queue, error.cause)
            return None
        except RayError as error:
            ray.kill(running.actor)
            words = f"worker died ({type(error).__name__}: {_first_words(error)})"
            self._failed(running, queue, Failure(self._blame(error, running), words))
            return None
        self._idle.append(running.actor)
        if running.unit is None:
            self._loaded(running.actor, value)
            return None
        self._storage_failures = 0
        queue.finished(running.unit)
        commit: Commit | None = value
        return commit

    def _loaded(self, actor: Any, said: Loaded) -> None:
        self._load_failures = 0
        self._homes[actor] = said
        if said.versions != versions():
            raise PipelineError(
                f"a worker on {said.where} runs {said.versions}, the driver {versions()}; "
                "make them equal"
            )

    def _raised(self, running: _Running, queue: TaskQueue, cause: Any) -> None:
        """An exception in a worker: the user's to mend, the storage's, or the unit's."""
        if isinstance(cause, PipelineError) and not isinstance(cause, StorageError):
            raise cause from None
        ray.kill(running.actor)  # after an unknown exception the process is not to be trusted
        words = f"{type(cause).__name__}: {_first_words(cause)}"
        if isinstance(cause, StorageError) and running.unit is not None:
            self._storage_failures += 1
            if self._storage_failures >= MAX_STORAGE_FAILURES:
                raise cause from None
            self._failed(running, queue, Failure("lost", words))
            return
        self._failed(running, queue, Failure("raised", words))

    def _failed(self, running: _Running, queue: TaskQueue, failure: Failure) -> None:
        if running.unit is not None:
            queue.failed(running.unit, failure)
            return
        self._say(f"{running.name}: {failure.detail}")
        self._load_failures += failure.kind != "lost"
        if self._load_failures >= MAX_LOAD_FAILURES:
            raise IncompleteError(
                f"{MAX_LOAD_FAILURES} workers in a row failed while loading the target model, "
                f"last: {failure.detail}"
            )

    def _blame(self, error: RayError, running: _Running) -> Literal["died", "lost"]:
        """Whether a lost unit may be the cause: not if its node went away or was taken."""
        if isinstance(error, OutOfMemoryError):
            return "died"
        if not isinstance(error, ActorDiedError) or error.preempted:
            return "lost"
        home = self._homes.get(running.actor)
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return "lost" if home is not None and home.node_id not in alive else "died"

    def _report_stuck(self) -> None:
        limit = self._settings.no_progress_timeout
        now = time.monotonic()
        for running in self._running.values():
            if now - max(running.started, running.reported) >= limit:
                running.reported = now
                home = self._homes.get(running.actor)
                where = f" in {home.where}" if home is not None else " (waiting for a node?)"
                self._say(f"no progress for {now - running.started:.0f} s: {running.name}{where}")

    def _follow_cluster(self) -> None:
        """With --workers 0, as many workers as the cluster now holds; with none left, wait."""
        if self._settings.workers:
            return
        try:
            self.size = plan_actors(self._settings)[0]
        except PipelineError as error:
            self._say(f"{error}; waiting for nodes")


def _first_words(error: Any) -> str:
    """The line that says most of Ray's long messages: the last of a death, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return (lines[-1] if isinstance(error, RayError) else lines[0])[:300]
