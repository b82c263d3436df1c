"""A run from settings to finished folder; who executes the tasks is the caller's business.

`start` plans, `run.rollout_tasks` and `run.shard_tasks` say what is left to do, a `Worker` does
one task, and `run.finish` writes what ties the folder together. jobs/extract_mtp.py spreads the
tasks over Ray actors; `run_here` executes them in this process.
"""

import dataclasses
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.card import dataset_card
from pipeline.chat import ChatRenderer
from pipeline.errors import IncompleteError, PipelineError
from pipeline.extract import ShardTask
from pipeline.gguf import read_gguf
from pipeline.manifest import MANIFEST_VERSION, Commit, Reject, RunFolder
from pipeline.models.load import (
    choose_backend,
    find_target,
    load_eos_ids,
    load_geometry,
    load_tokenizer,
)
from pipeline.plan import Plan, fingerprint_fields, make_plan, plan_shards
from pipeline.progress import RunProgress
from pipeline.rollout import RolloutTask, longest_row, sampling_of
from pipeline.settings import Settings
from pipeline.summary import describe
from pipeline.worker import Task, Worker, WorkerSpec, rollout_layout, versions

# Takes tasks, yields each one's record as it is committed, in any order.
Executor = Callable[[list[Task]], Iterator[Commit]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run."""

    spec: WorkerSpec
    folder: RunFolder
    plan: Plan
    target: Mapping[str, Any]  # what the manifest says of its file

    @property
    def settings(self) -> Settings:
        return self.spec.settings

    def rollout_tasks(self) -> list[Task]:
        done = self.folder.read_commits()
        tasks = [RolloutTask(index=i) for i in range(len(self.plan.parts))]
        return [task for task in tasks if task.name not in done]

    def shard_tasks(self) -> list[Task]:
        """Call once all rollout tasks are done."""
        done = self.folder.read_commits()
        return [task for task in self.all_shards() if task.name not in done]

    def all_shards(self) -> list[ShardTask]:
        return plan_shards(
            self._commits("rollout"),
            folder=self.folder,
            rollout_layout=rollout_layout(),
            bytes_per_token=self.spec.layout.bytes_per_token,
            shard_bytes=self.settings.shard_mb * 10**6,
        )

    def _commits(self, kind: str) -> list[Commit]:
        commits = self.folder.read_commits().values()
        return sorted((c for c in commits if c.kind == kind), key=lambda c: c.name)

    def write_card(self) -> None:
        """The dataset card, listing exactly the shards that are committed."""
        card = dataset_card(
            self.spec.layout, self._commits("shard"), self._commits("rollout"), self.target["name"]
        )
        self.folder.write_text("README.md", card)

    def write_manifest(self, *, complete: bool) -> dict[str, Any]:
        """Write manifest.json and rejects.jsonl from plan and records, and return the manifest.

        Raises PipelineError if complete and rows in is not rows out plus rows rejected.
        """
        shards, rollouts = self._commits("shard"), self._commits("rollout")
        rejects = [*self.plan.rejects, *(r for c in rollouts + shards for r in c.rejects)]
        rows_in = self.plan.rows + len(self.plan.rejects)
        rows_out = sum(c.rows for c in shards)
        if complete and rows_in != rows_out + len(rejects):
            raise PipelineError(
                f"{self.folder.out}: {rows_in} rows in, but {rows_out} out and "
                f"{len(rejects)} rejected; please report this"
            )
        manifest = {
            "manifest_version": MANIFEST_VERSION,
            "complete": complete,
            "fingerprint": self.plan.fingerprint,
            "fingerprint_fields": self.plan.fields,
            "target": dict(self.target),
            "generated_by": None if self.settings.turns == "given" else self.spec.backend,
            "scored_by": self.spec.backend,
            "settings": self.settings.model_dump(exclude={"out"}),
            "sampling": dataclasses.asdict(sampling_of(self.settings)),
            "versions": versions(),
            "geometry": self.spec.geometry.as_dict(),
            "semantics": SEMANTICS,
            "bytes_per_token": self.spec.layout.bytes_per_token,
            "rows_in": rows_in,
            "rows_out": rows_out,
            "rejected": _count(rejects),
            "tokens": sum(c.tokens for c in shards),
            "shards": [c.model_dump(mode="json", exclude={"rejects"}) for c in shards],
            "rollouts": [c.model_dump(mode="json", exclude={"rejects"}) for c in rollouts],
        }
        lines = "".join(reject.model_dump_json() + "\n" for reject in rejects)
        self.folder.write_text("rejects.jsonl", lines)
        self.folder.write_json("manifest.json", manifest)
        return manifest


# What the columns mean beyond their schema (DESIGN §3), for programs.
SEMANTICS = {
    "final_hidden": "after the final norm",
    "layer_index": "0-based decoder block",
    "key": "after k_norm and RoPE at position_offset + t",
    "value": "after v_norm",
    "teacher_row": "row t is the distribution of token t+1, temperature 1, after the soft-cap",
    "target": "[t, k-1] is token t+k",
    "pairing": "at last known token n: embed(x_n) with final_hidden[n-1], KV rows [:n]",
    "draft_position": "position_offset + n for every depth",
}


def start(settings: Settings, *, folder: RunFolder) -> Run:
    """Plan a run, or pick up the one that OUT holds. Raises PipelineError."""
    files = find_target(settings.target)
    backend = choose_backend(files, settings.backend)
    tokenizer = load_tokenizer(files, settings.tokenizer)
    geometry = load_geometry(
        files,
        backend=backend,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    eos_ids = load_eos_ids(files, tokenizer)
    renderer = ChatRenderer(tokenizer, template=_template(settings), eos_ids=eos_ids)
    if settings.topk > geometry.vocab_size:
        raise PipelineError(
            f"--topk {settings.topk}: the vocabulary has only {geometry.vocab_size} tokens"
        )
    if not geometry.can_shift and settings.position_shift_max:
        ropes = sorted({kv.rope_type for kv in geometry.shared_kv.values()})
        raise PipelineError(
            f"--position-shift-max {settings.position_shift_max}: {ropes[0]} RoPE changes every "
            "position with the row's length, so no shift is exact; pass --position-shift-max 0"
        )
    spec = WorkerSpec(
        settings=settings, backend=backend, geometry=geometry, eos_ids=eos_ids, fingerprint=""
    )
    fields = fingerprint_fields(
        settings,
        target_sha256=files.sha256(),
        tokenizer=tokenizer,
        renderer=renderer,
        eos_ids=eos_ids,
        backend=backend,
        schemas={**spec.layout.digests(), **rollout_layout().digests()},
    )
    plan = make_plan(
        settings,
        folder=folder,
        renderer=renderer,
        longest=longest_row(settings, geometry),
        fields=fields,
    )
    spec = dataclasses.replace(spec, fingerprint=plan.fingerprint)
    folder.drop_broken()
    folder.sweep()
    target = {"name": files.name, "kind": files.kind, "sha256": fields["target_sha256"]}
    if files.kind == "gguf":
        target["tensor_types"] = dict(read_gguf(files.path).quantisation)
    return Run(spec=spec, folder=folder, plan=plan, target=target)


def execute(
    settings: Settings,
    make_executor: Callable[[Run], Executor],
    progress: RunProgress | None = None,
) -> dict[str, Any]:
    """The whole run; returns the manifest. Quiet without `progress`.

    Raises PipelineError, and IncompleteError where the disk is full.
    """
    folder = RunFolder(settings.out)
    try:
        return _execute(settings, folder, make_executor, progress)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise IncompleteError(
            f"--out {settings.out}: no space left; what is committed is whole, and the same "
            "command goes on from it once there is space"
        ) from error


def _execute(
    settings: Settings,
    folder: RunFolder,
    make_executor: Callable[[Run], Executor],
    progress: RunProgress | None,
) -> dict[str, Any]:
    progress = progress or RunProgress(Console(quiet=True))
    folder.create()
    with folder.locked():
        run = start(settings, folder=folder)
        progress.say(describe(run))
        run.write_manifest(complete=False)
        executor = make_executor(run)
        total, tasks = len(run.plan.parts), run.rollout_tasks()
        progress.stage("rollouts", unit="parts", total=total, done=total - len(tasks))
        for commit in executor(tasks):
            progress.commit(commit)
        total, tasks = len(run.all_shards()), run.shard_tasks()
        progress.stage("features", unit="shards", total=total, done=total - len(tasks))
        run.write_card()
        for commit in executor(tasks):
            run.write_card()
            progress.commit(commit)
        folder.sweep()
        run.write_card()
        return run.write_manifest(complete=True)


def run_here(run: Run) -> Executor:
    """Execute tasks one after the other in this process."""
    worker = Worker(run.spec, "cpu")

    def executor(tasks: Iterable[Task]) -> Iterator[Commit]:
        for task in tasks:
            yield worker.execute(task)

    return executor


def _template(settings: Settings) -> str | None:
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--chat-template {settings.chat_template}: {error}") from error


def _count(rejects: list[Reject]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reject in rejects:
        counts[reject.reason] = counts.get(reject.reason, 0) + 1
    return dict(sorted(counts.items()))
