"""Print the table of docs/performance.md: every speed beside what bounds it, in one run.

python -m pipeline.bench [--quick] [--target smollm2-135m] [--threads 2]
"""

import argparse
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pipeline.bench import memory, model, starting, storage, workers
from pipeline.bench.rows import random_rows
from pipeline.bench.timing import Line
from pipeline.geometry import feature_layout
from pipeline.models.llamacpp import LlamaCppTarget


def lines(target: str, *, quick: bool, threads: int, scratch: Path) -> Iterator[Line]:
    repeats = 2 if quick else 7
    torch.set_num_threads(threads)
    prompts = model.real_prompts(target, 12 if quick else 48)
    most = 32 if quick else 128
    longest = max(len(prompt.ids) for prompt in prompts) + most
    loaded: Any = model.load(target, "transformers", max_length=4096, threads=threads)
    yield from _model_lines(loaded, quick=quick, repeats=repeats, scratch=scratch)
    yield model.transformers_rollouts(loaded, prompts, most, min(repeats, 3))
    if importlib.util.find_spec("llama_cpp") is not None:
        served = model.load(target, "llamacpp", max_length=8 * longest, threads=threads)
        assert isinstance(served, LlamaCppTarget)
        with served:
            yield model.llamacpp_rollouts(served, prompts, most, min(repeats, 3))
    layout = feature_layout(loaded.geometry, ["mtp"], top_k=64, depth=3)
    rows = random_rows(loaded.geometry.vocab_size, [256] * (16 if quick else 64))
    done = storage.features_of(loaded, layout, rows)
    footer = model.footer_of(loaded, layout, "mtp", {})
    yield from storage.encoding(done, layout, footer, scratch, repeats)
    out, line = workers.runs(target, [160] * (48 if quick else 192), scratch)
    yield line
    columns = ["final_hidden", "full_key", "full_value"]
    yield from storage.loaders(out, columns, scratch, repeats)
    yield workers.loading(out, columns, repeats)
    yield starting.start_up(target, scratch)
    if (line_or_none := starting.gguf_load(target, threads, repeats)) is not None:
        yield line_or_none
    counts = (32, 64) if quick else (64, 512)
    yield from memory.peaks(target, threads=threads, rows=counts, scratch=scratch)


def _model_lines(loaded: Any, *, quick: bool, repeats: int, scratch: Path) -> Iterator[Line]:
    mixed = [64, 96, 128, 160, 192, 224, 256, 320] * (1 if quick else 6)
    shapes = [("mtp", mixed, 4096), ("mtp,dspark,eagle3", mixed, 4096)]
    # (f) against row length and batch: the ratio must not fall as they grow.
    tokens = 2048 if quick else 8192
    shapes += [("mtp", [length] * (tokens // length), 4096) for length in (128, 512, 2048)]
    shapes += [("mtp", [256] * 8, budget) for budget in (256, 1024)]
    for features, lengths, budget in shapes:
        yield model.extraction(loaded, features, lengths, scratch, budget=budget, repeats=repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and rows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        found = []
        started = time.monotonic()
        for line in lines(
            options.target, quick=options.quick, threads=options.threads, scratch=Path(scratch)
        ):
            found.append(line)
            seconds = time.monotonic() - started
            console.print(f"{seconds:4.0f} s  {line.ratio:6.2f}  {line.what}", highlight=False)
    table = Table("what", "ours", "theirs", "ratio", "bar", "unit")
    for line in found:
        ours, theirs = f"{line.ours:,.1f}", f"{line.theirs:,.1f}"
        table.add_row(line.what, ours, theirs, f"{line.ratio:.2f}", line.bar, line.unit)
    console.print(table)
    if options.json:
        print(json.dumps([{**line._asdict(), "ratio": line.ratio} for line in found], indent=1))


if __name__ == "__main__":
    main()
