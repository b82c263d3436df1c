"""What `datasets.load_dataset` returns for a run, and one row of it in words."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from rich.console import Console
from rich.table import Table

from pipeline.manifest import RunFolder
from pipeline.models.load import find_target, load_tokenizer

AROUND = 3  # context tokens shown before the first supervised one
SHOWN = 12  # tokens shown in all


def show(out: Path, row_index: int, console: Console) -> None:
    """Print column shapes and dtypes of OUT as plain load_dataset gives them, and one row decoded.

    Raises PipelineError if OUT is not the folder of a run or the target is not there to decode.
    """
    manifest = RunFolder(out).read_json("manifest.json")
    tokenizer = load_tokenizer(
        find_target(manifest["target"]["name"]), manifest["settings"]["tokenizer"]
    )
    data = load_dataset(str(out), split="train").with_format("torch")
    row = data[min(row_index, len(data) - 1)]
    console.print(f'load_dataset("{out}", split="train"): {len(data)} rows', soft_wrap=True)
    console.print(_columns(data, row))
    console.print(_tokens(row, tokenizer))


def _columns(data: Dataset, row: dict[str, Any]) -> Table:
    table = Table(title="columns, with_format('torch')")
    for heading in ("column", "shape of this row", "dtype", "this row"):
        table.add_column(heading)
    for name in data.column_names:
        value = row[name]
        if isinstance(value, str):
            table.add_row(name, "", "str", value[:48])
        else:
            shown = str(value.item()) if value.dim() == 0 else ""
            shape = str(list(value.shape)) if value.dim() else "scalar"
            table.add_row(name, shape, str(value.dtype).removeprefix("torch."), shown)
    return table


def _tokens(row: dict[str, Any], tokenizer: Any) -> Table:
    """The first supervised tokens of a row, with their targets and the teacher's first choice."""
    ids, mask = row["input_ids"].numpy(), row["loss_mask"].numpy()
    offset = int(row["position_offset"])
    supervised = np.flatnonzero(mask)
    start = max(0, int(supervised[0]) - AROUND) if len(supervised) else 0
    depth = row["target_ids"].shape[1] if "target_ids" in row else 0  # without mtp
    table = Table(title=f"row {row['sample_id']}: {len(ids)} tokens, {mask.sum()} supervised")
    table.caption = "position = position_offset + t; teacher: its likeliest token t+1"
    for heading in ("t", "position", "token", "mask", *(f"k={k}" for k in range(1, depth + 1))):
        table.add_column(heading)
    table.add_column("teacher")
    for t in range(start, min(len(ids), start + SHOWN)):
        targets = [
            _text(tokenizer, int(row["target_ids"][t, k])) if row["target_mask"][t, k] else "-"
            for k in range(depth)
        ]
        probability = float(row["teacher_top_logprobs"][t, 0].exp())
        first = _text(tokenizer, int(row["teacher_top_ids"][t, 0]))
        table.add_row(
            str(t),
            str(offset + t),
            _text(tokenizer, int(ids[t])),
            str(mask[t]),
            *targets,
            f"{first} {probability:.2f}",
        )
    return table


def _text(tokenizer: Any, token: int) -> str:
    text = tokenizer.decode([token])
    # A piece of a character has no text of its own: show the vocabulary's name for it.
    return repr(text) if "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(token))
