"""Proof that the features train what is served: a drafter overfits them, and drafts well.

python tests/overfit.py [--prompts 96] [--steps 300]

Extracts mtp features of gemma4-nano, trains a random transformers Gemma4AssistantForCausalLM on
them with pipeline.loading, and lets transformers' own assisted generation use it on the same
prompts. Once with the pairing of DESIGN §3 (embed(x_n) with h_{n-1}), once with the wrong one
(embed(x_n) with h_n), which looks as good in training and drafts badly.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

from pipeline.execute import LocalWorker, execute
from pipeline.geometry import Geometry
from pipeline.loading import (
    FeatureDataset,
    MtpBatch,
    assistant_step,
    collate_mtp,
    mtp_anchors,
    mtp_examples,
)
from pipeline.loading.reading import Row
from pipeline.models.load import find_target, load_target
from pipeline.models.nano import HELD_OUT_NAME, NANO_FOLDER
from pipeline.settings import Settings

Pairing = Literal["right", "wrong"]
DEPTH = 3
NEW_TOKENS = 96
ROWS_PER_STEP = 8
DRAFTED = 24  # prompts of the assisted generation
# So few rows can be learnt by heart from tokens and KV alone, whatever the states say; real ones
# cannot. So the assistant starts out listening to the states: its random weights for them are
# larger. Both pairings start from the very same weights.
STATE_WEIGHT = 100.0


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """accuracy: share of depth-1 arg-maxes that are the target's token, on the training rows.

    accepted: tokens a step of assisted generation advances by, 1 being no help at all.
    identical: whether it gives what plain greedy decoding gives, for every prompt.
    """

    accuracy: float
    accepted: float
    identical: bool


def extract(base: Path, prompts: int) -> Path:
    """A float32 run of gemma4-nano over some of its held-out prompts."""
    lines = (NANO_FOLDER / HELD_OUT_NAME).read_text().splitlines(keepends=True)
    path = base / "prompts.jsonl"
    path.write_text("".join(lines[:prompts]))
    execute(
        Settings.check(
            target="gemma4-nano",
            prompts=str(path),
            out=str(base / "out"),
            backend="transformers",
            dtype="float32",
            max_new_tokens=NEW_TOKENS,
            seed=1,
        ),
        LocalWorker,
    )
    return base / "out"


def new_assistant(config: Any, geometry: Geometry) -> Any:
    """Random weights, a dense head, one layer for each attention type of the target model."""
    torch.manual_seed(0)
    text = Gemma4TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=geometry.shared_kv["sliding"].head_dim,
        global_head_dim=geometry.shared_kv["full"].head_dim,
        sliding_window=config.sliding_window,
        rope_parameters=config.rope_parameters,
        max_position_embeddings=config.max_position_embeddings,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        num_kv_shared_layers=2,
    )
    wrapped = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=config.hidden_size)
    assistant = Gemma4AssistantForCausalLM(wrapped)
    with torch.no_grad():  # the projection takes the embedding and the state side by side
        assistant.pre_projection.weight[:, config.hidden_size :] *= STATE_WEIGHT
    return assistant


def batch_of(rows: list[Row], window: int | None, pairing: Pairing) -> MtpBatch:
    examples = [mtp_examples(row, mtp_anchors(row), DEPTH, window=window) for row in rows]
    if pairing == "wrong":
        examples = [
            replace(e, hidden=row["final_hidden"][e.anchors])
            for e, row in zip(examples, rows, strict=True)
        ]
    return collate_mtp(examples)


def steps_of(assistant: Any, embed: Any, batch: MtpBatch) -> list[torch.Tensor]:
    """Logits [B, A, V] of each depth; each is fed the label before it and its own state."""
    tokens, state, logits = batch.token_ids, batch.hidden, []
    for k in range(DEPTH):
        step, state = assistant_step(assistant, embed(tokens), state, batch)
        logits.append(step)
        tokens = batch.label_ids[..., k].clamp(min=0)
    return logits


def train(assistant: Any, embed: Any, batches: list[MtpBatch], steps: int) -> None:
    optimizer = torch.optim.AdamW(assistant.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        batch = batches[step % len(batches)]
        loss = torch.zeros(())
        for k, logits in enumerate(steps_of(assistant, embed, batch)):
            good = batch.label_mask[..., k] & batch.real
            loss = loss + F.cross_entropy(logits[good], batch.label_ids[..., k][good])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(assistant.parameters(), 1.0)
        optimizer.step()


@torch.inference_mode()
def accuracy(assistant: Any, embed: Any, batches: list[MtpBatch]) -> float:
    hits = total = 0
    for batch in batches:
        good = batch.label_mask[..., 0] & batch.real
        chosen = steps_of(assistant, embed, batch)[0].argmax(dim=-1)
        hits += int((chosen == batch.label_ids[..., 0])[good].sum())
        total += int(good.sum())
    return hits / total


@torch.inference_mode()
def draft(target: Any, assistant: Any, prompts: list[torch.Tensor]) -> tuple[float, bool]:
    """(tokens per step, identical to plain greedy) of transformers' assisted generation."""
    assistant.generation_config.num_assistant_tokens = DEPTH
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    calls = 0

    def count(_module: Any, _inputs: Any, _output: Any) -> None:
        nonlocal calls
        calls += 1

    hook = target.register_forward_hook(count)
    tokens, identical = 0, True
    for ids in prompts:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        calls_before = calls
        plain = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        calls = calls_before
        helped = target.generate(
            ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **options
        )
        tokens += helped.shape[1] - ids.shape[1]
        identical &= torch.equal(plain, helped)
    hook.remove()
    return tokens / calls, identical


def measure(out: Path, pairing: Pairing, steps: int) -> Drafting:
    dataset = FeatureDataset(out)
    rows = [dataset[i] for i in range(len(dataset))]
    loaded: Any = load_target(
        find_target("gemma4-nano"),
        backend="transformers",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        threads=2,
        max_length=1024,
        eos_ids=frozenset({1}),
    )
    target = loaded.model
    target.set_attn_implementation("sdpa")
    assistant = new_assistant(target.config, loaded.geometry)
    embed = target.get_input_embeddings()
    window = dataset.index.sliding_window
    groups = [rows[i : i + ROWS_PER_STEP] for i in range(0, len(rows), ROWS_PER_STEP)]
    batches = [batch_of(group, window, pairing) for group in groups]
    train(assistant, embed, batches, steps)
    assistant.eval()
    prompts = []
    for row in rows[:DRAFTED]:
        first = int(row["loss_mask"].nonzero()[0, 0])
        prompts.append(row["input_ids"][:first].long()[None])
    accepted, identical = draft(target, assistant, prompts)
    return Drafting(
        accuracy=accuracy(assistant, embed, batches), accepted=accepted, identical=identical
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overfit-") as scratch:
        out = extract(Path(scratch), options.prompts)
        manifest = json.loads((out / "manifest.json").read_text())
        print(f"{manifest['rows_out']} rows, {manifest['tokens']} tokens of gemma4-nano")
        for pairing in ("right", "wrong"):
            started = time.monotonic()
            found = measure(out, pairing, options.steps)
            print(
                f"{pairing} pairing: depth-1 accuracy {found.accuracy:.3f} on the training rows, "
                f"{found.accepted:.2f} tokens a step when drafting, "
                f"{'identical to' if found.identical else 'OTHER THAN'} plain greedy "
                f"({time.monotonic() - started:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
