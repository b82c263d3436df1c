"""The same rows by one Ray worker and by two, and loading by one DataLoader worker and by two."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.utils.data import DataLoader

from pipeline.bench.conversations import write_conversations
from pipeline.bench.timing import Line, medians
from pipeline.loading import FeatureStream

JOB = Path(__file__).resolve().parents[2] / "jobs" / "extract_mtp.py"


def runs(target: str, lengths: Sequence[int], scratch: Path) -> tuple[Path, Line]:
    """Features of the same rows with one and with two workers of one thread; the second's OUT.

    Speed is of the shards alone: from when the first was begun until the last was published.
    """
    prompts = scratch / "conversations.jsonl"
    write_conversations(prompts, lengths)
    speeds = []
    for workers in (1, 2):
        out = scratch / f"workers-{workers}"
        options = {
            "--target": target,
            "--prompts": str(prompts),
            "--out": str(out),
            "--backend": "transformers",
            "--turns": "given",
            "--threads": "1",
            "--workers": str(workers),
            "--shard-mb": "4",
        }
        words = [word for option in options.items() for word in option]
        subprocess.run([sys.executable, str(JOB), *words], capture_output=True, check=True)
        speeds.append(_speed(out))
    return out, Line("(g) 2 workers", speeds[1], speeds[0], "tokens/s over 1 worker", ">= 1.8")


def _speed(out: Path) -> float:
    """Tokens a second of a run's shards, from the records and when they were written."""
    records = [json.loads(p.read_text()) for p in sorted((out / "commits").glob("train-*.json"))]
    written = [(out / record["file"]).stat().st_mtime for record in records]
    begun = min(t - record["seconds"] for t, record in zip(written, records, strict=True))
    return float(sum(record["tokens"] for record in records) / (max(written) - begun))


def loading(out: Path, columns: Sequence[str], repeats: int) -> Line:
    """MB/s of a DataLoader with two worker processes over one, the first batch's wait included.

    Every row is read several times, so that starting the processes weighs little.
    """
    epochs = 8
    size = epochs * sum(
        row[name].nbytes for row in FeatureStream(out, columns, shuffle=False) for name in columns
    )

    def read(count: int) -> None:
        stream = FeatureStream(out, columns, shuffle=False)
        loader = DataLoader(stream, batch_size=None, num_workers=count, persistent_workers=True)
        for _ in range(epochs):
            for _row in loader:
                pass

    took = medians({"two": lambda: read(2), "one": lambda: read(1)}, min(repeats, 3))
    two, one = (size / 1e6 / took[name] for name in ("two", "one"))
    return Line("(d) DataLoader, 2 workers", two, one, "MB/s over 1 worker", "> 1")
