"""Extraction beside the bare forward pass, and rollouts beside the libraries' own generation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.batches import micro_batches
from pipeline.bench.rows import random_rows
from pipeline.bench.timing import Line, medians
from pipeline.chat import ChatRenderer
from pipeline.conversation import Conversation
from pipeline.extract import extract_rows
from pipeline.geometry import feature_layout
from pipeline.layers import choose_layers
from pipeline.models.base import Int32Array, Prompt, Sampling, TargetModel
from pipeline.models.hf_generate import ROWS
from pipeline.models.llamacpp import LlamaCppTarget
from pipeline.models.load import find_target, load_eos_ids, load_target, load_tokenizer
from pipeline.prompts import PromptRow, read_prompts
from pipeline.schema import Layout
from pipeline.semantics import semantics_of
from pipeline.settings import Settings
from pipeline.shards import ShardWriter

DEMO_PROMPTS = Path(__file__).parent.parent / "data" / "demo_prompts.jsonl"


def load(target: str, backend: str, *, max_length: int, threads: int) -> TargetModel:
    files = find_target(target)
    return load_target(
        files,
        backend=backend,
        dtype="bfloat16",
        kv_cache_dtype="float16",
        device="cpu",
        threads=threads,
        max_length=max_length,
        eos_ids=load_eos_ids(files, load_tokenizer(files)),
    )


def extraction(
    model: Any, features: str, lengths: Sequence[int], scratch: Path, *, budget: int, repeats: int
) -> Line:
    """Tokens/s of features into a file over `model(input_ids)` on the very same batches."""
    geometry = model.geometry
    settings = Settings.check(
        target="-", prompts="-", out="-", features=features, batch_tokens=budget, seed=1
    )
    sets = features.split(",")
    layers = choose_layers(
        sets, [], num_layers=geometry.num_layers, architecture=geometry.architecture
    )
    layout = feature_layout(geometry, sets, top_k=64, depth=3, layers=layers)
    rows = random_rows(geometry.vocab_size, lengths)
    footer = footer_of(model, layout, features, layers)
    path = scratch / "bench.parquet"

    def ours() -> None:
        with ShardWriter(path, layout, footer) as writer:
            done, rejects = extract_rows(rows, model, layout, settings)
            assert not rejects
            writer.write(done)

    @torch.inference_mode()
    def bare() -> None:
        for batch in micro_batches(list(lengths), budget):
            width = max(lengths[i] for i in batch)
            ids = torch.zeros((len(batch), width), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for b, i in enumerate(batch):
                ids[b, : lengths[i]] = torch.from_numpy(rows[i]["input_ids"]).long()
                mask[b, : lengths[i]] = 1
            model.model(input_ids=ids, attention_mask=mask, use_cache=False)

    took = medians({"ours": ours, "bare": bare}, repeats)
    tokens = sum(lengths)
    shape = f"{len(lengths)} rows of {min(lengths)}-{max(lengths)}"
    return Line(
        f"(a) extraction of {features}, {shape}, batches of {budget}",
        tokens / took["ours"],
        tokens / took["bare"],
        "tokens/s over the bare forward pass",
        ">= 0.95" if features == "mtp" else "",
    )


def footer_of(model: Any, layout: Layout, features: str, layers: Any) -> dict[str, Any]:
    return {
        "fingerprint": "0" * 64,
        "geometry": model.geometry.as_dict(),
        "features": features,
        "top_k": 64,
        "depth": 3,
        "schemas": layout.digests(),
        "semantics": semantics_of(
            model.geometry, layers=layers, generated_by="transformers", scored_by="transformers"
        ).as_dict(),
    }


def real_prompts(target: str, count: int) -> list[Prompt]:
    """The first prompts of the demo as the target model sees them; answers differ in length."""
    files = find_target(target)
    tokenizer = load_tokenizer(files)
    renderer = ChatRenderer(tokenizer, eos_ids=load_eos_ids(files, tokenizer))
    rows = [row for row in read_prompts(str(DEMO_PROMPTS)) if isinstance(row, PromptRow)]
    conversations = (Conversation.all_turns(renderer, row.messages) for row in rows[:count])
    return [Prompt(c.segments[0], 0) for c in conversations]


def transformers_rollouts(model: Any, prompts: Sequence[Prompt], most: int, repeats: int) -> Line:
    """Tokens/s over transformers' own generate on the same prompts in batches of as many."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    eos_ids = sorted(model.eos_ids)
    tokens = {"ours": 0, "plain": 0}

    def ours() -> None:
        answers = model.generate(prompts, Sampling(max_new_tokens=most))
        tokens["ours"] = sum(len(answer.ids) for answer in answers)

    @torch.inference_mode()
    def plain() -> None:
        tokens["plain"] = 0
        for start in range(0, len(order), ROWS):
            some = [prompts[i].ids for i in order[start : start + ROWS]]
            width = max(map(len, some))
            batch = torch.zeros((len(some), width), dtype=torch.long)
            mask = torch.zeros_like(batch)
            for b, ids in enumerate(some):
                batch[b, width - len(ids) :] = torch.from_numpy(ids)
                mask[b, width - len(ids) :] = 1
            out = model.model.generate(
                batch,
                attention_mask=mask,
                max_new_tokens=most,
                do_sample=False,
                eos_token_id=eos_ids,
                pad_token_id=eos_ids[0],
            )
            for answer in out[:, width:].tolist():
                ends = [n for n, token in enumerate(answer) if token in model.eos_ids]
                tokens["plain"] += ends[0] + 1 if ends else len(answer)

    took = medians({"ours": ours, "plain": plain}, repeats)
    return Line(
        f"(b) rollouts by transformers, {len(prompts)} prompts, answers up to {most}",
        tokens["ours"] / took["ours"],
        tokens["plain"] / took["plain"],
        "tokens/s over its own batched generate",
        ">= 1.3",
    )


def llamacpp_rollouts(
    model: LlamaCppTarget, prompts: Sequence[Prompt], most: int, repeats: int
) -> Line:
    """Tokens/s over bare batched decoding: every sequence one token a call, arg-max, no sampler."""
    tokens = {"ours": 0, "bare": 0}
    together = 8

    def ours() -> None:
        answers = model.generate(prompts, Sampling(max_new_tokens=most))
        tokens["ours"] = sum(len(answer.ids) for answer in answers)

    def bare() -> None:
        tokens["bare"] = 0
        for start in range(0, len(prompts), together):
            some = [prompt.ids for prompt in prompts[start : start + together]]
            tokens["bare"] += _decode_together(model, some, most)

    took = medians({"ours": ours, "bare": bare}, repeats)
    return Line(
        f"(b) rollouts by llama.cpp, {len(prompts)} prompts, answers up to {most}",
        tokens["ours"] / took["ours"],
        tokens["bare"] / took["bare"],
        f"tokens/s over its batched decoding of {together}",
        ">= 0.95",
    )


def _decode_together(model: LlamaCppTarget, prompts: Sequence[Int32Array], most: int) -> int:
    """Greedy answers of all prompts in lockstep; the tokens made."""
    context = model._empty_context(capturing=False)
    last: dict[int, int] = {}
    for sequence, ids in enumerate(prompts):
        for start in range(0, len(ids), context.batch_tokens):
            part = ids[start : start + context.batch_tokens]
            wants = np.zeros(len(part), np.bool_)
            wants[-1] = start + len(part) == len(ids)
            places = np.arange(start, start + len(part), dtype=np.int32)
            context.decode(part, places, np.full(len(part), sequence, np.int32), wants)
        last[sequence] = int(context.logits(1)[0].argmax())
    made, lengths = len(last), {s: len(ids) for s, ids in enumerate(prompts)}
    going = [s for s in last if last[s] not in model.eos_ids]
    for _ in range(most - 1):
        if not going:
            break
        tokens = np.array([last[s] for s in going], np.int32)
        places = np.array([lengths[s] for s in going], np.int32)
        context.decode(tokens, places, np.array(going, np.int32), np.ones(len(going), np.bool_))
        for s, row in zip(going, context.logits(len(going)), strict=True):
            last[s], lengths[s] = int(row.argmax()), lengths[s] + 1
        made += len(going)
        going = [s for s in going if last[s] not in model.eos_ids]
    return made
