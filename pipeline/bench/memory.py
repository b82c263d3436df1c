"""Peak memory of extraction, in processes of their own, over that of the loaded model alone."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from pipeline.bench.timing import Line

_CODE = """
import json, resource, sys
from pathlib import Path
from pipeline.bench import model
target, threads, rows, scratch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import torch
torch.set_num_threads(threads)
loaded = model.load(target, "transformers", max_length=4096, threads=threads)
with torch.inference_mode():
    ids = torch.ones((16, 256), dtype=torch.long)
    loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
if rows:
    from pipeline.bench.run import extract_file
    extract_file(loaded, rows, 256, Path(scratch))
print(json.dumps([before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000]))
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
