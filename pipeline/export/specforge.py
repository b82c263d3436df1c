"""SpecForge (SGLang): one torch file of plain tensors a row, by the set's own offline contract.

torch.save of plain tensors: the format is torch's zip, which loads with weights_only=True.
"""

from pathlib import Path

import torch

from pipeline.errors import PipelineError
from pipeline.export.source import Source
from pipeline.loading.reading import Row

ROWS_PER_FOLDER = 5000  # rows_0-5000/data_0.ckpt, …
EAGLE3_BLOCKS = 3


def to_specforge(source: Source, out: Path) -> int:
    """data_I.ckpt a row, with input_ids and loss_mask, int64 [T], and of

    eagle3: aux_hidden_state [1, T, 3 * D], hidden_state [1, T, D]; vocab_mapping.pt beside them;
    dspark: hidden_states [1, T, L * D], target_last_hidden_states [1, T, D]; DFlash reads it too.

    The last of each is after the final norm, since its target head is the LM head alone. dspark
    leaves out rows without two supervised tokens in a row, at which its reader stops.
    """
    if source.features == "eagle3" and len(source.layers) != EAGLE3_BLOCKS:
        raise PipelineError(
            f"specforge: its EAGLE-3 takes {EAGLE3_BLOCKS} blocks, not {list(source.layers)}; "
            "choose them by --layers"
        )
    if source.vocab is not None:
        if source.features != "eagle3":
            raise PipelineError("--vocab: specforge maps the vocabulary of eagle3 only")
        mapping = {
            "d2t": torch.from_numpy(source.vocab.d2t),
            "t2d": torch.from_numpy(source.vocab.t2d),
        }
        torch.save(mapping, out / "vocab_mapping.pt")
    count = 0
    for row in source.rows():
        if source.features == "dspark" and not _two_in_a_row(row["loss_mask"]):
            source.left_out.append(row["sample_id"])
            continue
        start = count // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        folder = out / f"rows_{start}-{start + ROWS_PER_FOLDER}"
        folder.mkdir(exist_ok=True)
        torch.save(_tensors(source, row), folder / f"data_{count}.ckpt")
        count += 1
    return count


def _tensors(source: Source, row: Row) -> dict[str, torch.Tensor]:
    blocks, last = (
        ("aux_hidden_state", "hidden_state")
        if source.features == "eagle3"
        else ("hidden_states", "target_last_hidden_states")
    )
    return {
        "input_ids": row["input_ids"].long(),
        "loss_mask": row["loss_mask"].long(),
        blocks: source.wide(row)[None],
        last: row["final_hidden"][None].clone(),  # no view: torch.save would write what it is of
    }


def _two_in_a_row(mask: torch.Tensor) -> bool:
    return bool((mask[1:].bool() & mask[:-1].bool()).any())
