"""How fast validation reads, beside plain Arrow scans of the same columns: ratios of one run.

python -m pipeline.validate.bench [--rows 120] [--rounds 3]

Writes shards of the shape of Gemma-4-E4B's MTP features into a scratch directory. They are random
and rules find a fault here and there: what is measured is the reading.
"""

import argparse
import resource
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipeline.geometry import Geometry, SharedKV, feature_layout
from pipeline.schema import BoundColumn, Layout, load_schema
from pipeline.semantics import semantics_of
from pipeline.shards import ShardWriter, file_sha256
from pipeline.validate.run import validate

FILES = 2
TOKENS = 400  # of a row
ROWS_PER_GROUP = 10
TOP_K, DEPTH = 64, 3
_KV = {
    "sliding": SharedKV(layer=22, kv_heads=2, head_dim=256, rope_type="default", rope_theta=1e4),
    "full": SharedKV(
        layer=23,
        kv_heads=2,
        head_dim=512,
        rope_type="proportional",
        rope_theta=1e6,
        rope_scaling={"partial_rotary_factor": 0.25},
    ),
}
E4B = Geometry(
    architecture="gemma4_text",
    num_layers=42,
    hidden_size=2560,
    vocab_size=262144,
    context_length=131072,
    sliding_window=512,
    logit_softcap=30.0,
    embedding_scale=2560**0.5,
    shared_kv=_KV,
    hidden_dtype="bfloat16",
    kv_dtype="bfloat16",
)


def random_column(column: BoundColumn, random: np.random.Generator) -> Any:
    """One row's values of a column: normal numbers rounded to bfloat16, ids, or text."""
    shape = (TOKENS, *column.inner_shape)
    if column.dtype == "string":
        return "stop"
    if not column.shape:
        return TOKENS if column.name == "num_tokens" else 1
    if column.name == "teacher_top_logprobs":  # half the mass on the first, and so on
        return np.tile(
            np.float32(-np.log(2.0)) * np.arange(1, TOP_K + 1, dtype=np.float32), (TOKENS, 1)
        )
    if column.name == "teacher_top_ids":
        return np.tile(np.arange(TOP_K, dtype=np.int32), (TOKENS, 1))
    if column.stored_as == "float32":
        values = random.standard_normal(shape, dtype=np.float32)
        if column.name.endswith("_value"):  # RMS 1 a vector, as Gemma-4's norm leaves it
            values /= np.sqrt(np.mean(np.square(values), axis=-1, keepdims=True))
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return random.integers(0, 2, shape).astype(column.stored_as)


def write_shard(path: Path, layout: Layout, rows: int, seed: int) -> None:
    """A file of `rows` rows with our footer."""
    random = np.random.default_rng(seed)
    footer = {
        "fingerprint": "0" * 64,
        "geometry": E4B.as_dict(),
        "features": "mtp",
        "top_k": TOP_K,
        "depth": DEPTH,
        "semantics": semantics_of(
            E4B, layers={}, generated_by="transformers", scored_by="transformers"
        ).as_dict(),
        "schemas": {s.ref: s.digest for s in map(load_schema, ("common", "mtp"))},
    }
    with ShardWriter(path, layout, footer) as writer:
        for start in range(0, rows, ROWS_PER_GROUP):
            group = [
                {c.name: random_column(c, random) for c in layout.columns}
                for _ in range(min(ROWS_PER_GROUP, rows - start))
            ]
            named = [{**row, "sample_id": f"{seed}-{start + i}"} for i, row in enumerate(group)]
            writer.write(named)


def scan(path: Path) -> int:
    """Read every column of every row group with checksums; returns the rows."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        return sum(file.read_row_group(i).num_rows for i in range(file.num_row_groups))


def scan_and_hash(path: Path) -> int:
    """Also the file's SHA-256, beside the reading: all the checksums that validation verifies."""
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(file_sha256, path)
        rows = scan(path)
        digest.result()
    return rows


def seconds_of(work: Any) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    layout = feature_layout(E4B, ["mtp"], top_k=TOP_K, depth=DEPTH)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        paths = [Path(scratch) / f"shard-{i}.parquet" for i in range(FILES)]
        for i, path in enumerate(paths):
            write_shard(path, layout, options.rows // FILES, i)
        size = sum(path.stat().st_size for path in paths)
        raw = options.rows * TOKENS * layout.stored_bytes_per_token
        print(f"{FILES} files, {size / 1e6:,.0f} MB, {raw / 1e6:,.0f} MB uncompressed")
        with ProcessPoolExecutor(FILES, get_context("spawn")) as pool:
            list(pool.map(scan, paths))  # processes have started, files are in the page cache
            ways = {
                "page checksums, 1 process": lambda: [scan(path) for path in paths],
                "and SHA-256, 1 process": lambda: [scan_and_hash(path) for path in paths],
                "validate, 1 process": lambda: validate(scratch, processes=1),
                f"page checksums, {FILES} processes": lambda: list(pool.map(scan, paths)),
                f"and SHA-256, {FILES} processes": lambda: list(pool.map(scan_and_hash, paths)),
                f"validate, {FILES} processes": lambda: validate(scratch, processes=FILES),
            }
            took: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(options.rounds):
                for name, work in ways.items():
                    took[name].append(seconds_of(work))
    medians = {name: statistics.median(times) for name, times in took.items()}
    for name, seconds in medians.items():
        print(f"{name:28} {seconds:6.2f} s  {size / 1e6 / seconds:7,.0f} MB/s")
    for count in ("1 process", f"{FILES} processes"):
        ratios = [
            medians[f"{way}, {count}"] / medians[f"validate, {count}"]
            for way in ("page checksums", "and SHA-256")
        ]
        print(
            f"{count}: validate reads at {ratios[0]:.2f} of the speed of a scan with page "
            f"checksums, {ratios[1]:.2f} of one with SHA-256 too"
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    print(f"peak memory of this process {peak:,.0f} MB")


if __name__ == "__main__":
    main()
