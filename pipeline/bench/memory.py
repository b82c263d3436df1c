"""Peak memory of extracting a shard, in a process of its own, beside what it may use."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.bench.conversations import write_conversations
from pipeline.bench.timing import Line
from pipeline.shards import ROW_GROUP_BYTES

ALLOWANCE = 300 * 2**20  # beyond the model, two micro-batches and a row group

# Loading peaks above what follows, so each measurement starts from what is in use (Linux's VmHWM).
_CODE = """
import json, sys
from pathlib import Path
import torch
from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings
from pipeline.tasks import ShardTask
from pipeline.worker import Worker

BATCH = (16, 256)  # rows, tokens: a micro-batch

def status(name):
    return 1000 * int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])

def peak(run):
    Path("/proc/self/clear_refs").write_text("5")
    run()
    return status("VmHWM:")

@torch.inference_mode()
def bare(model):  # without the LM head: torch may take more for it than for all else
    model.base_model(input_ids=torch.ones(BATCH, dtype=torch.long), use_cache=False)

def measured(worker, unit):
    done = []
    run = lambda: done.append(work(worker, unit))
    if isinstance(unit, ShardTask):
        bare(worker.target.model)  # gives back what loading left
        before = status("VmRSS:")
        batch = peak(lambda: bare(worker.target.model)) - before
        print(json.dumps([before, batch, peak(run)]))
    else:
        run()
    return done[0]

work, Worker.execute = Worker.execute, measured
target, threads, prompts, out = sys.argv[1:]
settings = dict(target=target, prompts=prompts, out=out, threads=int(threads), turns="given")
tokens = BATCH[0] * BATCH[1]
settings |= dict(backend="transformers", batch_tokens=tokens, shard_mb=4096, seed=1)
execute(Settings.check(**settings), LocalWorker)
"""


def peaks(target: str, *, threads: int, rows: Sequence[int], scratch: Path) -> list[Line]:
    """Peak of extracting few and many rows over what is allowed; it must not grow with rows."""
    found = []
    for count in rows:
        prompts, out = scratch / f"{count}.jsonl", scratch / f"run-{count}"
        write_conversations(prompts, [160] * count)
        done = subprocess.run(
            [sys.executable, "-c", _CODE, target, str(threads), str(prompts), str(out)],
            capture_output=True,
            text=True,
            check=True,
        )
        last = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("["))
        before, batch, peak = json.loads(last)
        allowed = before + 2 * batch + ROW_GROUP_BYTES + ALLOWANCE
        found.append(
            Line(
                f"(e) peak memory, a shard of {count} rows",
                peak / 1e6,
                allowed / 1e6,
                "MB over model + 2 batches + row group + 300 MiB",
                "<= 1",
            )
        )
    return found
