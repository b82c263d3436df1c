"""Encoding and decoding beside ready-array pyarrow, sizes beside other formats, loaders."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from datasets import load_dataset
from safetensors.torch import save_file

from pipeline.batches import row_groups
from pipeline.bench.timing import Line, medians
from pipeline.extract import extract_rows
from pipeline.loading import FeatureDataset
from pipeline.settings import Settings
from pipeline.shards import ShardWriter, to_table


def features_of(model: Any, layout: Any, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Real features of rows, in memory."""
    settings = Settings.check(target="-", prompts="-", out="-", seed=1)
    done, _ = extract_rows(rows, model, layout, settings)
    return [dict(row) for row in done]


def encoding(
    done: list[dict[str, Any]], layout: Any, footer: dict[str, Any], scratch: Path, repeats: int
) -> list[Line]:
    """MB (of the logical dtypes) a CPU second, over pyarrow's own writing and reading of tables."""
    ours, ready = scratch / "ours.parquet", scratch / "ready.parquet"
    table = to_table(done, layout, layout.arrow_schema(footer))
    scalars = [c.name for c in layout.columns if not c.shape]

    def write_ours() -> None:
        with ShardWriter(ours, layout, footer) as writer:
            for group in row_groups(iter(done), layout.stored_bytes_per_token):
                writer.write(group)

    def write_ready() -> None:
        pq.write_table(
            table,
            ready,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            use_byte_stream_split=layout.leaf_paths(floats=True),
            write_statistics=scalars,
            write_page_checksum=True,
            row_group_size=len(done),
        )

    logical = sum(row["num_tokens"] for row in done) * layout.bytes_per_token / 1e6
    took = medians(
        {
            "write": write_ours,
            "write ready": write_ready,
            "read": lambda: _read_ours(ours, layout),
            "read ready": lambda: pq.read_table(ours, page_checksum_verification=True),
        },
        repeats,
        clock=time.process_time,
    )
    return [
        Line(
            "(c) encode and write",
            logical / took["write"],
            logical / took["write ready"],
            "MB a CPU second over pq.write_table of ready arrays",
            ">= 0.87",
        ),
        Line(
            "(c) read and decode",
            logical / took["read"],
            logical / took["read ready"],
            "MB a CPU second over pq.read_table",
            ">= 0.87",
        ),
        *_sizes(done, layout, ours, logical, scratch),
    ]


def _read_ours(path: Path, layout: Any) -> None:
    from pipeline.shards import read_rows

    read_rows(path, layout.columns)


def _sizes(
    done: list[dict[str, Any]], layout: Any, path: Path, logical: float, scratch: Path
) -> list[Line]:
    """Bytes on disk over the same values elsewhere."""
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
    tensors = {
        f"{i}.{c.name}": torch.from_numpy(row[c.name]).to(dtypes.get(c.dtype) or None)
        for i, row in enumerate(done)
        for c in layout.columns
        if c.shape
    }
    save_file(tensors, scratch / "all.safetensors")
    torch.save(tensors, scratch / "all.pt")
    size = path.stat().st_size / 1e6
    others = {
        "raw values": (logical, "<= 0.70"),
        "safetensors": ((scratch / "all.safetensors").stat().st_size / 1e6, ""),
        "torch.save": ((scratch / "all.pt").stat().st_size / 1e6, ""),
    }
    return [
        Line("(c) size on disk", size, other, f"MB over {name}", bar)
        for name, (other, bar) in others.items()
    ]


def loaders(out: Path, columns: Sequence[str], scratch: Path, repeats: int) -> list[Line]:
    """Rows as tensors, over raw pyarrow reads of the same columns; and load_dataset beside.

    One torch thread: CPU seconds are counted, and a pool that waits would count as work.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dataset = FeatureDataset(out, columns)
    paths = sorted((out / "data").glob("*.parquet"))
    size = sum(
        row[name].nbytes for row in (dataset[i] for i in range(len(dataset))) for name in columns
    )

    def ours() -> None:
        fresh = FeatureDataset(out, columns)
        for i in range(len(fresh)):
            fresh[i]

    def raw() -> None:
        for path in paths:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                for group in range(file.num_row_groups):
                    file.read_row_group(group, columns=list(columns))

    cached = load_dataset(str(out), split="train", cache_dir=str(scratch / "cache"))
    cached = cached.select_columns(list(columns)).with_format("torch")
    stream = load_dataset(str(out), split="train", streaming=True)

    def plain_cached() -> None:
        for row in cached:
            row[columns[0]]

    def plain_streaming() -> None:
        for row in stream.select_columns(list(columns)).with_format("torch"):
            row[columns[0]]

    took = medians(
        {"ours": ours, "raw": raw},
        repeats,
        clock=time.process_time,
    )
    plain = {"cached": plain_cached, "streaming": plain_streaming}
    took |= medians(plain, 1, clock=time.process_time)  # far slower: once is enough
    torch.set_num_threads(threads)
    speed = {name: size / 1e6 / seconds for name, seconds in took.items()}
    unit = "MB a CPU second over raw pyarrow reads"
    return [
        Line("(d) FeatureDataset", speed["ours"], speed["raw"], unit, ">= 0.9"),
        Line("(d) load_dataset, cached", speed["cached"], speed["raw"], unit),
        Line("(d) load_dataset, streaming", speed["streaming"], speed["raw"], unit),
    ]
