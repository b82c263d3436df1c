"""Peak memory of extraction, in processes of their own, over that of the loaded model alone."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from pipeline.bench.timing import Line

# Loading peaks above what follows, so each measurement starts from what is in use (Linux's VmHWM).
_CODE = """
import json, sys
from pathlib import Path
import torch
from pipeline.bench import model
from pipeline.bench.run import extract_file

def peak(run):
    Path("/proc/self/clear_refs").write_text("5")
    run()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000

@torch.inference_mode()
def bare():
    ids = torch.ones((16, 256), dtype=torch.long)
    loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)

target, threads, rows, scratch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.set_num_threads(threads)
loaded = model.load(target, "transformers", max_length=4096, threads=threads)
peak(bare)  # gives back what loading left
first = peak(bare)
print(json.dumps([first, peak(lambda: extract_file(loaded, rows, 256, Path(scratch)))]))
"""


def peaks(target: str, *, threads: int, rows: Sequence[int]) -> list[Line]:
    """Peak of extracting few and many rows of 256 tokens, over a bare pass of one micro-batch."""
    found = []
    for count in rows:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            done = subprocess.run(
                [sys.executable, "-c", _CODE, target, str(threads), str(count), scratch],
                capture_output=True,
                text=True,
                check=True,
            )
        before, after = json.loads(done.stdout.splitlines()[-1])
        bar = "+ one row group + 300 MB"
        found.append(
            Line(
                f"(e) peak memory, {count} rows of 256",
                after,
                before,
                "MB over the model and one batch",
                bar,
            )
        )
    return found
