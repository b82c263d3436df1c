"""Break valid runs in hundreds of ways and see that `pipeline validate` finds every one.

python tests/mutants.py --count 400 --seed 0

First each rule's own corruption, which that rule must find; then `count` random mutants. Hashes,
records, names and the plan are made to fit again wherever that is possible, so that it is the
meaning that must give a mutant away. States that were exchanged or changed by valid values leave no
trace in the bytes: those mutants count as found if `--replay` of all rows finds them. Every rule
must speak at least once.
"""

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import mutations_states
import mutations_values
from corruptions_rows import CORRUPTIONS
from mutations import MUTATIONS
from tampering import Tampered

from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings
from pipeline.validate import RULES, Replay, Report, validate
from pipeline.validate.replay import REPLAY_RULES

__all__ = ["mutations_states", "mutations_values"]  # imported for the mutations they register

# A row group of 256 MiB is too big for a mutant; tests/test_validate.py lowers the limit instead.
SILENT = {"encoding.row_group"}
ALL_ROWS = 1000


def make_runs(base: Path) -> dict[str, Path]:
    """Two valid runs by their target model: the tests' tiny random Llama, and gemma4-nano.

    Both hold block outputs.
    """
    from tiny_llama import run_tiny_llama, write_tiny_llama

    model = base / "model"
    model.mkdir(parents=True)
    write_tiny_llama(model)
    held_out = (ROOT / "pipeline/data/gemma4-nano/held-out.jsonl").read_text().splitlines()
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(line + "\n" for line in [*held_out[:12], "not json"]))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "nano"),
        max_new_tokens=40,
        max_length=900,
        rollout_rows=5,
        shard_mb=1,
        features="mtp,dspark,eagle3",
    )
    execute(settings, LocalWorker)
    blocks = {"features": "mtp,eagle3", "layers": ["eagle3=0,1"]}
    llama = run_tiny_llama(model, base / "llama", **blocks)
    runs = {str(model): llama, "gemma4-nano": base / "nano"}
    assert all(validate(run).ok for run in runs.values())
    return runs


def rule_by_rule(llama: Path, base: Path) -> tuple[int, Counter[str]]:
    """How many rules found their own corruption, and how often each rule spoke."""
    found, spoke = 0, Counter[str]()
    for rule, corrupt in CORRUPTIONS.items():
        run = Tampered(llama, base / "mutant")
        corrupt(run)
        told = rules_of(validate(run.out))
        shutil.rmtree(run.out)
        found += rule in told
        spoke.update(told)
        if rule not in told:
            print(f"SURVIVED the corruption of {rule}", flush=True)
    return found, spoke


def rules_of(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


def hunt(count: int, seed: int, runs: dict[str, Path], base: Path) -> tuple[int, Counter[str]]:
    """How many of `count` random mutants were found, and how often each rule spoke."""
    found, spoke = 0, Counter[str]()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        name, change, needs_replay = MUTATIONS[number % len(MUTATIONS)]
        target = list(runs)[number // len(MUTATIONS) % len(runs)]
        run = Tampered(runs[target], base / "mutant")
        what = change(run, chance)
        report = validate(run.out)
        if report.ok and needs_replay:
            report = validate(run.out, replay=Replay(ALL_ROWS, target))
        shutil.rmtree(run.out)
        found += not report.ok
        spoke.update(rules_of(report))
        if report.ok:
            print(f"SURVIVED {number}: {name} of {Path(target).name}: {what}", flush=True)
    return found, spoke


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        base = Path(scratch)
        runs = make_runs(base)
        by_rule, spoke = rule_by_rule(runs[str(base / "model")], base)
        by_chance, also = hunt(options.count, options.seed, runs, base)
    spoke += also
    silent = {rule.id for rule in (*RULES, *REPLAY_RULES)} - spoke.keys() - SILENT
    print(f"{len(MUTATIONS)} kinds; rules that spoke: {dict(spoke.most_common())}")
    if silent:
        print(f"rules that never spoke: {sorted(silent)}")
    found, total = by_rule + by_chance, len(CORRUPTIONS) + options.count
    print(f"{found}/{total} found")
    if found != total or silent:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
