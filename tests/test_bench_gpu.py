"""jobs/bench_gpu.py as the lent machine runs it, on the CPU and a tiny geometry."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Runs the script where only torch, transformers and pyarrow may be imported.
ALONE = """
import sys
MISSING = {"ray", "gguf", "datasets", "pydantic", "typer", "rich", "llama_cpp", "zstandard"}
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in MISSING:
            return self.finder.find_spec(name, path, target)
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.path.insert(0, "jobs")
import bench_gpu
BREAK
sys.argv = ["bench_gpu.py", "--device", "cpu", "--geometry", "tiny", "--batch-tokens", "128",
            "--row-tokens", "48"]
bench_gpu.main()
"""


def run(breaking: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", ALONE.replace("BREAK", breaking)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_it_runs_without_ray_and_the_hub_and_finds_the_stored_values_right() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    alone, batched = (
        json.loads(line.partition("pass: ")[2])
        for line in done.stdout.splitlines()
        if line.startswith("stored rows")
    )
    columns = {"final_hidden", "sliding_key", "sliding_value", "full_key", "full_value"}
    assert columns | {"block_1_hidden"} <= alone.keys() == batched.keys()
    assert max(alone.values()) <= 1e-3 and max(batched.values()) <= 0.05
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("mtp")]
    assert [line[:2] for line in lines] == [["mtp", "128"], ["mtp,dspark,eagle3", "128"]]
    for line in lines:
        tokens, bare, ratio = (float(word.replace(",", "")) for word in line[2:5])
        assert abs(ratio - tokens / bare) < 0.01
    assert len(re.findall(r"\(c\) encoding .* MB of values a CPU-second", done.stdout)) == 2


def test_it_tells_a_wrong_value() -> None:
    """K and V of the sliding layer one block earlier: plausible numbers, wrong block."""
    done = run(
        "import pipeline.models.hf as hf\n"
        "def earlier(model, geometry_of=hf.geometry_of):\n"
        "    from dataclasses import replace\n"
        "    geometry = geometry_of(model)\n"
        "    wrong = replace(geometry.shared_kv['sliding'], layer=3)\n"
        "    return replace(geometry, shared_kv={**geometry.shared_kv, 'sliding': wrong})\n"
        "hf.geometry_of = earlier\n"
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    wrong = "sliding_key, sliding_value"
    assert said == f"error: not the plain pass's values: {wrong}, {wrong}"  # alone and in a batch
