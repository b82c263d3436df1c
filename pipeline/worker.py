"""One worker process: a loaded target model, and one task at a time."""

import contextlib
import dataclasses
import importlib.metadata
from typing import Any

import torch

import pipeline
from pipeline.errors import PipelineError
from pipeline.extract import ShardTask, extract_shard
from pipeline.geometry import Geometry, feature_layout
from pipeline.manifest import Commit, RunFolder
from pipeline.models.load import find_target, load_target, load_tokenizer
from pipeline.rollout import RolloutTask, longest_row, roll_out_part
from pipeline.schema import Layout, bind, load_schema
from pipeline.settings import Settings

Task = RolloutTask | ShardTask


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """All a worker needs to start; small, since it travels to every actor."""

    settings: Settings
    backend: str
    geometry: Geometry
    eos_ids: frozenset[int]
    fingerprint: str

    @property
    def layout(self) -> Layout:
        return feature_layout(
            self.geometry,
            self.settings.features.split(","),
            top_k=self.settings.topk,
            depth=self.settings.depth,
        )

    @property
    def footer(self) -> dict[str, Any]:
        """What every Parquet footer of the run says."""
        return {
            "fingerprint": self.fingerprint,
            "backend": self.backend,
            "geometry": self.geometry.as_dict(),
            "features": self.settings.features,
            "top_k": self.settings.topk,
            "depth": self.settings.depth,
        }


def rollout_layout() -> Layout:
    return bind([load_schema("rollout")], sizes={}, dtypes={}, layer_metadata={})


def versions() -> dict[str, str]:
    """What must agree between driver and workers, since it can change the bytes."""
    names = ("drafter-features", "torch", "transformers", "llama-cpp-python")
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    # The code's own version, since a checkout that is not installed has no metadata.
    return {**found, "drafter-features": pipeline.__version__}


class Worker:
    """Loads the target model once and executes tasks one at a time."""

    def __init__(self, spec: WorkerSpec, device: str) -> None:
        """device: cpu, cuda, or cuda:N. Raises PipelineError if the model cannot be loaded."""
        torch.set_num_threads(spec.settings.threads)
        files = find_target(spec.settings.target)
        self.spec = spec
        self.folder = RunFolder(spec.settings.out)
        self.tokenizer = load_tokenizer(files, spec.settings.tokenizer)
        self.target = load_target(
            files,
            backend=spec.backend,
            dtype=spec.settings.dtype,
            kv_cache_dtype=spec.settings.kv_cache_dtype,
            device=device,
            threads=spec.settings.threads,
            max_length=longest_row(spec.settings, spec.geometry),
            eos_ids=spec.eos_ids,
        )
        if self.target.geometry != spec.geometry:
            raise PipelineError(
                f"{files.path}: loads as {self.target.geometry}, planned as {spec.geometry}"
            )

    def execute(self, task: Task) -> Commit:
        """Do one task and publish its file; returns the record that counts."""
        if isinstance(task, RolloutTask):
            return roll_out_part(
                task,
                target=self.target,
                tokenizer=self.tokenizer,
                layout=rollout_layout(),
                settings=self.spec.settings,
                folder=self.folder,
                footer=self._footer("rollout"),
            )
        return extract_shard(
            task,
            target=self.target,
            layout=self.spec.layout,
            rollout_layout=rollout_layout(),
            settings=self.spec.settings,
            folder=self.folder,
            footer=self._footer("common", *self.spec.settings.features.split(",")),
        )

    def _footer(self, *schemas: str) -> dict[str, Any]:
        digests = {schema.ref: schema.digest for schema in map(load_schema, schemas)}
        return {**self.spec.footer, "schemas": digests}
