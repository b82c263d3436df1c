"""Conversations of a given length for runs whose answers need not be generated."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.bench.model import DEMO_PROMPTS


def write_conversations(path: Path, lengths: Sequence[int]) -> None:
    """A JSONL file of conversations of as many words, two thirds of them the answer's."""
    words = sorted(set(DEMO_PROMPTS.read_text(encoding="utf-8").split()))
    words = [word for word in words if word.isalpha()]
    random = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for length in lengths:
            text = [words[i] for i in random.integers(0, len(words), length)]
            asked, answered = text[: length // 3], text[length // 3 :]
            turns = [
                {"role": "user", "content": " ".join(asked)},
                {"role": "assistant", "content": " ".join(answered)},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
