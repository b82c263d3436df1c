"""What a run will take before it starts: `--dry-run` plans, measures a few rows and adds up."""

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.errors import PipelineError
from pipeline.plan import part_name
from pipeline.units import size_text, time_text

if TYPE_CHECKING:
    from pipeline.run import Run

PROBE_ROWS = 8


class Probe(NamedTuple):
    """What a worker measured on a few rows; seconds of each stage, bytes of its file.

    memory: the worker process's peak, in bytes; gpu_memory: torch's peak on its GPU, else 0.
    """

    rows: int
    tokens: int
    generated: int
    rollout_seconds: float
    rollout_bytes: int
    feature_seconds: float
    feature_bytes: int
    memory: int
    gpu_memory: int


def probe_rows(run: "Run") -> list[dict[str, Any]]:
    """Up to PROBE_ROWS planned rows, evenly spread over the plan."""
    rows = min(PROBE_ROWS, run.plan.rows)
    wanted = [(2 * i + 1) * run.plan.rows // (2 * rows) for i in range(rows)]
    found: list[dict[str, Any]] = []
    start = 0
    for index, part in enumerate(run.plan.parts):
        inside = [row - start for row in wanted if start <= row < start + part.rows]
        if inside:
            found += run.folder.read_table(f"plan/{part_name(index)}").take(inside).to_pylist()
        start += part.rows
    return found


def forecast(run: "Run", probe: Probe, *, workers: int, free: int | None) -> dict[str, Any]:
    """Expected size and time of a whole run, from its exact prompts and a probe.

    free: bytes free at OUT, None if unknown. Times assume `workers` like the one that probed.
    """
    rows, per_token = run.plan.rows, run.spec.layout.bytes_per_token
    generated = round(rows * probe.generated / probe.rows)
    tokens = run.plan.prompt_tokens + generated
    logical = tokens * per_token
    scale = tokens / probe.tokens
    features, rollouts = round(probe.feature_bytes * scale), round(probe.rollout_bytes * scale)
    seconds = {
        # A probe whose rows had nothing to generate says nothing of that speed.
        "rollouts": generated * probe.rollout_seconds / max(1, probe.generated) / workers,
        "features": tokens * probe.feature_seconds / probe.tokens / workers,
    }
    return {
        "rows": rows,
        "rejected": sum(run.plan.rejected.values()),
        "prompt_tokens": run.plan.prompt_tokens,
        "generated_tokens": generated,
        "tokens": tokens,
        "bytes_per_token": per_token,
        "bytes_per_token_on_disk": round(probe.feature_bytes / probe.tokens),
        "bytes": features + rollouts + sum(part.bytes for part in run.plan.parts),
        "shards": max(1, round(logical / (run.settings.shard_mb * 10**6))),
        "seconds": {stage: round(value, 1) for stage, value in seconds.items()},
        "workers": workers,
        "memory_per_worker": probe.memory,
        "gpu_memory_per_worker": probe.gpu_memory,
        "free_bytes": free,
        "probe": probe._asdict(),
    }


def print_forecast(told: Mapping[str, Any], out: str) -> None:
    """The forecast in a few lines. Raises PipelineError if the run cannot fit at OUT."""
    seconds, probe = told["seconds"], told["probe"]
    free = told["free_bytes"]
    print(
        f"{told['rows']:,} rows ({told['rejected']:,} rejected): "
        f"{told['prompt_tokens']:,} prompt tokens + about {told['generated_tokens']:,} generated "
        f"= {told['tokens']:,} tokens"
    )
    print(
        f"{told['bytes_per_token']:,} bytes a token, {told['bytes_per_token_on_disk']:,} on disk: "
        f"about {size_text(told['bytes'])} in {told['shards']:,} shards; free at {out}: "
        + (size_text(free) if free is not None else "not known")
    )
    gpu = f" and {size_text(told['gpu_memory_per_worker'])} of GPU memory"
    print(
        f"about {time_text(sum(seconds.values()))} with {told['workers']} workers "
        f"({time_text(seconds['rollouts'])} rollouts, {time_text(seconds['features'])} features); "
        f"{size_text(told['memory_per_worker'])} of memory a worker"
        + (gpu if told["gpu_memory_per_worker"] else "")
    )
    print(
        f"measured on {probe['rows']} rows, {probe['tokens']:,} tokens: "
        f"{probe['generated'] / max(1e-9, probe['rollout_seconds']):,.0f} generated tokens/s, "
        f"{probe['tokens'] / max(1e-9, probe['feature_seconds']):,.0f} tokens/s of features"
    )
    if free is not None and told["bytes"] > free:
        raise PipelineError(
            f"--out {out}: the run needs about {size_text(told['bytes'])}, and {size_text(free)} "
            "are free"
        )


def peak_memory() -> int:
    """Most bytes this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
