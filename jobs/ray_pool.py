"""Spread tasks over Ray actors: plain actors, one task in flight each, replaced when they die.

Ray's own retries are off: a retry against a node that is going down uses up its budget (and so
loses calls), while this loop knows which task was lost and starts a fresh actor. Only task
descriptions and commit records of about a kilobyte pass through Ray.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from pipeline.errors import IncompleteError, PipelineError
from pipeline.manifest import Commit
from pipeline.worker import Task, Worker, WorkerSpec, versions

MAX_DEATHS = 3  # process deaths of one task before it is given up
MAX_ERRORS = 2  # exceptions of one task before it is given up
NO_PROGRESS_SECONDS = 300.0


class WorkerActor:
    """A worker process. The model loads in `load`, whose exceptions arrive with their type."""

    def load(self, spec: WorkerSpec) -> dict[str, str]:
        gpus = ray.get_gpu_ids()
        # Ray narrows CUDA_VISIBLE_DEVICES to the actor's own GPUs, so the first is the right one.
        self.worker = Worker(spec, "cuda:0" if gpus else "cpu")
        return versions()

    def execute(self, task: Task) -> Commit:
        return self.worker.execute(task)


Actor: Any = ray.remote(WorkerActor)


def plan_actors(settings: Any) -> tuple[int, dict[str, float]]:
    """How many actors, and what each asks of Ray. Raises PipelineError if the cluster is short."""
    have = ray.cluster_resources()
    gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 0))
    on_gpu = settings.device == "cuda" or (settings.device == "auto" and gpus > 0)
    if on_gpu and gpus == 0:
        raise PipelineError("--device cuda: this Ray cluster has no GPU")
    most = min(gpus, cpus // settings.threads) if on_gpu else cpus // settings.threads
    wanted = settings.workers or max(1, most)
    if wanted > most:
        raise PipelineError(
            f"--workers {wanted} with --threads {settings.threads}: this Ray cluster has "
            f"{cpus} CPUs and {gpus} GPUs, enough for {most}"
        )
    return wanted, {"num_cpus": settings.threads, "num_gpus": 1.0 if on_gpu else 0.0}


class RayPool:
    """An executor for `pipeline.run.execute`; its actors live from one stage to the next."""

    def __init__(self, spec: WorkerSpec, say: Callable[[str], None]) -> None:
        self._spec = ray.put(spec)
        self._size, self._resources = plan_actors(spec.settings)
        self._say = say
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, Task | None]] = {}  # result -> actor, task (None: load)
        self._deaths: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._load_failures = 0

    def __call__(self, tasks: list[Task]) -> Iterator[Commit]:
        """Yield each task's record as it is committed. Raises IncompleteError for a task that
        keeps failing, PipelineError where a worker cannot start."""
        waiting = deque(tasks)
        unfinished = len(tasks)
        while unfinished:
            self._assign(waiting)
            ready, _ = ray.wait(list(self._running), timeout=NO_PROGRESS_SECONDS)
            if not ready:
                busy = ", ".join(t.name if t else "loading" for _, t in self._running.values())
                self._say(f"no progress for {NO_PROGRESS_SECONDS:.0f} s; at work: {busy}")
            for result in ready:
                commit = self._settle(result, waiting)
                if commit is not None:
                    unfinished -= 1
                    yield commit

    def _assign(self, waiting: deque[Task]) -> None:
        alive = len(self._idle) + len(self._running)
        for _ in range(min(self._size, len(waiting) + len(self._running)) - alive):
            actor = Actor.options(max_restarts=0, max_task_retries=0, **self._resources).remote()
            self._running[actor.load.remote(self._spec)] = (actor, None)
        while self._idle and waiting:
            actor, task = self._idle.pop(), waiting.popleft()
            self._running[actor.execute.remote(task)] = (actor, task)

    def _settle(self, result: Any, waiting: deque[Task]) -> Commit | None:
        """Take one result; a lost task goes back to the front of the queue."""
        actor, task = self._running.pop(result)
        try:
            value = ray.get(result)
        except RayActorError as error:
            ray.kill(actor)
            # A node that is taken away is nobody's fault, and an actor out of reach may be fine.
            blame = isinstance(error, ActorDiedError) and not getattr(error, "preempted", False)
            self._retry(task, waiting, self._deaths, MAX_DEATHS, "worker died", error, blame)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, PipelineError):
                raise error.cause from None
            ray.kill(actor)  # after an unknown exception the process is not to be trusted
            self._retry(task, waiting, self._errors, MAX_ERRORS, "failed", error.cause, True)
            return None
        self._idle.append(actor)
        if task is None and value != versions():
            raise PipelineError(f"a worker runs {value}, the driver {versions()}; make them equal")
        return value if task is not None else None

    def _retry(
        self,
        task: Task | None,
        waiting: deque[Task],
        counts: Counter[str],
        limit: int,
        what: str,
        error: Any,
        blame: bool,
    ) -> None:
        name = task.name if task is not None else "loading the target model"
        counts[name] += blame
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        reason = f"{name}: {what} ({type(error).__name__}: {first_line})"
        if counts[name] >= limit:
            raise IncompleteError(
                f"{reason}, {counts[name]} times; what is committed stays, and the same command "
                "goes on from there"
            )
        self._say(f"{reason}; trying again")
        if task is not None:
            waiting.appendleft(task)
