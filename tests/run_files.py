"""Reading back the folder of a run in tests."""

import json
from pathlib import Path
from typing import Any

from pipeline.geometry import Geometry, feature_layout
from pipeline.models.base import TargetModel
from pipeline.models.load import (
    TargetFiles,
    choose_backend,
    find_target,
    load_geometry,
    load_target,
)
from pipeline.settings import Settings
from pipeline.shards import read_rows


def load(
    files: TargetFiles, *, backend: str = "transformers", dtype: str = "float32"
) -> TargetModel:
    """A loaded target on the CPU, with id 258 (the tiny tokenizer's) ending answers."""
    return load_target(
        files,
        backend=backend,
        dtype=dtype,
        kv_cache_dtype="float16",
        device="cpu",
        threads=1,
        max_length=1024,
        eos_ids=frozenset({258}),
    )


def geometry_of_files(files: TargetFiles, settings: Settings | None = None) -> Geometry:
    """What a run with these settings plans for; float32 on transformers without any."""
    return load_geometry(
        files,
        backend=choose_backend(files, settings.backend if settings else "transformers"),
        dtype=settings.dtype if settings else "float32",
        kv_cache_dtype=settings.kv_cache_dtype if settings else "float16",
    )


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


def options_of(settings: Settings) -> list[str]:
    """The command line's words for the settings that are not a default; yes-or-no ones left out."""
    return [
        word
        for name, value in settings.model_dump(exclude_defaults=True).items()
        if not isinstance(value, bool)
        for part in (value if isinstance(value, list) else [value])
        for word in ("--" + name.replace("_", "-"), str(part))
    ]


def shard_rows(out: Path) -> list[dict[str, Any]]:
    manifest = json.loads((out / "manifest.json").read_text())
    settings = settings_of(out)
    geometry = geometry_of_files(find_target(settings.target), settings)
    layout = feature_layout(
        geometry,
        settings.features.split(","),
        top_k=settings.topk,
        depth=settings.depth,
        layers=manifest["semantics"]["layers"],
    )
    return [
        row
        for shard in manifest["shards"]
        for row in read_rows(out / shard["file"], layout.columns)
    ]
