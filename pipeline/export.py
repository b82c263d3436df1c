"""A run in the formats that other trainers read, so that extraction changes and the trainer stays.

speculators (vLLM): a saved dataset and one safetensors file a row.
specforge (SGLang): one torch file of plain tensors a row, as its offline EAGLE-3 reader wants.
deepspec (DSpark, DFlash): shards of raw bytes with an index, its "target cache" version 2.

None of them has positions: rows that were extracted at a random offset are exported as they are.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.errors import PipelineError
from pipeline.loading.blocks import side_by_side
from pipeline.loading.reading import FeatureIndex, Row
from pipeline.new_folder import new_folder
from pipeline.validate.folder import open_run

INDEX_RECORD = struct.Struct("<QIIQQQQQ")  # deepspec: id, shard, tokens, five offsets
CACHE_VERSION = 2  # deepspec's
ROWS_PER_FOLDER = 5000  # specforge: rows_0-5000/data_0.ckpt, …


@dataclass(frozen=True, kw_only=True)
class Source:
    """What an exporter gets. layers: the blocks, rising; last: the target's last block."""

    index: FeatureIndex
    layers: tuple[int, ...]
    last: int
    target: str

    def rows(self) -> Iterator[Row]:
        for group in self.index.groups:
            yield from self.index.read(group)


def export_run(directory: str, out: Path, to: str, features: str | None = None) -> int:
    """Write all rows of a run to the new directory `out`; returns how many.

    to: speculators, specforge or deepspec. features: the set whose blocks are exported, by default
    dspark for deepspec and eagle3 for the others. Raises PipelineError; then `out` does not exist.
    """
    write = EXPORTERS[to]
    features = features or ("dspark" if to == "deepspec" else "eagle3")
    manifest = open_run(directory).manifest
    named = FeatureIndex(directory, ["input_ids"])
    if features not in named.semantics.layers or manifest is None:
        raise PipelineError(
            f"{directory}: was extracted with --features {named.settings.get('features')}, and "
            f"{to} needs the blocks of {features}: extract with --features {features}"
        )
    layers = named.semantics.layers[features]
    last = manifest.geometry.num_layers - 1
    needed = {f"block_{i}_hidden" for i in layers} | {"input_ids", "loss_mask"}
    if to == "speculators":
        layers = tuple(i for i in layers if i != last)
        needed.add(f"block_{last}_hidden")
    else:
        needed.add("final_hidden")
    columns = [c.name for c in named.layout.columns if c.name in needed]
    if missing := sorted(needed - set(columns)):
        raise PipelineError(f"{directory}: has no {missing[0]}; {_REMEDY[to].format(last=last)}")
    source = Source(
        index=FeatureIndex(directory, columns),
        layers=layers,
        last=last,
        target=str(named.settings["target"]),
    )
    with new_folder(out) as staged:
        return write(source, staged)


_REMEDY = {
    "speculators": "speculators applies the final norm itself, so it needs the last block's own "
    "output too: extract with --layers SET=…,{last}",
    "specforge": "extract with --features eagle3, which holds it",
    "deepspec": "extract with --features mtp,dspark, of which mtp holds it",
}


def to_speculators(source: Source, out: Path) -> int:
    """input_ids, loss_mask and seq_len as a saved dataset; hidden_states/hs_I.safetensors a row.

    token_ids: int64 [T]; hidden_states: [T, L + 1, D], the blocks and then the last block's output
    before the final norm, which its trainer applies.
    """
    import datasets

    (out / "hidden_states").mkdir()
    table: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for number, row in enumerate(source.rows()):
        blocks = [row[f"block_{i}_hidden"] for i in (*source.layers, source.last)]
        ids = row["input_ids"].long()
        tensors = {"token_ids": ids, "hidden_states": torch.stack(blocks, dim=1)}
        save_file(tensors, out / "hidden_states" / f"hs_{number}.safetensors")
        table["input_ids"].append(ids.tolist())
        table["loss_mask"].append(row["loss_mask"].tolist())
        table["seq_len"].append(len(ids))
    datasets.Dataset.from_dict(table).with_format("torch").save_to_disk(str(out))
    return len(table["seq_len"])


def to_specforge(source: Source, out: Path) -> int:
    """data_I.ckpt a row: input_ids, loss_mask int64 [T], aux_hidden_state [1, T, L * D],
    hidden_state [1, T, D] after the final norm, since its target head is the LM head alone.

    torch.save of plain tensors: the format is torch's zip, which loads with weights_only=True.
    """
    count = 0
    for number, row in enumerate(source.rows()):
        start = number // ROWS_PER_FOLDER * ROWS_PER_FOLDER
        folder = out / f"rows_{start}-{start + ROWS_PER_FOLDER}"
        folder.mkdir(exist_ok=True)
        torch.save(
            {
                "input_ids": row["input_ids"].long(),
                "loss_mask": row["loss_mask"].long(),
                "hidden_state": row["final_hidden"][None].clone(),
                "aux_hidden_state": side_by_side(row, source.layers)[None].clone(),
            },
            folder / f"data_{number}.ckpt",
        )
        count += 1
    return count


def to_deepspec(source: Source, out: Path, *, shard_bytes: int = 2**32) -> int:
    """shard-N.bin, samples.idx and manifest.json; states as bfloat16, whatever they were."""
    index, shards, offset = bytearray(), 0, 0
    count, handle, width = 0, None, 0
    try:
        for number, row in enumerate(source.rows()):
            parts = _deepspec_parts(row, source.layers)
            width = row["final_hidden"].shape[1]
            if handle is None or (offset and offset + sum(map(len, parts)) > shard_bytes):
                if handle is not None:
                    handle.close()
                handle = (out / f"shard-{shards:05d}.bin").open("wb")
                shards, offset = shards + 1, 0
            offsets = []
            for part in parts:
                offsets.append(offset)
                handle.write(part)
                offset += len(part)
            index += INDEX_RECORD.pack(number, shards - 1, len(row["input_ids"]), *offsets)
            count += 1
    finally:
        if handle is not None:
            handle.close()
    (out / "samples.idx").write_bytes(index)
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


def _deepspec_parts(row: Row, layers: Sequence[int]) -> list[bytes]:
    """input_ids, attention_mask, loss_mask, blocks side by side, final hidden states."""
    ids = row["input_ids"]
    states = [side_by_side(row, layers), row["final_hidden"]]
    return [
        ids.int().numpy().tobytes(),
        torch.ones(len(ids), dtype=torch.uint8).numpy().tobytes(),
        row["loss_mask"].to(torch.uint8).numpy().tobytes(),
        *(s.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().tobytes() for s in states),
    ]


EXPORTERS: Mapping[str, Callable[[Source, Path], int]] = {
    "speculators": to_speculators,
    "specforge": to_specforge,
    "deepspec": to_deepspec,
}
