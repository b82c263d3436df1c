"""What a run says at its start and at its end."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.manifest import Commit
from pipeline.rollout import sampling_of
from pipeline.task_queue import QUARANTINE_REASONS
from pipeline.versions import versions

if TYPE_CHECKING:
    from pipeline.models.base import Sampling
    from pipeline.run import Run


def describe(run: "Run") -> str:
    """The effective settings, in a line or two, so that nothing happens silently."""
    geometry, settings, sampling = run.spec.geometry, run.settings, sampling_of(run.settings)
    held = {column.name for column in run.spec.layout.columns}
    states = [
        f"{kind} KV of block {kv.layer}"
        for kind, kv in geometry.shared_kv.items()
        if f"{kind}_key" in held
    ]
    states += [
        f"{name} blocks {' '.join(map(str, blocks))}" for name, blocks in run.spec.layers.items()
    ]
    drawn = _drawn(sampling)
    if settings.stop:
        drawn += f", stops at {settings.stop}"
    if settings.samples_per_prompt > 1:
        drawn += f", {settings.samples_per_prompt} samples a prompt"
    backend = run.spec.backend
    if run.target["kind"] == "gguf" and backend == "transformers":
        backend += (
            " (dequantised weights: near what llama.cpp serves, not equal; "
            "pip install 'drafter-features[llamacpp]' and --backend llamacpp for its own numbers)"
        )
    return (
        f"target {run.target['name']}, backend {backend}\n"
        f"{geometry.architecture}, {geometry.num_layers} layers, hidden {geometry.hidden_size}, "
        f"{', '.join(states)}; {geometry.hidden_dtype}, KV {geometry.kv_dtype}, "
        f"{run.spec.layout.bytes_per_token:,} bytes a token\n"
        f"{run.plan.rows:,} conversations ({sum(run.plan.rejected.values())} rejected), turns "
        f"{settings.turns}, {drawn}, at most {sampling.max_new_tokens} new tokens, ends at ids "
        f"{sorted(run.spec.eos_ids)}, position shift up to {settings.position_shift_max}, "
        f"seed {settings.seed}"
    )


def _drawn(sampling: "Sampling") -> str:
    if sampling.temperature == 0:
        return "greedy"
    return f"temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k}"


def made_how(run: "Run") -> dict[str, str]:
    """The facts of a run that its dataset card tells, in words."""
    settings, semantics, sampling = run.settings, run.spec.semantics, sampling_of(run.settings)
    drawn = _drawn(sampling)
    layers = {name: list(blocks) for name, blocks in semantics.layers.items() if blocks}
    return {
        "target model": f"{run.target['name']} ({run.target['kind']})",
        "its sha256": f"`{run.target['sha256']}`",
        "architecture": run.spec.geometry.architecture,
        "answers by": semantics.generated_by or "the prompts' own (not on-policy)",
        "features and teacher rows by": semantics.scored_by,
        "feature sets": settings.features + (f", blocks {layers}" if layers else ""),
        "dtypes": f"states {run.spec.geometry.hidden_dtype}, KV {run.spec.geometry.kv_dtype}",
        "turns answered anew": settings.turns,
        "sampling": f"{drawn}, at most {sampling.max_new_tokens} tokens an answer",
        "position shift": f"0 to {settings.position_shift_max}, by row",
        "seed": str(settings.seed),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "fingerprint": f"`{run.plan.fingerprint}`",
    }


def run_summary(
    rollouts: Sequence[Commit], shards: Sequence[Commit], bytes_per_token: int
) -> dict[str, Any]:
    """What a run cost and what faults it met, for the manifest.

    tokens_per_worker_second: of each stage, over the time its workers spent on it; of rollouts,
        generated tokens. compressed: file bytes over the features' logical bytes.
    """
    tokens, size = sum(c.tokens for c in shards), sum(c.bytes for c in shards)
    generated = sum(c.supervised_tokens for c in rollouts)
    rejects = [reject.reason for commit in [*rollouts, *shards] for reject in commit.rejects]
    return {
        "generated_tokens": generated,
        "tokens_per_worker_second": {
            "rollouts": _rate(generated, rollouts),
            "features": _rate(tokens, shards),
        },
        "bytes": size,
        "compressed": round(size / (tokens * bytes_per_token), 4) if tokens else None,
        "retried": sum(c.attempt > 1 for c in [*rollouts, *shards]),
        "quarantined_rows": sum(reason in QUARANTINE_REASONS for reason in rejects),
    }


def _rate(tokens: int, commits: Sequence[Commit]) -> float | None:
    seconds = sum(c.seconds for c in commits)
    return round(tokens / seconds, 1) if seconds else None


def print_summary(manifest: Mapping[str, Any], out: str) -> None:
    """One summary at the end: rows in = rows out + rejected."""
    rejected, summary = sum(manifest["rejected"].values()), manifest["summary"]
    reasons = ", ".join(f"{count} {reason}" for reason, count in manifest["rejected"].items())
    print(
        f"{manifest['rows_in']:,} rows in = {manifest['rows_out']:,} out + {rejected:,} rejected"
        + (f" ({reasons}; see rejects.jsonl)" if reasons else "")
    )
    if manifest["sources"]:
        print(f"prompts by source: {shares_text(manifest['sources'])}")
    rates = summary["tokens_per_worker_second"]
    print(
        f"{manifest['tokens']:,} tokens ({summary['generated_tokens']:,} generated); a worker made "
        f"{rates['rollouts'] or 0:,.0f} tokens/s in rollouts, {rates['features'] or 0:,.0f} in "
        "features"
    )
    print(
        f"{len(manifest['shards'])} shards, {summary['bytes'] / 1e6:,.1f} MB in {out}, "
        f"{summary['compressed'] or 0:.2f} of the logical bytes; {summary['retried']} tasks "
        f"retried, {summary['quarantined_rows']} rows quarantined"
    )


def shares_text(sources: Mapping[str, Mapping[str, int]]) -> str:
    """`code 120 (3 rejected, 41% of the prompt tokens), …` by tag."""
    tokens = sum(share["prompt_tokens"] for share in sources.values()) or 1
    return ", ".join(
        f"{tag or 'no tag'} {share['accepted']:,} ({share['rejected']:,} rejected, "
        f"{share['prompt_tokens'] / tokens:.0%} of the prompt tokens)"
        for tag, share in sources.items()
    )


def reject_excess(manifest: Mapping[str, Any], limit: float) -> str | None:
    """What to say where more than `limit` of the input rows were rejected."""
    fraction = sum(manifest["rejected"].values()) / max(1, manifest["rows_in"])
    if fraction <= limit:
        return None
    return (
        f"complete, but {fraction:.1%} of the rows were rejected and --max-reject-fraction "
        f"is {limit:.1%}"
    )
