"""One worker process: a loaded target model, and one task at a time."""

import dataclasses
import errno
import tempfile
from typing import Any

import torch

from pipeline.batches import row_groups
from pipeline.errors import PipelineError, no_space
from pipeline.extract import extract_rows, extract_shard, rollout_rows
from pipeline.forecast import Probe, peak_memory
from pipeline.geometry import Geometry, feature_layout
from pipeline.layers import Layers, choose_layers, parse_features
from pipeline.manifest import Commit, RunFolder
from pipeline.models.load import find_target, load_target, load_tokenizer
from pipeline.plan import write_part
from pipeline.rollout import (
    Generate,
    answer_rows,
    generate_with,
    longest_row,
    read_planned,
    roll_out_part,
)
from pipeline.schema import Layout, bind, load_schema
from pipeline.semantics import Semantics, semantics_of
from pipeline.settings import Settings
from pipeline.tasks import RolloutTask, ShardTask, Trial, Unit, plan_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """All a worker needs to start; small, since it travels to every actor."""

    settings: Settings
    backend: str
    geometry: Geometry
    eos_ids: frozenset[int]
    fingerprint: str

    @property
    def feature_sets(self) -> tuple[str, ...]:
        return parse_features(self.settings.features)

    @property
    def layers(self) -> Layers:
        """The blocks that feature sets hold. Raises PipelineError where --layers is wrong."""
        return choose_layers(
            self.feature_sets,
            self.settings.layers,
            num_layers=self.geometry.num_layers,
            architecture=self.geometry.architecture,
        )

    @property
    def layout(self) -> Layout:
        return feature_layout(
            self.geometry,
            self.feature_sets,
            top_k=self.settings.topk,
            depth=self.settings.depth,
            layers=self.layers,
        )

    @property
    def semantics(self) -> Semantics:
        remote = "endpoint" if self.settings.rollout_endpoint else self.backend
        return semantics_of(
            self.geometry,
            layers=self.layers,
            generated_by=None if self.settings.turns == "given" else remote,
            scored_by=self.backend,
        )

    @property
    def footer(self) -> dict[str, Any]:
        """What every Parquet footer of the run says."""
        return {
            "fingerprint": self.fingerprint,
            "backend": self.backend,
            "geometry": self.geometry.as_dict(),
            "features": ",".join(self.feature_sets),
            "top_k": self.settings.topk,
            "depth": self.settings.depth,
            "semantics": self.semantics.as_dict(),
        }

    @property
    def rollout_footer(self) -> dict[str, Any]:
        return {**self.footer, "schemas": _digests("rollout")}

    @property
    def shard_footer(self) -> dict[str, Any]:
        return {**self.footer, "schemas": _digests("common", *self.feature_sets)}


def _digests(*schemas: str) -> dict[str, str]:
    return {schema.ref: schema.digest for schema in map(load_schema, schemas)}


def rollout_layout() -> Layout:
    return bind([load_schema("rollout")], sizes={}, dtypes={}, layer_metadata={})


class Worker:
    """Loads the target model once and executes tasks one at a time."""

    def __init__(self, spec: WorkerSpec, device: str) -> None:
        """device: cpu, cuda, or cuda:N. Raises PipelineError if the model cannot be loaded."""
        torch.set_num_threads(spec.settings.threads)
        files = find_target(spec.settings.target, trust_remote_code=spec.settings.trust_remote_code)
        self.spec = spec
        self.folder = RunFolder(spec.settings.out)
        self.tokenizer = load_tokenizer(files, spec.settings.tokenizer)
        self.longest = longest_row(spec.settings, spec.geometry)
        self.target = load_target(
            files,
            backend=spec.backend,
            dtype=spec.settings.dtype,
            kv_cache_dtype=spec.settings.kv_cache_dtype,
            device=device,
            threads=spec.settings.threads,
            max_length=self.longest,
            eos_ids=spec.eos_ids,
            gpus=spec.settings.gpus_per_worker if device.startswith("cuda") else 1,
        )
        if self.target.geometry != spec.geometry:
            raise PipelineError(
                f"{files.path}: loads as {self.target.geometry}, planned as {spec.geometry}"
            )

    def execute(self, unit: Unit) -> Commit | None:
        """Do one task and publish its file; returns the record that counts, None for a trial.

        Raises StorageError where the output cannot be written.
        """
        try:
            if isinstance(unit, Trial):
                self._try(unit)
                return None
            if isinstance(unit, RolloutTask):
                return self._roll_out(unit, self.folder)
            return self._extract(unit, self.folder)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise no_space(self.spec.settings.out) from error

    def _roll_out(self, task: RolloutTask, folder: RunFolder) -> Commit:
        return roll_out_part(
            task,
            generate=self._generate,
            eos_ids=self.spec.eos_ids,
            longest=self.longest,
            tokenizer=self.tokenizer,
            layout=rollout_layout(),
            settings=self.spec.settings,
            folder=folder,
            footer=self.spec.rollout_footer,
        )

    def _extract(self, task: ShardTask, folder: RunFolder) -> Commit:
        return extract_shard(
            task,
            target=self.target,
            layout=self.spec.layout,
            rollout_layout=rollout_layout(),
            settings=self.spec.settings,
            folder=folder,
            footer=self.spec.shard_footer,
        )

    def _try(self, trial: Trial) -> None:
        settings, task = self.spec.settings, trial.task
        chosen = [i for i in trial.rows if i not in task.faults]
        if isinstance(task, RolloutTask):
            planned = read_planned(task, self.folder)
            some = {i: planned[i] for i in chosen}
            answer_rows(some, self._generate, self.spec.eos_ids, self.longest, settings)
            return
        rows = enumerate(rollout_rows(task, rollout_layout(), self.folder))
        kept = (row for i, row in rows if i in set(chosen))
        for group in row_groups(kept, self.spec.layout.stored_bytes_per_token):
            extract_rows(group, self.target, self.spec.layout, settings)

    def probe(self, rows: list[dict[str, Any]]) -> Probe:
        """Take planned rows through both stages in a scratch folder, and measure."""
        with tempfile.TemporaryDirectory(prefix="probe-") as scratch:
            folder = RunFolder(scratch)
            staged = folder.stage("plan")
            part = write_part(staged, rows)
            task = RolloutTask(index=0, rows=len(rows), inputs_sha256=part.sha256)
            folder.storage.put(staged, task.plan_file, part.sha256)
            rollout = self._roll_out(task, folder)
            if not rollout.rows:
                raise PipelineError(f"none of {len(rows)} rows tried can be answered")
            layout = self.spec.layout
            shards = plan_shards(
                [rollout], folder, bytes_per_token=layout.bytes_per_token, shard_bytes=2**62
            )
            shard = self._extract(shards[0], folder)
        return Probe(
            rows=rollout.rows,
            tokens=rollout.tokens,
            generated=0 if self.spec.settings.turns == "given" else rollout.supervised_tokens,
            rollout_seconds=rollout.seconds,
            rollout_bytes=rollout.bytes,
            feature_seconds=shard.seconds,
            feature_bytes=shard.bytes,
            memory=peak_memory(),
            gpu_memory=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        )

    @property
    def _generate(self) -> Generate:
        return generate_with(self.target)
