"""What a run is: its plan, its records so far, and the files that tie its folder together.

`start` plans one, or picks up the one that OUT holds; pipeline/execute.py carries it out.
"""

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.card import dataset_card
from pipeline.config_file import settings_text
from pipeline.endpoint import checked_url
from pipeline.errors import PipelineError
from pipeline.gguf import read_gguf
from pipeline.manifest import MANIFEST_VERSION, Commit, RunFolder
from pipeline.models.load import (
    choose_backend,
    find_target,
    load_eos_ids,
    load_geometry,
    load_tokenizer,
)
from pipeline.plan import Plan, fingerprint_fields, make_plan
from pipeline.planned_rows import make_renderer
from pipeline.rollout import longest_row, sampling_record
from pipeline.settings import Settings
from pipeline.summary import made_how, run_summary
from pipeline.tasks import RolloutTask, Task, plan_shards
from pipeline.versions import versions
from pipeline.worker import WorkerSpec, rollout_layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run; commits: the records so far, by name."""

    spec: WorkerSpec
    folder: RunFolder
    plan: Plan
    commits: dict[str, Commit]
    target: Mapping[str, Any]  # what the manifest says of its file

    @property
    def settings(self) -> Settings:
        return self.spec.settings

    def rollout_tasks(self) -> list[Task]:
        """Every part; one is done if its name is among the commits."""
        return [
            RolloutTask(index=i, rows=part.rows, inputs_sha256=part.sha256)
            for i, part in enumerate(self.plan.parts)
        ]

    def shard_tasks(self) -> list[Task]:
        """Every shard; call once all rollouts are done. Writes down which rows go where."""
        tasks = plan_shards(
            self.of_kind("rollout"),
            self.folder,
            bytes_per_token=self.spec.layout.bytes_per_token,
            shard_bytes=self.settings.shard_mb * 10**6,
        )
        self.folder.write_json("plan/shards.json", {task.name: task.ranges for task in tasks})
        return list(tasks)

    def undone(self, tasks: Sequence[Task], kind: str) -> list[Task]:
        """The tasks without a record of just these inputs; other records of the kind go.

        Rollouts that were lost and done again may differ (on a GPU), and what was extracted from
        the lost ones must not stay beside them.
        """
        wanted = {task.name: task.inputs_sha256 for task in tasks}
        for commit in self.of_kind(kind):
            if wanted.get(commit.name) != commit.inputs_sha256:
                self.folder.take_back(self.commits.pop(commit.name))
        return [task for task in tasks if task.name not in self.commits]

    def of_kind(self, kind: str) -> list[Commit]:
        """The records of rollouts or shards, in order."""
        found = (commit for commit in self.commits.values() if commit.kind == kind)
        return sorted(found, key=lambda commit: commit.name)

    def write_card(self) -> None:
        """The dataset card, listing exactly the shards that are committed."""
        card = dataset_card(
            self.spec.layout,
            self.of_kind("shard"),
            self.of_kind("rollout"),
            target=self.target["name"],
            made=made_how(self),
        )
        self.folder.write_text("README.md", card)

    def write_manifest(self, *, complete: bool) -> dict[str, Any]:
        """Write manifest.json and rejects.jsonl from plan and records, and return the manifest.

        Raises PipelineError if complete and rows in is not rows out plus rows rejected.
        """
        shards, rollouts = self.of_kind("shard"), self.of_kind("rollout")
        late = [reject for commit in rollouts + shards for reject in commit.rejects]
        rejected = Counter(self.plan.rejected) + Counter(reject.reason for reject in late)
        rows_in = self.plan.rows + sum(self.plan.rejected.values())
        rows_out = sum(c.rows for c in shards)
        if complete and rows_in != rows_out + rejected.total():
            raise PipelineError(
                f"{self.folder.url}: {rows_in} rows in, but {rows_out} out and "
                f"{rejected.total()} rejected; please report this"
            )
        semantics = self.spec.semantics
        manifest = {
            "manifest_version": MANIFEST_VERSION,
            "complete": complete,
            "fingerprint": self.plan.fingerprint,
            "fingerprint_fields": self.plan.fields,
            "target": dict(self.target),
            "generated_by": semantics.generated_by,
            "scored_by": semantics.scored_by,
            "settings": self.settings.model_dump(exclude={"out"}),
            "sampling": sampling_record(self.settings),
            "versions": versions(),
            "geometry": self.spec.geometry.as_dict(),
            "semantics": semantics.as_dict(),
            "bytes_per_token": self.spec.layout.bytes_per_token,
            "rows_in": rows_in,
            "rows_out": rows_out,
            "rejected": dict(sorted(rejected.items())),
            "sources": {tag: share.model_dump() for tag, share in self.plan.sources.items()},
            "tokens": sum(c.tokens for c in shards),
            "summary": run_summary(rollouts, shards, self.spec.layout.bytes_per_token),
            "shards": [c.model_dump(mode="json", exclude={"rejects"}) for c in shards],
            "rollouts": [c.model_dump(mode="json", exclude={"rejects"}) for c in rollouts],
        }
        early = self.folder.storage.read("plan/rejects.jsonl").decode()
        lines = "".join(reject.model_dump_json() + "\n" for reject in late)
        self.folder.write_text("rejects.jsonl", early + lines)
        self.folder.write_json("manifest.json", manifest)
        return manifest


def _check_together(settings: Settings) -> None:
    """Options that contradict each other. Raises PipelineError."""
    if settings.autoscale and settings.workers:
        raise PipelineError("--workers and --autoscale are both given; leave out one of them")
    if settings.autoscale and settings.device == "auto":
        raise PipelineError(
            "--autoscale: nodes that are not there yet do not tell whether they have GPUs; pass "
            "--device cuda or --device cpu"
        )
    if settings.rollout_endpoint is not None:
        checked_url(settings.rollout_endpoint)
        if settings.stop:
            raise PipelineError(
                "--stop: a server cuts the answer's text, not its ids, at a stop string; leave out "
                "--rollout-endpoint, or --stop"
            )
    if settings.samples_per_prompt > 1 and settings.turns == "given":
        raise PipelineError("--samples-per-prompt: with --turns given nothing is sampled")
    if settings.samples_per_prompt > 1 and settings.temperature == 0:
        raise PipelineError(
            f"--samples-per-prompt {settings.samples_per_prompt}: greedy answers would all be the "
            "same; pass a --temperature above 0"
        )
    if not all(settings.stop):
        raise PipelineError("--stop: an empty string would end every answer at once")


def start(settings: Settings, *, folder: RunFolder, say: Callable[[str], None]) -> Run:
    """Plan a run, or pick up the one that OUT holds. Raises PipelineError."""
    _check_together(settings)
    say(f"settings:\n{textwrap.indent(settings_text(settings), '  ').rstrip()}")
    files = find_target(settings.target, trust_remote_code=settings.trust_remote_code)
    backend = choose_backend(files, settings.backend)
    tokenizer = load_tokenizer(files, settings.tokenizer)
    geometry = load_geometry(
        files,
        backend=backend,
        dtype=settings.dtype,
        kv_cache_dtype=settings.kv_cache_dtype,
    )
    eos_ids = load_eos_ids(files, tokenizer)
    renderer = make_renderer(settings, tokenizer, eos_ids)
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
        layers=spec.layers,
    )
    plan = make_plan(
        settings,
        folder=folder,
        renderer=renderer,
        longest=longest_row(settings, geometry),
        fields=fields,
    )
    spec = dataclasses.replace(spec, fingerprint=plan.fingerprint)
    commits = folder.drop_broken(folder.read_commits(), verify=settings.verify_resume, say=say)
    folder.sweep(commits.values())
    target = {"name": files.name, "kind": files.kind, "sha256": fields["target_sha256"]}
    if files.kind == "gguf":
        target["tensor_types"] = dict(read_gguf(files.path).quantisation)
    return Run(spec=spec, folder=folder, plan=plan, commits=commits, target=target)
