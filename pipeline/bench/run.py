"""One shard extracted as a worker does it, for measuring its memory."""

from pathlib import Path
from typing import Any

from pipeline.bench.model import footer_of, random_rows
from pipeline.extract import extract_rows, row_groups
from pipeline.geometry import feature_layout
from pipeline.settings import Settings
from pipeline.shards import ShardWriter


def extract_file(model: Any, rows: int, length: int, scratch: Path) -> None:
    settings = Settings.check(target="-", prompts="-", out="-", seed=1)
    layout = feature_layout(model.geometry, ["mtp"], top_k=64, depth=3)
    footer = footer_of(model, layout, "mtp", {})
    todo = iter(random_rows(model.geometry.vocab_size, [length] * rows))
    with ShardWriter(scratch / "x.parquet", layout, footer) as writer:
        for group in row_groups(todo, layout.stored_bytes_per_token):
            done, _ = extract_rows(group, model, layout, settings)
            writer.write(done)
