"""DeepSpec (DSpark, DFlash, EAGLE-3): its "target cache", version 2: raw bytes and an index."""

import json
import struct
from pathlib import Path

import torch

from pipeline.errors import PipelineError
from pipeline.export.source import Source
from pipeline.loading.reading import Row

INDEX_RECORD = struct.Struct("<QIIQQQQQ")  # row, shard, tokens, five offsets
CACHE_VERSION = 2
SHARD_BYTES = 2**32  # a shard at most, or one row


def to_deepspec(source: Source, out: Path) -> int:
    """shard-N.bin, samples.idx and manifest.json; states as bfloat16, whatever they were."""
    if source.vocab is not None:
        raise PipelineError("--vocab: deepspec's cache has no place for a draft vocabulary")
    shards, offset, count, width = 0, 0, 0, 0
    handle = None
    try:
        with (out / "samples.idx").open("wb") as index:
            for count, row in enumerate(source.rows(), 1):
                parts = _parts(source, row)
                width = row["final_hidden"].shape[1]
                if handle is None or (offset and offset + sum(map(len, parts)) > SHARD_BYTES):
                    if handle is not None:
                        handle.close()
                    handle = (out / f"shard-{shards:05d}.bin").open("wb")
                    shards, offset = shards + 1, 0
                offsets = []
                for part in parts:
                    offsets.append(offset)
                    handle.write(part)
                    offset += len(part)
                length = len(row["input_ids"])
                index.write(INDEX_RECORD.pack(count - 1, shards - 1, length, *offsets))
    finally:
        if handle is not None:
            handle.close()
    manifest = {
        "version": CACHE_VERSION,
        "num_samples": count,
        "num_shards": shards,
        "target_layer_ids": list(source.layers),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": INDEX_RECORD.size,
        "hidden_size": width,
        "shards": [{"shard_id": i, "file_name": f"shard-{i:05d}.bin"} for i in range(shards)],
        "target_model_name_or_path": source.target,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    return count


def _parts(source: Source, row: Row) -> list[bytes]:
    """input_ids, attention_mask, loss_mask, blocks side by side, final hidden states."""
    ids = row["input_ids"]
    return [
        ids.int().numpy().tobytes(),
        torch.ones(len(ids), dtype=torch.uint8).numpy().tobytes(),
        row["loss_mask"].to(torch.uint8).numpy().tobytes(),
        *(
            states.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().tobytes()
            for states in (source.wide(row), row["final_hidden"])
        ),
    ]
