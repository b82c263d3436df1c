"""How gemma4-nano is made: chats from source text, vocabulary, batches, a few training steps."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jobs.nano_corpus import ANSWER_CHARS, Module, _pieces, chats_of
from jobs.nano_training import (
    BATCH_TOKENS,
    PROMPT_WEIGHT,
    ChatEncoder,
    batches,
    learn_vocabulary,
    new_model,
    train,
)
from pipeline.chat import ChatRenderer, GivenRow
from pipeline.models.load import find_target, load_tokenizer
from pipeline.models.tiny import exact_in_both, tiny_config
from pipeline.prompt_turns import Message

SOURCE = '''\
"""Module head.

Second paragraph of it.
"""

class Shelf(list):
    """A shelf of books."""

    @property
    def width(self):
        """How wide it is.

        In millimetres.
        """
        total = sum(book.width for book in self)

        return total + 2

def caf():
    """Naïve."""
    return "plain ascii"

def one(): return 1
'''


def write(tmp_path: Path, source: str) -> Module:
    path = tmp_path / "shelf.py"
    path.write_text(source, encoding="utf-8")
    return Module("shelf", path)


def test_chats_are_heads_and_their_continuations(tmp_path: Path) -> None:
    chats = [(chat.line, chat.user, chat.model) for chat in chats_of(write(tmp_path, SOURCE))]
    head = 'def width(self):\n    """How wide it is.\n\n    In millimetres.\n    """'
    assert chats == [
        (1, "Module head.", "Second paragraph of it."),
        (6, 'class Shelf(list):\n    """', "A shelf of books."),
        (10, 'def width(self):\n    """', "How wide it is."),
        (10, "How wide it is.", "In millimetres."),
        (15, head, "total = sum(book.width for book in self)\n\nreturn total + 2"),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.text("ab ", max_size=90)).map(
            lambda line: ("    " * line[0] + line[1]).rstrip()
        ),
        min_size=1,
        max_size=40,
    )
)
def test_pieces_joined_are_the_body(lines: list[str]) -> None:
    pieces = _pieces(lines)
    assert [line for piece in pieces for line in piece] == lines
    assert all(len(piece) == 1 or len("\n".join(piece)) <= ANSWER_CHARS for piece in pieces)


def test_the_same_text_gives_the_same_vocabulary() -> None:
    texts = [SOURCE * 3, "for book in self:\n\n\n    total += book.width\n" * 5]
    first, second = learn_vocabulary(texts), learn_vocabulary(texts)
    assert first == second and len(first.tokens) == len(set(first.tokens)) == 2048
    assert first.tokens[11:13] == ["<0x00>", "<0x01>"]
    assert "▁book" in first.tokens and "self" in first.tokens and "▁▁▁▁" in first.tokens
    assert [token for token in first.tokens if "\n" in token] == ["\n", "\n\n"]
    assert not any("▁" in token.strip("▁") for token in first.tokens)  # no merge joins words


@pytest.fixture(scope="module")
def encode() -> ChatEncoder:
    return ChatEncoder(renderer())


def renderer() -> ChatRenderer:
    tokenizer = load_tokenizer(find_target("gemma4-nano"))
    return ChatRenderer(tokenizer, eos_ids={1, 6, 7})


def test_chats_are_encoded_as_the_pipeline_renders_them(encode: ChatEncoder) -> None:
    user, model = 'def width(self):\n    """', "How wide\nit is."
    row = encode(user, model)
    given_row = renderer().given_row([Message("user", user), Message("assistant", model)])
    length = len(row.ids)
    assert length == len(given_row.ids) - 1  # all but the newline after the end of the turn
    np.testing.assert_array_equal(row.ids, given_row.ids[:length])
    np.testing.assert_array_equal(row.loss_mask, given_row.loss_mask[:length])


def test_a_batch_predicts_the_next_token_and_weighs_answers() -> None:
    ids, mask = np.array([2, 20, 21, 22, 6], np.int32), np.array([0, 0, 1, 1, 1], np.uint8)
    short = GivenRow(ids[:3], mask[:3])
    batch = next(batches([GivenRow(ids, mask), short], seed=0))
    long = int(batch.ids[:, 4].argmax())
    assert batch.ids[long].tolist() == [2, 20, 21, 22, 6]
    assert batch.labels[long].tolist() == [20, 21, 22, 6, -100]
    assert batch.labels[1 - long].tolist() == [20, 21, -100, -100, -100]
    weights = [PROMPT_WEIGHT, 1, 1, 1, 0]
    assert batch.weights[long].tolist() == pytest.approx(weights)


def test_an_epoch_holds_every_row_once_and_batches_stay_small() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(20, 300, 200)
    rows = [
        GivenRow(np.full(n, 300 + i, np.int32), np.ones(n, np.uint8)) for i, n in enumerate(lengths)
    ]
    seen: list[int] = []
    for batch in batches(rows, seed=1):
        assert batch.ids.numel() <= BATCH_TOKENS
        seen += batch.ids[:, 0].tolist()
        if len(seen) >= 200:
            break
    assert sorted(seen) == list(range(300, 500))


def test_training_learns_and_repeats_exactly(encode: ChatEncoder, capsys) -> None:
    rows = [encode(f"def f{i}(x):", f"return x + {i}") for i in range(40)]
    sizes = {"layers": 4, "full_every": 2, "hidden": 64, "window": 16, "vocab_size": 2048}
    weights, losses = [], []
    for _ in range(2):
        model = new_model(tiny_config(**sizes), seed=3)
        train(model, rows, steps=50, seed=3)
        weights.append(model.state_dict())
        losses.append([float(line.split()[3]) for line in capsys.readouterr().out.splitlines()])
    assert losses[0] == losses[1] and losses[0][1] < losses[0][0] - 1.0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(float(weights[0][f"model.layers.{i}.layer_scalar"]) != 1.0 for i in range(4))


def test_exported_numbers_are_exact_in_both_half_formats() -> None:
    values = torch.tensor([1.0, 1 / 3, -2.7e-5, 3.1e-7, 1e-12])
    exact = torch.from_numpy(exact_in_both(values))
    assert torch.equal(exact.half().float(), exact)
    assert torch.equal(exact.bfloat16().float(), exact)
    assert torch.allclose(exact, values, rtol=1e-2, atol=3e-8)
