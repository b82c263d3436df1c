"""Faults of rows and workers, met by real workers of a real run."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_files import data_files, settings_of, shard_rows

from jobs.actors import WorkerActor
from pipeline.errors import IncompleteError, RowReject
from pipeline.execute import LocalWorker, execute
from pipeline.manifest import Commit
from pipeline.memory import halving
from pipeline.run import Run
from pipeline.tasks import Unit
from pipeline.worker import WorkerSpec

ray = pytest.importorskip("ray", reason="Ray tests: pip install 'drafter-features[ray]'")

ROOT = Path(__file__).parent.parent


# ---- memory


def test_halving_keeps_order_and_names_only_what_does_not_fit_alone() -> None:
    calls: list[int] = []

    def run(items: Sequence[int]) -> list[int]:
        calls.append(len(items))
        if sum(items) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return [item * 100 for item in items]

    results = halving(run, [3, 4, 11, 2, 2, 9])
    assert [r if isinstance(r, int) else r.reason for r in results] == [
        300,
        400,
        "out_of_memory",
        200,
        200,
        900,
    ]
    assert isinstance(results[2], RowReject) and "2.00 GiB" in results[2].detail
    assert calls == [6, 3, 1, 2, 1, 1, 3, 1, 2, 1, 1]


class _LittleMemory:
    """A loaded target model whose device holds at most `limit` tokens of a forward pass."""

    def __init__(self, target: Any, limit: int) -> None:
        self.__dict__.update(vars(target))
        self._target, self._limit = target, limit

    def generate(self, *args: Any) -> Any:
        return self._target.generate(*args)

    def forward(self, rows: Any, **options: Any) -> Any:
        if len(rows) * max(len(row.ids) for row in rows) > self._limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self._target.forward(rows, **options)


def test_rows_too_long_for_the_memory_are_rejected_and_no_other(
    tiny_run: Path, tmp_path: Path
) -> None:
    """F9: rows in = rows out + rejected, and the longest do not vanish without a word."""
    limit = 400
    lengths = {row["sample_id"]: row["num_tokens"] for row in shard_rows(tiny_run)}
    too_long = {name for name, length in lengths.items() if length > limit}
    assert 0 < len(too_long) < len(lengths)

    def small(run: Run) -> LocalWorker:
        here = LocalWorker(run)
        here._worker.target = _LittleMemory(here._worker.target, limit)  # type: ignore[assignment]
        return here

    manifest = execute(settings_of(tiny_run, out=str(tmp_path / "out")), small)
    lines = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    rejects = [json.loads(line) for line in lines]
    found = {r["sample_id"] for r in rejects if r["reason"] == "out_of_memory"}
    assert found == too_long
    assert manifest["rows_in"] == manifest["rows_out"] + sum(manifest["rejected"].values())
    kept = {row["sample_id"]: row for row in shard_rows(tmp_path / "out")}
    for row in shard_rows(tiny_run):
        if row["sample_id"] in kept:
            # Other micro-batches than in the clean run, so the last bits may differ.
            again = kept[row["sample_id"]]["final_hidden"]
            assert np.allclose(row["final_hidden"], again, atol=0.05)


# ---- poison rows, on Ray

POISON = "Why?"  # the text of row-4 of the tiny run
SECOND = "1+1 " * 80  # of row-2


class PoisonedActor(WorkerActor):
    """Its target model raises on one prompt, and dies of another."""

    def load(self, spec: WorkerSpec) -> Any:
        said = super().load(spec)
        generate = self.worker.target.generate

        def poisoned(prompts: Any, sampling: Any) -> Any:
            texts = [self.worker.tokenizer.decode(prompt.ids) for prompt in prompts]
            if any(POISON in text for text in texts):
                os.kill(os.getpid(), signal.SIGKILL)
            if any(SECOND in text for text in texts):
                raise ZeroDivisionError("a row the target model's code cannot do")
            return generate(prompts, sampling)

        self.worker.target.generate = poisoned  # type: ignore[method-assign]
        return said

    def execute(self, unit: Unit) -> Commit | None:
        return super().execute(unit)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )
    yield
    ray.shutdown()


def test_poison_prompts_are_found_rejected_and_the_rest_is_kept(
    cluster: None, tiny_run: Path, tmp_path: Path
) -> None:
    from jobs.ray_pool import RayPool

    lines: list[str] = []
    out = tmp_path / "out"
    settings = settings_of(tiny_run, out=str(out), workers=2)
    manifest = execute(
        settings, lambda run: RayPool(run.spec, settings, lines.append, PoisonedActor)
    )
    rejects = [json.loads(ln) for ln in (out / "rejects.jsonl").read_text().split("\n") if ln]
    assert {r["sample_id"]: r["reason"] for r in rejects[2:]} == {
        "row-2": "raises_error",
        "row-4": "kills_worker",
    }
    assert "ZeroDivisionError" in next(r["detail"] for r in rejects if r["sample_id"] == "row-2")
    assert manifest["summary"]["quarantined_rows"] == 2
    assert manifest["summary"]["retried"] >= 2
    clean = [row["sample_id"] for row in shard_rows(tiny_run)]
    assert [row["sample_id"] for row in shard_rows(out)] == [
        name for name in clean if name not in ("row-2", "row-4")
    ]
    # The same command again has nothing to do, and says the same.
    again = execute(settings, lambda run: RayPool(run.spec, settings, lines.append, PoisonedActor))
    assert again == {**manifest, "versions": again["versions"]}


class BrokenNodeActor(WorkerActor):
    """Every row fails here, as on a node whose GPU is broken."""

    def execute(self, unit: Unit) -> Commit | None:
        raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.slow
def test_a_broken_node_rejects_no_row(cluster: None, tiny_run: Path, tmp_path: Path) -> None:
    from jobs.ray_pool import RayPool

    out = tmp_path / "out"
    settings = settings_of(tiny_run, out=str(out), workers=1)
    with pytest.raises(IncompleteError, match="each row tried fails alone: RuntimeError: CUDA"):
        execute(settings, lambda run: RayPool(run.spec, settings, lambda _: None, BrokenNodeActor))
    execute(settings, LocalWorker)
    assert data_files(out) == data_files(tiny_run)


class StuckActor(WorkerActor):
    """The first unit takes its time."""

    def execute(self, unit: Unit) -> Commit | None:
        import time

        time.sleep(7)
        return super().execute(unit)


@pytest.mark.slow
def test_a_stuck_worker_is_reported_with_what_it_does_and_where(
    cluster: None, tiny_run: Path, tmp_path: Path
) -> None:
    from jobs.ray_pool import RayPool

    lines: list[str] = []
    settings = settings_of(
        tiny_run, out=str(tmp_path / "out"), workers=2, no_progress_timeout=2, rollout_rows=8
    )
    execute(settings, lambda run: RayPool(run.spec, settings, lines.append, StuckActor))
    stuck = [line for line in lines if line.startswith("no progress for ")]
    assert any("rollout-00000 in process " in line for line in stuck)
