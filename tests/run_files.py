"""Reading back the folder of a run in tests."""

import json
from pathlib import Path
from typing import Any

from pipeline.geometry import feature_layout
from pipeline.models.load import find_target, load_geometry
from pipeline.settings import Settings
from pipeline.shards import read_rows


def data_files(out: Path) -> dict[str, bytes]:
    return {
        f"{folder}/{p.name}": p.read_bytes()
        for folder in ("data", "rollouts")
        for p in sorted((out / folder).iterdir())
    }


def settings_of(source: Path, /, **changes: Any) -> Settings:
    """The settings of an existing run, perhaps with another OUT or other values."""
    manifest = json.loads((source / "manifest.json").read_text())
    return Settings.check(**{**manifest["settings"], "out": str(source), **changes})


def shard_rows(out: Path) -> list[dict[str, Any]]:
    manifest = json.loads((out / "manifest.json").read_text())
    settings = settings_of(out)
    geometry = load_geometry(find_target(settings.target), settings.dtype)
    layout = feature_layout(geometry, ["mtp"], top_k=settings.topk, depth=settings.depth)
    return [
        row
        for shard in manifest["shards"]
        for row in read_rows(out / shard["file"], layout.columns)
    ]
