"""How soon work begins: from the first import to the first task, and loading a GGUF model."""

import json
import subprocess
import sys
from pathlib import Path

import gguf

from pipeline.bench.model import DEMO_PROMPTS, load
from pipeline.bench.timing import Line, medians
from pipeline.models.load import find_target

# Says when the first task begins, and how long loading the model took before.
_CODE = """
import json, sys, time
started = time.perf_counter()
import pipeline.worker
from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings

loading, first = [], []
load_target, work = pipeline.worker.load_target, pipeline.worker.Worker.execute

def timed_load(*args, **names):
    began = time.perf_counter()
    target = load_target(*args, **names)
    loading.append(time.perf_counter() - began)
    return target

def timed_work(worker, unit):
    first.append(time.perf_counter())
    return work(worker, unit)

pipeline.worker.load_target, pipeline.worker.Worker.execute = timed_load, timed_work
target, prompts, out = sys.argv[1:]
settings = dict(target=target, prompts=prompts, out=out, limit=1, max_new_tokens=1)
execute(Settings.check(backend="transformers", **settings), LocalWorker)
print(json.dumps(first[0] - started - sum(loading)))
"""
START_LIMIT = 3.0  # seconds


def start_up(target: str, scratch: Path) -> Line:
    """Seconds from the first import to a worker's first task, without loading the model."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, target, str(DEMO_PROMPTS), str(scratch / "started")],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = json.loads(done.stdout.splitlines()[-1])
    return Line("(e) start-up without the model", seconds, START_LIMIT, "s over 3 s", "<= 1")


def gguf_load(target: str, threads: int, repeats: int) -> Line | None:
    """MB/s of loading a GGUF model with transformers over reading and dequantising every tensor.

    None where the target model is no GGUF file.
    """
    files = find_target(target)
    if files.kind != "gguf":
        return None
    tensors = gguf.GGUFReader(files.path).tensors

    def bare() -> None:
        for tensor in tensors:
            gguf.dequantize(tensor.data, tensor.tensor_type)

    ways = {
        "ours": lambda: load(target, "transformers", max_length=1024, threads=threads),
        "bare": bare,
    }
    took = medians(ways, repeats)
    size = files.path.stat().st_size / 1e6
    what = f"(e) loading {files.path.name}"
    unit = "MB/s over reading and dequantising alone"
    return Line(what, size / took["ours"], size / took["bare"], unit, ">= 0.5")
