"""What a run says at its start and at its end."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.rollout import sampling_of

if TYPE_CHECKING:
    from pipeline.run import Run


def describe(run: "Run") -> str:
    """The effective settings, in a line or two, so that nothing happens silently."""
    geometry, settings, sampling = run.spec.geometry, run.settings, sampling_of(run.settings)
    layers = ", ".join(f"{kind} KV of block {kv.layer}" for kind, kv in geometry.shared_kv.items())
    drawn = (
        "greedy"
        if sampling.temperature == 0
        else f"temperature {sampling.temperature}, top-p {sampling.top_p}, top-k {sampling.top_k}"
    )
    backend = run.spec.backend
    if run.target["kind"] == "gguf" and backend == "transformers":
        backend += (
            " (dequantised weights: near what llama.cpp serves, not equal; "
            "pip install 'drafter-features[llamacpp]' and --backend llamacpp for its own numbers)"
        )
    return (
        f"target {run.target['name']}, backend {backend}\n"
        f"{geometry.architecture}, {geometry.num_layers} layers, hidden {geometry.hidden_size}, "
        f"{layers}; {geometry.hidden_dtype}, KV {geometry.kv_dtype}, "
        f"{run.spec.layout.bytes_per_token:,} bytes a token\n"
        f"{run.plan.rows:,} conversations ({len(run.plan.rejects)} rejected), turns "
        f"{settings.turns}, {drawn}, at most {sampling.max_new_tokens} new tokens, ends at ids "
        f"{sorted(run.spec.eos_ids)}, position shift up to {settings.position_shift_max}, "
        f"seed {settings.seed}"
    )


def print_summary(manifest: Mapping[str, Any], out: str) -> None:
    """One summary at the end: rows in = rows out + rejected."""
    rejected = sum(manifest["rejected"].values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in manifest["rejected"].items())
    size = sum(shard["bytes"] for shard in manifest["shards"])
    print(
        f"{manifest['rows_in']:,} rows in = {manifest['rows_out']:,} out + {rejected:,} rejected"
        + (f" ({reasons}; see rejects.jsonl)" if reasons else "")
        + f"\n{manifest['tokens']:,} tokens, {len(manifest['shards'])} shards, "
        f"{size / 1e6:,.1f} MB in {out}"
    )
