"""The training loop of gemma4-nano: vocabulary, batches, optimiser, schedule; two CPU cores."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from pipeline.chat import ChatRenderer, GivenRow
from pipeline.chat_encoding import Int32Array
from pipeline.models.tiny_tokenizer import ASCII_LETTERS, PAD, TinyVocabulary, make_vocabulary
from pipeline.prompt_turns import Message

VOCAB_SIZE = 2048
LONGEST_ROW = 320  # tokens; longer chats are left out
BATCH_TOKENS = 4096  # with padding
PROMPT_WEIGHT = 0.3  # of the loss on what is not the model's turn
_IGNORED = -100
_WARMUP_STEPS = 100
_DECAY_SHARE = 0.6  # the last part of training, over which the rates fall to 0

# No merge may cross a newline (llama.cpp cuts there) or join words; indents are tokens.
_WORDS = r"\n+|▁▁+|▁?[A-Za-z_]+|[0-9]|▁?[^A-Za-z0-9_▁\n]+|▁"


class Batch(NamedTuple):
    """ids, labels: int64 [B, T], labels[:, t] = ids[:, t + 1] or -100; weights: float32 [B, T]."""

    ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def learn_vocabulary(texts: Sequence[str]) -> TinyVocabulary:
    """Byte-pair merges of the texts' ASCII characters; the same texts give the same merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    letters = sorted(ASCII_LETTERS)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,  # more merges than fit: make_vocabulary takes the first
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        show_progress=False,
    )
    ascii_only = (text.encode("ascii", errors="ignore").decode() for text in texts)
    tokenizer.train_from_iterator(ascii_only, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    pairs = [(left, right) for left, right in merges if "\n" not in left + right]
    return make_vocabulary(ASCII_LETTERS, pairs, VOCAB_SIZE)


class ChatEncoder:
    """Chats of one user turn to ids, as `ChatRenderer.given_row` does, but without rendering."""

    def __init__(self, renderer: ChatRenderer) -> None:
        prompt = renderer.prompt_segments([Message("user", "\x01")])[0]
        self._renderer = renderer
        self._before, self._after = prompt.split("\x01")

    def __call__(self, user: str, model: str) -> GivenRow:
        """ids [T] up to and with the end of the model's turn, and their loss mask."""
        encode = self._renderer.encode
        prompt: Int32Array = encode(f"{self._before}{user}{self._after}")
        answer: Int32Array = encode(f"{model}<turn|>")
        mask = np.repeat(np.array([0, 1], dtype=np.uint8), [len(prompt), len(answer)])
        return GivenRow(np.concatenate([prompt, answer]), mask)


def batches(rows: Sequence[GivenRow], seed: int) -> Iterator[Batch]:
    """Batches for ever: every epoch in a new order, rows of like length together."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(rows))
        groups: list[list[int]] = []
        for start in range(0, len(order), 4096):
            part = sorted(order[start : start + 4096], key=lambda i: len(rows[i].ids))
            group: list[int] = []
            for index in part:
                if (len(group) + 1) * len(rows[index].ids) > BATCH_TOKENS:
                    groups.append(group)
                    group = []
                group.append(int(index))
            groups.append(group)
        for place in random.permutation(len(groups)):
            yield _batch([rows[i] for i in groups[place]])


def _batch(rows: Sequence[GivenRow]) -> Batch:
    width = max(len(row.ids) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    labels = torch.full((len(rows), width), _IGNORED)
    weights = torch.zeros((len(rows), width))
    for b, (row_ids, mask) in enumerate(rows):
        last = len(row_ids) - 1
        ids[b, : last + 1] = torch.from_numpy(row_ids)
        labels[b, :last] = ids[b, 1 : last + 1]
        weights[b, :last] = PROMPT_WEIGHT + (1 - PROMPT_WEIGHT) * torch.from_numpy(mask[1:])
    return Batch(ids, labels, weights)


def new_model(config: Any, seed: int) -> Any:
    """A random Gemma4ForCausalLM in float32 whose layer scalars are trained as well."""
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(seed)
    config.initializer_range = 0.04
    model = Gemma4ForCausalLM(config)
    for layer in model.model.layers:
        layer.layer_scalar.requires_grad_()  # a buffer, which fine-tuning leaves alone
        if hasattr(layer.self_attn, "k_norm") and layer.self_attn.k_norm is not None:
            # Gemma-4 divides scores by nothing: start from the usual 1 / sqrt(head size).
            weight = layer.self_attn.k_norm.weight
            torch.nn.init.constant_(weight, weight.numel() ** -0.5)
    return model.train()


def train(model: Any, rows: Sequence[GivenRow], *, steps: int, seed: int) -> None:
    """Train in place, with a progress line now and then."""
    optimisers = _optimisers(model)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, steps))
        for optimiser in optimisers
    ]
    source = batches(rows, seed)
    started, tokens, recent = time.monotonic(), 0, []
    for step in range(1, steps + 1):
        ids, labels, weights = next(source)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1),
            labels.flatten(),
            ignore_index=_IGNORED,
            reduction="none",
        )
        ((losses * weights.flatten()).sum() / weights.sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(
            [p for o in optimisers for g in o.param_groups for p in g["params"]], 1.0
        )
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        tokens += int((labels != _IGNORED).sum())
        answers = weights.flatten() == 1
        recent.append(float(losses.detach()[answers].mean()))
        if step % 25 == 0 or step == steps:
            seconds = time.monotonic() - started
            print(
                f"step {step}/{steps}  loss {np.mean(recent):.3f} nats  "
                f"{tokens / 1e6:.2f}M tokens  {tokens / seconds:,.0f} tokens/s  "
                f"{seconds / 60:.1f} min, {seconds / step * (steps - step) / 60:.1f} to go",
                flush=True,
            )
            recent.clear()


def _optimisers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for embeddings, norms and scalars."""
    matrices: list[torch.Tensor] = []
    embeddings: list[torch.Tensor] = []
    vectors: list[torch.Tensor] = []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(parameter)
        else:
            (matrices if parameter.dim() == 2 else vectors).append(parameter)
    vectors += [layer.layer_scalar for layer in model.model.layers]
    adam = [{"params": embeddings, "lr": 6e-3}, {"params": vectors, "lr": 2e-3}]
    return [
        torch.optim.Muon(matrices, lr=4e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(adam, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _rate(step: int, steps: int) -> float:
    """Warm up, stay, fall to 0: the factor of the learning rates."""
    return min(1.0, (step + 1) / _WARMUP_STEPS, (steps - step) / (_DECAY_SHARE * steps))
