"""docs/alignment.md: each number of its drawings again, by the pipeline's own functions."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.features import k_step_targets
from pipeline.loading import dspark_blocks, eagle3_examples, mtp_examples

PAGE = (Path(__file__).parent.parent / "docs" / "alignment.md").read_text()
OFFSET, TOKENS, ANCHOR, WINDOW, BLOCK = 1000, 12, 3, 2, 4


def timeline() -> dict[str, list[str]]:
    """Each line of the first drawing: its name -> twelve cells."""
    block = PAGE.split("```")[1]
    lines = [re.split(r"\s+", line.strip()) for line in block.splitlines() if "|-" not in line]
    return {" ".join(words[:-TOKENS]): words[-TOKENS:] for words in lines if words != [""]}


def numbers(name: str) -> list[int]:
    return [int(cell) for cell in timeline()[name]]


def table() -> dict[str, list[list[int]]]:
    """Each row of `What a drafter reads`: its name -> for each drafter the numbers in its cell."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    start = next(i for i, line in enumerate(lines) if line.startswith("| read at n = 3 |"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start + 2 :]]
    return {
        row[0]: [[int(word) for word in cell.split() if word != "-"] for cell in row[1:]]
        for row in rows
        if len(row) == 4 and not row[0].startswith("in ")
    }


def row() -> dict[str, Any]:
    """A row of the page's tokens whose states at t, K, V and teacher rows all hold t."""
    ids = np.array(numbers("input_ids"), dtype=np.int32)
    mask = np.array(numbers("loss_mask"), dtype=np.uint8)
    target_ids, target_mask = k_step_targets(ids, mask, 3)
    t = torch.arange(TOKENS)
    states = {name: t[:, None].float() for name in ("final_hidden", "block_1_hidden")}
    kv = {f"{k}_{what}": t[:, None, None] for k in ("sliding", "full") for what in ("key", "value")}
    return {
        "input_ids": torch.from_numpy(ids),
        "loss_mask": torch.from_numpy(mask),
        "position_offset": OFFSET,
        "target_ids": torch.from_numpy(target_ids),
        "target_mask": torch.from_numpy(target_mask),
        "teacher_top_ids": t[:, None],
        "teacher_top_logprobs": -t[:, None].float(),
        **states,
        **kv,
    }


def test_the_timeline_names_the_right_index_everywhere() -> None:
    lines, t = timeline(), range(TOKENS)
    assert numbers("t") == list(t)
    assert numbers("position") == [OFFSET + i for i in t]
    assert lines["final_hidden"] == [f"h{i}" for i in t]
    assert lines["K and V"] == [f"kv{i}" for i in t]
    assert lines["teacher row of"] == [f"x{i + 1}" for i in t]
    assert lines["token_logprobs"] == ["0", *(f"p{i - 1}" for i in t if i)]
    words = dict(zip(lines["x_t"], numbers("input_ids"), strict=True))
    assert [words[word] for word in lines["x_t"]] == numbers("input_ids")
    assert len(lines) == 15
    again = [line.split() for line in PAGE.split("```")[3].splitlines() if line]
    assert again[0] == ["t", *map(str, range(7))] and again[1] == ["x_t", *lines["x_t"][:7]]


def test_the_loss_mask_is_the_answers_with_their_terminators() -> None:
    answering, expected = False, []
    for word in timeline()["x_t"]:
        expected.append(int(answering))
        answering = word == "<m>" or (answering and word != "<e>")
    assert numbers("loss_mask") == expected


def test_targets_and_masks_of_the_timeline_are_what_the_pipeline_computes() -> None:
    ids = np.array(numbers("input_ids"), dtype=np.int32)
    mask = np.array(numbers("loss_mask"), dtype=np.uint8)
    target_ids, target_mask = k_step_targets(ids, mask, 3)
    for k in (1, 2, 3):
        assert numbers(f"target_ids k={k}") == target_ids[:, k - 1].tolist()
        assert numbers(f"target_mask k={k}") == target_mask[:, k - 1].tolist()


def held(values: torch.Tensor) -> list[int]:
    return [int(value) for value in values.flatten()]


def test_the_mtp_column_is_what_mtp_examples_reads() -> None:
    examples = mtp_examples(row(), [ANCHOR], 3, window=WINDOW)
    told = {name: cells[0] for name, cells in table().items()}
    assert told["token"] == held(examples.token_ids)
    assert told["`final_hidden` rows"] == held(examples.hidden)
    seen = examples.sliced_kv(0)
    for kind in ("full", "sliding"):
        assert [told[f"`{kind}_key/value` rows"]] * 2 == [
            held(part) for part in seen[f"{kind}_attention"]
        ]
    assert told["`block_{i}_hidden` rows"] == []
    assert told["positions"] == held(examples.positions)
    assert told["labels"] == held(examples.label_ids)
    assert told["of these supervised"] == held(examples.label_mask)
    assert told["teacher rows"] == held(examples.teacher_ids)
    assert told["`final_hidden` rows as goals"] == held(examples.latent)


def test_the_block_column_is_what_dspark_blocks_reads() -> None:
    blocks = dspark_blocks(row(), BLOCK, layers=[1], anchors=[ANCHOR])
    told = {name: cells[1] for name, cells in table().items()}
    assert told["token"] + told["labels"] == held(blocks.token_ids)
    assert told["`block_{i}_hidden` rows"] == held(blocks.context[blocks.context_mask[0]])
    assert told["positions"] == held(blocks.positions)
    assert [0, *told["of these supervised"]] == held(blocks.label_mask)
    assert [ANCHOR - 1, *told["teacher rows"]] == held(blocks.teacher_ids)


def test_the_eagle3_column_is_what_eagle3_examples_reads() -> None:
    examples = eagle3_examples(row(), layers=[1])
    told, at = {name: cells[2] for name, cells in table().items()}, ANCHOR - 1
    fields = {
        "token": examples.token_ids,
        "`block_{i}_hidden` rows": examples.hidden,
        "positions": examples.positions,
        "labels": examples.label_ids,
        "of these supervised": examples.label_mask,
        "teacher rows": examples.teacher_ids,
        "`final_hidden` rows as goals": examples.final_hidden,
    }
    for name, values in fields.items():
        assert values is not None
        assert told[name] == held(values[at]), name


@pytest.mark.parametrize("drafter", [0, 1, 2])
def test_the_general_rule_holds_for_every_drafter(drafter: int) -> None:
    """State beside embed(x_n): row n-1; teacher rows n+k-1; labels and masks of the timeline."""
    told = {name: cells[drafter] for name, cells in table().items()}
    depths = range(1, len(told["labels"]) + 1)
    assert told["labels"] == [numbers(f"target_ids k={k}")[ANCHOR] for k in depths]
    assert told["of these supervised"] == [numbers(f"target_mask k={k}")[ANCHOR] for k in depths]
    assert told["teacher rows"] == [ANCHOR + k - 1 for k in depths]
    state = told["`final_hidden` rows"] or told["`block_{i}_hidden` rows"]
    assert state[-1] == ANCHOR - 1
