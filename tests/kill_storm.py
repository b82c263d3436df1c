"""Kill runs at random moments, resume them, and compare every byte with an undisturbed run.

python tests/kill_storm.py --rounds 100 --seed 0

A round is one run of a tiny target model: it is killed with SIGKILL at a random moment and, if
that ended it, started again. In every third round the run is on Ray, and driver or worker is
killed; in the others the run is one process. Some rounds are killed several times.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.update(RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import psutil

from pipeline.settings import Settings

RAY_EVERY = 3  # of so many rounds one is on Ray
FORKS = multiprocessing.get_context("forkserver")


def run_alone(settings: Settings) -> None:
    from pipeline.execute import LocalWorker, execute

    execute(settings, LocalWorker)


def run_on_ray(settings: Settings, address: str) -> None:
    import ray

    from jobs.ray_pool import RayPool
    from pipeline.execute import execute

    ray.init(address=address, log_to_driver=False, configure_logging=False)
    execute(settings, lambda run: RayPool(run.spec, settings, lambda line: None))
    ray.shutdown()


def start(settings: Settings, address: str | None) -> BaseProcess:
    arguments = (settings,) if address is None else (settings, address)
    process = FORKS.Process(target=run_alone if address is None else run_on_ray, args=arguments)
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(300)
    if process.exitcode != 0:
        raise SystemExit(f"a run that was left alone ended with {process.exitcode}")


def workers() -> list[psutil.Process]:
    """The actor processes of our own cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::WorkerActor"):
                found.append(process)
    return found


def disturb(
    settings: Settings, address: str | None, seconds: float, chance: random.Random
) -> list[str]:
    """One round up to a finished run; returns what was killed while at work."""
    killed: list[str] = []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        process = start(settings, address)
        process.join(chance.uniform(0, seconds))
        victims = workers() if address is not None and chance.random() < 0.5 else []
        if victims:
            chance.choice(victims).kill()
            killed.append("worker")
            finish(process)
        elif process.exitcode is None:
            process.kill()
            killed.append("driver")
            process.join()
    finish(start(settings, address))
    return killed


def files_of(out: Path) -> dict[str, bytes]:
    return {
        f"{folder}/{path.name}": path.read_bytes()
        for folder in ("data", "rollouts", "plan")
        for path in sorted((out / folder).iterdir())
    }


def write_prompts(path: Path) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choices("ab cdé日\n", k=chance.randint(5, 400))) for _ in range(24)]
    rows = [
        {"id": f"r{i}", "messages": [{"role": "user", "content": f"{i} {text}"}]}
        for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def tiny_settings(base: Path) -> Settings:
    from tiny_llama import write_tiny_llama

    (base / "model").mkdir()
    write_tiny_llama(base / "model")
    write_prompts(base / "prompts.jsonl")
    return Settings.check(
        target=str(base / "model"),
        prompts=str(base / "prompts.jsonl"),
        out=str(base / "clean"),
        max_new_tokens=48,
        temperature=1.0,
        rollout_rows=2,
        shard_mb=1,
        workers=2,
    )


def storm(rounds: int, seed: int, base: Path, address: str) -> int:
    """Returns how many rounds ended with the bytes of the undisturbed run."""
    settings = tiny_settings(base)
    seconds: dict[str | None, float] = {}
    warm = FORKS.Process(target=time.time)  # the first fork imports torch
    warm.start()
    finish(warm)
    for where in (None, address):
        clean = settings.model_copy(update={"out": str(base / f"clean-{where is None}")})
        began = time.monotonic()
        finish(start(clean, where))
        seconds[where] = time.monotonic() - began
    expected = files_of(base / "clean-True")
    assert expected == files_of(base / "clean-False")
    print(
        f"{len(expected)} files; alone {seconds[None]:.1f} s, on Ray {seconds[address]:.1f} s",
        flush=True,
    )
    same = kills = 0
    for number in range(rounds):
        chance = random.Random(f"{seed} {number}")
        out = base / f"round-{number}"
        where = address if number % RAY_EVERY == 0 else None
        told: list[str] = []
        while not told:  # where every kill came late, nothing was tried
            shutil.rmtree(out, ignore_errors=True)
            told = disturb(
                settings.model_copy(update={"out": str(out)}), where, seconds[where], chance
            )
        kills += len(told)
        identical = files_of(out) == expected
        same += identical
        print(
            f"round {number}: {'Ray' if where else 'one process'}, killed {'+'.join(told)}: "
            f"{'identical' if identical else 'DIFFERENT'}",
            flush=True,
        )
        if identical:
            shutil.rmtree(out)
    print(f"{kills} kills")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    FORKS.set_forkserver_preload(["pipeline.execute", "jobs.ray_pool"])
    base = Path(tempfile.mkdtemp(prefix="kill-storm-"))
    cluster = _start_cluster()
    try:
        same = storm(options.rounds, options.seed, base, cluster.address)
    finally:
        cluster.shutdown()
    print(f"{same}/{options.rounds} identical")
    if same != options.rounds:
        raise SystemExit(f"different files are in {base}")
    shutil.rmtree(base)


def _start_cluster() -> Any:
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = str(ROOT)  # of every worker
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    return Cluster(initialize_head=True, head_node_args=head)


if __name__ == "__main__":
    main()
