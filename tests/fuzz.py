"""Feed thousands of broken inputs to every reader of strangers' files.

python tests/fuzz.py --cases 2000 --seed 0

Each case is a real file with bytes changed, cut, doubled or exchanged. A reader may refuse it with
our own error or take it; anything else (another exception, more than 2 s, memory past the cap of
2 GiB above the start, a dead process) is a failure. Each reader runs in a process of its own.
"""

import argparse
import gzip
import json
import multiprocessing
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from pipeline.errors import PipelineError

SECONDS = 2.0
MEMORY = 2 * 2**30
TOKENS = [b"\x00", b"\xff\xff\xff\xff", b"{", b"}", b'"', b"\\ud800", b"null", b"1e999"]
TOKENS.append(b"[" * 2000)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A few random changes, small files and headers hit more often than the rest."""
    content = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        end = len(content) if chance.random() < 0.5 else min(len(content), 400)
        at = chance.randrange(end + 1)
        kind = chance.randrange(6)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << chance.randrange(8)
        elif kind == 1 and content:
            content[at % len(content)] = chance.randrange(256)
        elif kind == 2:
            del content[at : at + chance.choice([1, 4, 100, 10**6])]
        elif kind == 3:
            content[at:at] = chance.choice(TOKENS)
        elif kind == 4:
            content[at:at] = content[at : at + chance.choice([8, 64, 4096])]
        else:
            content[at : at + 8] = chance.randbytes(8)
    return bytes(content)


# ---- readers: a directory with sound files, which of them is broken, how it is read


def _gguf(base: Path) -> tuple[Path, Callable[[], Any]]:
    from pipeline.gguf import gguf_config, gguf_eos_ids, gguf_tokenizer, read_gguf
    from pipeline.models.nano import write_nano_gguf

    path = write_nano_gguf(base)[0]

    def read() -> None:
        file = read_gguf(path)
        gguf_config(file)
        gguf_eos_ids(file)
        gguf_tokenizer(file)

    return path, read


def _prompts(base: Path, name: str, data: bytes) -> tuple[Path, Callable[[], Any]]:
    from pipeline.prompts import read_prompts

    path = base / name
    path.write_bytes(data)
    return path, lambda: list(read_prompts(str(path)))


def _jsonl(base: Path) -> tuple[Path, Callable[[], Any]]:
    demo = (ROOT / "pipeline/data/demo_prompts.jsonl").read_bytes()
    return _prompts(base, "p.jsonl", demo[:20_000])


def _array(base: Path) -> tuple[Path, Callable[[], Any]]:
    demo = (ROOT / "pipeline/data/demo_prompts.jsonl").read_bytes().splitlines()
    return _prompts(base, "p.json", b"[" + b",\n".join(demo[:20]) + b"]")


def _packed(base: Path, pack: Callable[[bytes], bytes]) -> tuple[Path, Callable[[], Any]]:
    demo = (ROOT / "pipeline/data/demo_prompts.jsonl").read_bytes()
    return _prompts(base, "p.packed", pack(demo[:20_000]))


def _parquet(base: Path) -> tuple[Path, Callable[[], Any]]:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"q {i}"}]} for i in range(200)]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return _prompts(base, "p.parquet", sink.getvalue().to_pybytes())


def _run_file(base: Path, run: Path, name: str) -> tuple[Path, Callable[[], Any]]:
    from pipeline.validate import validate

    out = shutil.copytree(run, base / "out")
    return out / name, lambda: validate(out).as_dict()


def _plan(base: Path, run: Path) -> tuple[Path, Callable[[], Any]]:
    from pipeline.manifest import RunFolder
    from pipeline.plan import read_plan

    out = shutil.copytree(run, base / "out")
    folder = RunFolder(out)
    return out / "plan" / "plan.json", lambda: (read_plan(folder), folder.read_commits())


def readers(run: Path) -> dict[str, Callable[[Path], tuple[Path, Callable[[], Any]]]]:
    shard = next(p.relative_to(run).as_posix() for p in sorted((run / "data").iterdir()))
    return {
        "GGUF": _gguf,
        "prompts as JSON lines": _jsonl,
        "prompts as a JSON array": _array,
        "prompts in gzip": lambda base: _packed(base, gzip.compress),
        "prompts in zstd": lambda base: _packed(base, zstandard.compress),
        "prompts as Parquet": _parquet,
        "plan": lambda base: _plan(base, run),
        "manifest": lambda base: _run_file(base, run, "manifest.json"),
        "commit record": lambda base: _run_file(base, run, "commits/train-00000.json"),
        "card": lambda base: _run_file(base, run, "README.md"),
        "shard": lambda base: _run_file(base, run, shard),
    }


def attack(reader: str, run: Path, cases: int, seed: int, results: Any) -> None:
    """One reader, in this process: sends what became of each case."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        path, read = readers(run)[reader](Path(scratch))
        sound = path.read_bytes()
        read()  # imports, caches
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        for number in range(cases):
            path.write_bytes(mutate(sound, random.Random(f"{seed} {reader} {number}")))
            results.put((number, "started"))
            started = time.monotonic()
            try:
                read()
                outcome = "taken"
            except PipelineError:
                outcome = "refused"
            except BaseException as error:
                outcome = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
            if time.monotonic() - started > SECONDS:
                outcome = f"FAILED: {time.monotonic() - started:.1f} s"
            if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > used + MEMORY:
                outcome = "FAILED: memory"
            results.put((number, outcome))


def fuzz(reader: str, run: Path, cases: int, seed: int) -> int:
    """Returns the number of failures, and prints one line."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    process = spawn.Process(target=attack, args=(reader, run, cases, seed, results))
    process.start()
    counts: Counter[str] = Counter()
    last = (-1, "nothing")
    while process.is_alive() or not results.empty():
        if results.empty():
            time.sleep(0.005)
            continue
        last = results.get()
        number, outcome = last
        if outcome != "started":
            counts[outcome.split(":")[0]] += 1
        if outcome.startswith("FAILED"):
            print(f"  {reader}, case {number}: {outcome}", flush=True)
    if last[1] == "started":
        print(f"  {reader}, case {last[0]}: FAILED: the process died ({process.exitcode})")
        counts["FAILED"] += 1
    print(f"{reader}: {json.dumps(counts)}", flush=True)
    return counts["FAILED"] + (cases if sum(counts.values()) == 0 else 0)


def make_run(base: Path) -> Path:
    from tiny_llama import write_tiny_llama

    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    (base / "model").mkdir()
    write_tiny_llama(base / "model")
    prompts = base / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings.check(
        target=str(base / "model"), prompts=str(prompts), out=str(base / "run"), max_new_tokens=8
    )
    execute(settings, LocalWorker)
    return base / "run"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="of each reader")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        run = make_run(Path(scratch))
        failed = sum(fuzz(name, run, options.cases, options.seed) for name in readers(run))
    print(f"{failed} failures")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
