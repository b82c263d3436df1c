"""Tiny vocabularies as GGUF metadata, with merges learnt from a few lines of text."""

import json
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 384
CORPUS = [
    "the quick brown fox don't jump over 1234 1234 lazy dogs, they'll sleep  in the\n\n sun.",
    "def add(a, b):\n    return a + b  # numbers 10 20 30\n\n\tx = {'key': [1, 2]}\n",
    "déjà vu à la carte, 日本語の文章 日本語 と 日本, ¿qué? naïve café",
] * 3
CONTROLS = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
# GGUF token types
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def _trained(pre: Any, normalizer: Any, alphabet: list[str], room: int) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def byte_level_vocabulary(pre: str) -> dict[str, Any]:
    """A GPT-2 style vocabulary with real merges; ids 0-5 are CONTROLS.

    The token qzx is one that no merges lead to; <think> is user-defined.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model = _trained(split, None, alphabet, VOCAB_SIZE - len(CONTROLS) - 2)
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    tokens = [*CONTROLS, *learnt, "qzx", "<think>"]
    types = [CONTROL] * len(CONTROLS) + [NORMAL] * (len(learnt) + 1) + [USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": _padded(tokens, types),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """A Llama-2 style vocabulary: <unk> <s> </s>, 256 byte tokens, scored pieces."""
    model = _trained(
        pre_tokenizers.Metaspace(prepend_scheme="never"),
        normalizers.Replace(" ", "▁"),
        [],
        VOCAB_SIZE - 260,
    )
    pieces = sorted(model["vocab"])  # ids do not follow scores
    rank = {"".join(pair): i for i, pair in reversed(list(enumerate(model["merges"])))}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<|im_end|>"]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL]
    scores = [0.0] * 259 + [-float(rank.get(p, 1000 + i)) for i, p in enumerate(pieces)] + [0.0]
    tokens = _padded(tokens, types)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores + [-1e4] * (VOCAB_SIZE - len(scores)),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def gemma4_vocabulary() -> dict[str, Any]:
    """Spaces as ▁, no word splitting, byte tokens, runs of newlines as tokens."""
    controls = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>"]
    controls.append("<|tool_response>")
    model = _trained(
        pre_tokenizers.Split("\n", behavior="isolated"),
        normalizers.Replace(" ", "▁"),
        ["\n"],
        VOCAB_SIZE - 256 - len(controls) - 7,
    )
    learnt = sorted(model["vocab"], key=model["vocab"].get)
    runs = ["\n" * n for n in range(2, 6)]
    merges = [f"{run[:cut]} {run[cut:]}" for run in runs for cut in range(1, len(run))]
    runs.append(".\n")  # never used: text is cut at newlines first
    merges.append(". \n")
    tokens = [*controls, *(f"<0x{b:02X}>" for b in range(256)), *learnt, *runs, "<|channel>"]
    types = [CONTROL] * len(controls) + [BYTE] * 256 + [NORMAL] * len([*learnt, *runs])
    types.append(USER_DEFINED)
    tokens = _padded(tokens, types)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * VOCAB_SIZE,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [*merges, *(" ".join(pair) for pair in model["merges"])],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _padded(tokens: list[str], types: list[int]) -> list[str]:
    while len(tokens) < VOCAB_SIZE:
        tokens.append(f"<extra_{len(tokens)}>")
        types.append(CONTROL)
    assert len(tokens) == VOCAB_SIZE
    return tokens
