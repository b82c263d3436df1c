"""Extraction beside the bare forward pass on one accelerator, as one table.

python jobs/bench_gpu.py                                  # E4B's geometry, random bfloat16, on cuda
python jobs/bench_gpu.py --device cpu --geometry tiny     # the same code on any machine

A single script for a machine that has torch >= 2.11, transformers >= 5.17 and pyarrow alone: no
Ray, no hub, no files of a model. Exits with 1 if a stored value is not the plain pass's.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma4TextConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@contextlib.contextmanager
def _without_datasets() -> Iterator[None]:
    """pipeline.schema imports `datasets` for the types of its files; none of them is made here."""
    stand_in = "datasets" not in sys.modules
    if stand_in:
        sys.modules["datasets"] = types.ModuleType("datasets")
    yield
    if stand_in:
        del sys.modules["datasets"]


with _without_datasets():
    from pipeline.batches import micro_batches, row_features, row_groups
    from pipeline.bench.rows import Row, random_rows
    from pipeline.errors import RowReject
    from pipeline.geometry import feature_layout
    from pipeline.layers import choose_layers
    from pipeline.models.hf import TransformersTarget
    from pipeline.schema import Layout, storage_type
    from pipeline.shards import ShardWriter, read_rows

# Gemma-4-E4B, and a small model of the same kinds of layers.
GEOMETRIES: dict[str, dict[str, Any]] = {
    "e4b": {
        "vocab_size": 262144,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 18,
        "sliding_window": 512,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 6,
        "sliding_window": 32,
    },
}
GOALS = {"mtp": 0.95, "mtp,dspark,eagle3": 0.90}
TOP_K, DEPTH = 64, 3
# Of the L2 norm of a column's row. A row alone runs through the kernels of the plain pass; in a
# batch others may run, and bfloat16 has 8 bits to differ in.
TOLERANCE_ALONE, TOLERANCE = 1e-3, 0.05


class PlainLayout(Layout):
    """A layout whose files have plain nested lists: the same bytes without `datasets`' types."""

    def arrow_schema(self, footer: Mapping[str, Any]) -> pa.Schema:
        return pa.schema([pa.field(c.name, storage_type(c)) for c in self.columns])


def build(geometry: str, device: torch.device) -> TransformersTarget:
    """A random bfloat16 Gemma-4 made on the device itself."""
    sizes = GEOMETRIES[geometry]
    blocks = range(1, sizes["num_hidden_layers"] + 1)
    config = Gemma4TextConfig(
        **sizes,
        vocab_size_per_layer_input=sizes["vocab_size"],
        layer_types=["full_attention" if i % 6 == 0 else "sliding_attention" for i in blocks],
        max_position_embeddings=131072,
        final_logit_softcapping=30.0,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return TransformersTarget(model.eval(), eos_ids=frozenset({1}))


def make_layout(target: TransformersTarget, features: str) -> PlainLayout:
    geometry, sets = target.geometry, features.split(",")
    layers = choose_layers(
        sets, [], num_layers=geometry.num_layers, architecture=geometry.architecture
    )
    made = feature_layout(geometry, sets, top_k=TOP_K, depth=DEPTH, layers=layers)
    return PlainLayout(schemas=made.schemas, columns=made.columns)


def extract(
    target: TransformersTarget, layout: Layout, rows: Sequence[Row], budget: int, path: Path
) -> None:
    """Rows into one file as a worker does it: a row group is written while the next is computed."""
    with ShardWriter(path, layout, {}) as writer, ThreadPoolExecutor(1) as background:
        written: Future[None] | None = None
        for group in row_groups(iter(rows), layout.stored_bytes_per_token):
            done = row_features(
                group, [0] * len(group), target, layout, top_k=TOP_K, batch_tokens=budget
            )
            if written is not None:
                written.result()
            bad = [row for row in done if isinstance(row, RowReject)]
            if bad:
                raise torch.OutOfMemoryError(str(bad[0]))
            written = background.submit(writer.write, done)  # type: ignore[arg-type]
        if written is not None:
            written.result()


@torch.inference_mode()
def bare(target: TransformersTarget, rows: Sequence[Row], budget: int) -> None:
    """`model(input_ids)` on the same micro-batches."""
    for batch in micro_batches([row["num_tokens"] for row in rows], budget):
        ids = np.stack([rows[i]["input_ids"] for i in batch]).astype(np.int64)
        target.model(input_ids=torch.from_numpy(ids).to(target.device), use_cache=False)


class Measured:
    """Seconds and peak device memory of one way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.peak = 0

    def __call__(self, run: Any, *, warm_up: bool) -> None:
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize()
            self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        if not warm_up:
            self.seconds.append(time.perf_counter() - started)


def measure(
    target: TransformersTarget, features: str, rows: Sequence[Row], budget: int, path: Path
) -> list[str]:
    """One line of the table; says so where a batch does not fit."""
    layout = make_layout(target, features)
    ours, theirs = Measured(target.device), Measured(target.device)
    tokens = sum(row["num_tokens"] for row in rows)
    try:
        for turn in range(4):
            theirs(lambda: bare(target, rows, budget), warm_up=turn == 0)
            ours(lambda: extract(target, layout, rows, budget, path), warm_up=turn == 0)
    except torch.OutOfMemoryError:
        return [features, f"{budget}", "does not fit", "", "", "", "", "", ""]
    finally:
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    took, bare_took = statistics.median(ours.seconds), statistics.median(theirs.seconds)
    logical = tokens * layout.bytes_per_token
    return [
        features,
        f"{budget}",
        f"{tokens / took:,.0f}",
        f"{tokens / bare_took:,.0f}",
        f"{bare_took / took:.2f}",
        f"{GOALS[features]:.2f}",
        f"{logical / took / 1e6:,.0f}",
        f"{path.stat().st_size / logical:.2f}",
        f"{ours.peak / 1e9:.1f} / {theirs.peak / 1e9:.1f}" if ours.peak else "-",
    ]


def encoding(
    target: TransformersTarget, features: str, rows: Sequence[Row], budget: int, path: Path
) -> str:
    """(c): MB of logical values a second that one thread encodes, of features already there."""
    layout = make_layout(target, features)
    (group, *_) = row_groups(iter(rows), layout.stored_bytes_per_token)
    done: Any = row_features(
        group, [0] * len(group), target, layout, top_k=TOP_K, batch_tokens=budget
    )
    seconds = []
    for _ in range(3):
        started = time.process_time()
        with ShardWriter(path, layout, {}) as writer:
            writer.write(done)
        seconds.append(time.process_time() - started)
    logical = sum(row["num_tokens"] for row in group) * layout.bytes_per_token
    speed = logical / statistics.median(seconds) / 1e6
    return f"(c) encoding {features}: {speed:,.0f} MB of values a CPU-second"


@torch.inference_mode()
def check(
    target: TransformersTarget, rows: Sequence[Row], budget: int, path: Path
) -> dict[str, float]:
    """Largest relative L2 error of any row, by stored column, against one plain pass a row.

    budget: tokens of a micro-batch; 1 stores each row from a pass of its own.
    """
    layout = make_layout(target, "mtp,dspark,eagle3")
    extract(target, layout, rows, budget, path)
    stored = read_rows(path, layout.columns)
    errors: dict[str, float] = {}
    wrong_top = tokens = 0
    for row, given in zip(stored, rows, strict=True):
        if not np.array_equal(row["input_ids"], given["input_ids"]):
            raise SystemExit("error: stored rows are not the given rows")
        ids = torch.tensor(row["input_ids"]).long().to(target.device)[None]
        out = target.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        plain = {"final_hidden": out.hidden_states[-1][0]}
        for name in row:
            if name.startswith("block_"):
                plain[name] = out.hidden_states[int(name.split("_")[1]) + 1][0]
        for kind in target.geometry.shared_kv:
            key, value = out.shared_kv_states[f"{kind}_attention"]
            plain |= {f"{kind}_key": key[0].transpose(0, 1)}
            plain |= {f"{kind}_value": value[0].transpose(0, 1)}
        for name, tensor in plain.items():
            expected = tensor.float().cpu().numpy()
            error = np.linalg.norm(row[name] - expected) / np.linalg.norm(expected)
            errors[name] = max(errors.get(name, 0.0), float(error))
        logprobs = torch.log_softmax(out.logits[0].float(), dim=-1)
        chosen = logprobs.gather(1, torch.tensor(row["teacher_top_ids"]).long().to(ids.device))
        gap = np.abs(chosen.cpu().numpy() - row["teacher_top_logprobs"]).max()
        errors["teacher_top_logprobs (absolute)"] = max(
            errors.get("teacher_top_logprobs (absolute)", 0.0), float(gap)
        )
        best = logprobs.amax(dim=-1).cpu().numpy()
        wrong_top += int((best - chosen[:, 0].cpu().numpy() > 2 * TOLERANCE).sum())
        tokens += len(best)
    errors["teacher arg-max that is none (share)"] = wrong_top / tokens
    return errors


def print_table(lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = zip(line, widths, strict=True)
        print("  ".join(cell.ljust(width) for cell, width in cells).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--geometry", default="e4b", choices=sorted(GEOMETRIES))
    parser.add_argument("--row-tokens", type=int, help="default 1024, tiny 64")
    parser.add_argument("--batch-tokens", help="default 4096,16384,32768; tiny 128,512")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: --device cuda: torch sees no GPU here; try --device cpu")
    tiny = options.geometry == "tiny"
    length = options.row_tokens or (64 if tiny else 1024)
    listed = options.batch_tokens or ("128,512" if tiny else "4096,16384,32768")
    budgets = [int(part) for part in listed.split(",")]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, ", end="")
    target = build(options.geometry, device)
    parameters = sum(p.numel() for p in target.model.parameters())
    print(f"{options.geometry}: {parameters / 1e9:.2f}B parameters, rows of {length} tokens")
    rows = random_rows(target.geometry.vocab_size, [length] * (2 * max(budgets) // length))
    head = ["(a) features", "batch", "tokens/s", "bare", "ratio", "goal"]
    lines = [[*head, "MB/s", "size", "(e) peak GB, bare"]]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "bench.parquet"
        checked = random_rows(target.geometry.vocab_size, [length, length // 2, length - 1, 7])
        wrong = []
        for how, budget, limit in (
            ("alone", 1, TOLERANCE_ALONE),
            ("in a batch", 4 * length, TOLERANCE),
        ):
            errors = check(target, checked, budget, path)
            said = {name: float(f"{error:.2g}") for name, error in errors.items()}
            print(f"stored rows {how} against a plain pass: {json.dumps(said)}")
            wrong += [name for name, error in errors.items() if not error <= limit]
        for features in GOALS:
            lines += [measure(target, features, rows, budget, path) for budget in budgets]
        print_table(lines)
        for features in GOALS:
            print(encoding(target, features, rows, min(budgets), path))
    if wrong:
        raise SystemExit(f"error: not the plain pass's values: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
