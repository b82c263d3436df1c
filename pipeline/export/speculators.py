"""speculators (vLLM): a saved dataset, and one safetensors file a row."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from pipeline.export.source import Source

_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
    ]
)


def to_speculators(source: Source, out: Path) -> int:
    """input_ids, loss_mask and seq_len as a saved dataset; hidden_states/hs_I.safetensors a row.

    token_ids: int64 [T]; hidden_states: [T, L + 1, D], the blocks and then the last block's output
    before the final norm, which its trainer applies. t2d-N.npy and d2t-N.npy of a draft vocabulary
    of N tokens, where its trainer looks for them.
    """
    (out / "hidden_states").mkdir()
    if source.vocab is not None:
        size = len(source.vocab.ids)
        np.save(out / f"t2d-{size}.npy", source.vocab.t2d, allow_pickle=False)
        np.save(out / f"d2t-{size}.npy", source.vocab.d2t, allow_pickle=False)
    # Through a file that is mapped, since a large run's tokens do not fit into memory as lists;
    # in a folder of its own, since a dataset is not saved beside its own files.
    temporary = out / ".tokens"
    temporary.mkdir()
    tokens = str(temporary / "rows.arrow")
    with pa.OSFile(tokens, "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as stream:
        for batch in _write_rows(source, out / "hidden_states"):
            stream.write_batch(batch)
    table = datasets.Dataset.from_file(tokens).with_format("torch")
    table.save_to_disk(str(out))
    shutil.rmtree(temporary)
    return len(table)


def _write_rows(source: Source, folder: Path) -> Iterator[Any]:
    for number, row in enumerate(source.rows()):
        ids = row["input_ids"].long()
        blocks = [row[f"block_{i}_hidden"] for i in (*source.layers, source.last)]
        tensors = {"token_ids": ids, "hidden_states": torch.stack(blocks, dim=1)}
        save_file(tensors, folder / f"hs_{number}.safetensors")
        yield pa.record_batch(
            [[ids.numpy()], [row["loss_mask"].long().numpy()], [len(ids)]], schema=_SCHEMA
        )
