"""What gemma4-nano has learnt, in numbers, and its model card."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.answers import LEAST_DISTINCT, distinct_share
from pipeline.chat import ChatRenderer
from pipeline.errors import PipelineError
from pipeline.models.base import Int32Array, PositionedRow, Prompt, Sampling, TargetModel
from pipeline.models.load import find_target, load_eos_ids, load_target, load_tokenizer
from pipeline.models.nano import HELD_OUT_NAME
from pipeline.prompt_turns import Message

ANSWER_LIMIT = 256  # new tokens of a greedy answer
_ROWS_PER_PASS = 32


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Of the held-out prompts, float32 on the CPU.

    loss, unigram_entropy: nats per token of the same held-out answers, end-of-turn included; the
        entropy is of those tokens' own frequencies, the best any context-free model could do.
    ended: share of greedy answers that end by themselves within ANSWER_LIMIT tokens.
    not_loops: share of them in which at least half of the 4-grams are distinct.
    answer_tokens: mean length of the greedy answers.
    """

    rows: int
    tokens: int
    loss: float
    unigram_entropy: float
    ended: float
    not_loops: float
    answer_tokens: float

    def __str__(self) -> str:
        return (
            f"{self.rows} held-out prompts, {self.tokens:,} answer tokens\n"
            f"held-out loss    {self.loss:.3f} nats per token\n"
            f"unigram entropy  {self.unigram_entropy:.3f} nats per token "
            f"({self.unigram_entropy - self.loss:.3f} above the loss)\n"
            f"greedy answers   {self.answer_tokens:.1f} tokens on average\n"
            f"  end by themselves within {ANSWER_LIMIT} tokens: {self.ended:.1%}\n"
            f"  are not loops (distinct 4-grams / 4-grams >= {LEAST_DISTINCT}): "
            f"{self.not_loops:.1%}"
        )


def evaluate(folder: Path) -> Numbers:
    """Measure a model directory on the held-out prompts that lie in it. Raises PipelineError."""
    files = find_target(str(folder))
    tokenizer = load_tokenizer(files)
    eos_ids = load_eos_ids(files, tokenizer)
    target = load_target(
        files,
        backend="transformers",
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        threads=torch.get_num_threads(),
        max_length=4096,
        eos_ids=eos_ids,
    )
    return measure(target, ChatRenderer(tokenizer, eos_ids=eos_ids), read_held_out(folder))


def measure(
    target: TargetModel, renderer: ChatRenderer, chats: Sequence[Sequence[Message]]
) -> Numbers:
    """Measure a target model on chats of one user turn and its right answer."""
    logprobs, ids = answer_logprobs(target, renderer, chats)
    frequencies = np.unique(ids, return_counts=True)[1] / len(ids)
    prompts = [Prompt(renderer.encode(renderer.prompt_segments(chat)[0]), 0) for chat in chats]
    answers = target.generate(prompts, Sampling(max_new_tokens=ANSWER_LIMIT))
    return Numbers(
        rows=len(chats),
        tokens=len(ids),
        loss=-float(logprobs.mean()),
        unigram_entropy=-float(np.sum(frequencies * np.log(frequencies))),
        ended=float(np.mean([answer.finish_reason == "stop" for answer in answers])),
        not_loops=float(
            np.mean([distinct_share(answer.ids) >= LEAST_DISTINCT for answer in answers])
        ),
        answer_tokens=float(np.mean([len(answer.ids) for answer in answers])),
    )


def answer_logprobs(
    target: TargetModel, renderer: ChatRenderer, chats: Sequence[Sequence[Message]]
) -> tuple[npt.NDArray[np.float64], Int32Array]:
    """(log p of each token, its id), [N] both, of the chats' own answers with end-of-turn."""
    logprobs, ids = [], []
    for start in range(0, len(chats), _ROWS_PER_PASS):
        given = [renderer.given_row(chat) for chat in chats[start : start + _ROWS_PER_PASS]]
        outputs = target.forward([PositionedRow(row.ids, 0) for row in given], top_k=1)
        for row, output in zip(given, outputs, strict=True):
            answered = row.loss_mask.astype(bool)
            logprobs.append(output.teacher.token_logprobs.double().numpy()[answered])
            ids.append(row.ids[answered])
    return np.concatenate(logprobs), np.concatenate(ids)


def read_held_out(folder: Path) -> list[list[Message]]:
    """The held-out chats of a model directory: a user turn and the library's own answer."""
    path = folder / HELD_OUT_NAME
    if not path.is_file():
        raise PipelineError(f"{path} is missing: only a directory that this job wrote has it")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [[Message(turn["role"], turn["content"]) for turn in row["messages"]] for row in rows]


def model_card(recipe: Mapping[str, Any], numbers: Numbers) -> str:
    """The README.md of the model directory."""
    return _CARD.format(**recipe, rows=numbers.rows, table=_table(numbers))


def _table(numbers: Numbers) -> str:
    gap = numbers.unigram_entropy - numbers.loss
    lines = [
        ("held-out loss, nats per answer token", f"{numbers.loss:.3f}"),
        ("unigram entropy of the same tokens, nats", f"{numbers.unigram_entropy:.3f}"),
        ("difference, nats", f"{gap:.3f}"),
        (f"greedy answers that end within {ANSWER_LIMIT} tokens", f"{numbers.ended:.1%}"),
        ("greedy answers that are not loops", f"{numbers.not_loops:.1%}"),
        ("mean length of a greedy answer, tokens", f"{numbers.answer_tokens:.1f}"),
    ]
    return "\n".join(["| measure | value |", "|---|---:|", *(f"| {a} | {b} |" for a, b in lines)])


_CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# gemma4-nano

A Gemma-4 of {parameters:,} parameters that runs anywhere, for trying out and testing what is made
for the real one: sliding and full attention layers with two head sizes, shared KV, per-layer
embeddings, layer scalars, proportional RoPE, logit soft-cap, three end-of-answer tokens. It
continues Python code and docstrings: short answers that end by themselves. It knows nothing else;
do not use it for anything but tests.

| | |
|---|---|
| blocks | 8: three sliding (window 64), one full, twice; the last 4 share KV of blocks 2, 3 |
| sizes | hidden 256, FFN 512, 8 heads, 2 KV heads, head size 32 (sliding) and 64 (full) |
| per-layer embeddings | 32 a block |
| vocabulary | 2048: byte-pair merges with byte fallback, Gemma-4's control tokens and turn format |
| context | 131072 by configuration; trained on rows of up to 320 tokens from position 0 |

## Data
The standard library of CPython {python}, sources and docstrings, cut into {chats:,} chats
({tokens:,} tokens, {answer_tokens:,} of them answers): the user turn is the head of a function,
class or docstring, or the lines before a piece of a body; the model turn is what follows.
{modules} modules were trained on, {held_out_modules} (one in 20, by the hash of the name) were held
out. `held-out.jsonl` has {rows} chats of the latter. Left out: tests, generated tables, idlelib.

## Recipe
`python jobs/train_nano_target.py --out DIR --steps {steps} --seed {seed} --threads {threads}`

bfloat16 autocast on CPU, {minutes} minutes on two shared cores. {steps} batches of 4096 tokens with
padding; loss weight 1 on answers, 0.3 on the rest; Muon for the blocks' matrices, AdamW for
embeddings, norms and scalars; the rates fall to 0 over the last 60 %. Weights are rounded to what
bfloat16 and float16 both hold. The same Python, torch, CPU type and thread count give the same
weights.

## Numbers
Held-out chats, float32: `python jobs/train_nano_target.py --eval`

{table}

A greedy answer is a loop if fewer than half of its 4-grams are distinct. The unigram entropy is of
the measured tokens' own frequencies, so no context-free model does better.

## Licence
The weights and this directory: Apache-2.0, as the project. The data is the Python standard library,
under the PSF licence: PSF-LICENSE.txt; `held-out.jsonl` quotes it.
"""
