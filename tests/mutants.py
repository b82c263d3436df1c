"""Break valid runs in hundreds of ways and see that `pipeline validate` finds every one.

python tests/mutants.py --count 300 --seed 0

Hashes, records and names are made to fit again wherever that is possible, so that it is the meaning
that must give a mutant away. States that were exchanged or changed by valid values leave no trace
in the bytes: those mutants count as found if `--replay` of all rows finds them.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import pyarrow.parquet as pq
from tampering import Row, Tampered, retarget

from pipeline.execute import LocalWorker, execute
from pipeline.settings import Settings
from pipeline.validate import Replay, validate

Mutation = Callable[[Tampered, random.Random], str]
MUTATIONS: list[tuple[str, Mutation, bool]] = []  # name, what it does, whether it needs replay


def mutation(*, replay: bool = False) -> Callable[[Mutation], Mutation]:
    """Register a mutation; it returns what exactly it did."""

    def register(function: Mutation) -> Mutation:
        MUTATIONS.append((function.__name__, function, replay))
        return function

    return register


def some_file(run: Tampered, chance: random.Random, kind: str = "train") -> str:
    return chance.choice(sorted(p.stem for p in (run.out / "commits").glob(f"{kind}*.json")))


def some_row(run: Tampered, chance: random.Random) -> tuple[str, list[Row], Row]:
    name = some_file(run, chance)
    rows = run.rows(name)
    return name, rows, chance.choice(rows)


def some_token(row: Row, chance: random.Random, first: int = 0) -> int:
    return chance.randrange(first, row["num_tokens"])


def some_index(values: Any, chance: random.Random) -> tuple[int, ...]:
    return tuple(chance.randrange(size) for size in values.shape)


# ---- bytes, without mending any record


@mutation()
def flip_a_bit(run: Tampered, chance: random.Random) -> str:
    path = run.path(some_file(run, chance, ""))
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"{path.name}: byte {at}"


@mutation()
def truncate(run: Tampered, chance: random.Random) -> str:
    path = run.path(some_file(run, chance, ""))
    kept = chance.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:kept])
    return f"{path.name}: {kept} bytes kept"


@mutation()
def remove_a_file(run: Tampered, chance: random.Random) -> str:
    path = run.path(some_file(run, chance, ""))
    path.unlink()
    return path.name


@mutation()
def copy_a_file(run: Tampered, chance: random.Random) -> str:
    path = run.path(some_file(run, chance, ""))
    shutil.copy(path, path.with_name(f"copy-{path.name}"))
    return path.name


# ---- records


@mutation()
def change_a_number_of_a_record(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance, "")
    key = chance.choice(["rows", "tokens", "supervised_tokens", "bytes"])
    run.edit_json(f"commits/{name}.json", **{key: run.commit(name)[key] + chance.choice([-1, 1])})
    return f"{name}: {key}"


@mutation()
def change_a_digest_of_a_record(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance, "")
    key = chance.choice(["sha256", "ids_sha256", "fingerprint"])
    run.record(name, **{key: f"{chance.randrange(16**64):064x}"})
    return f"{name}: {key}"


@mutation()
def change_the_manifest(run: Tampered, chance: random.Random) -> str:
    key = chance.choice(["rows_in", "rows_out", "tokens", "fingerprint", "complete"])
    old = run.json("manifest.json")[key]
    new = "f" * 64 if key == "fingerprint" else False if key == "complete" else old + 1
    run.edit_json("manifest.json", **{key: new})
    return key


@mutation()
def drop_a_record(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance, "")
    (run.out / "commits" / f"{name}.json").unlink()
    return name


@mutation()
def drop_a_reject(run: Tampered, chance: random.Random) -> str:
    path = run.out / "rejects.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if not lines:
        lines = [json.dumps({"source": "x", "sample_id": "x", "reason": "bad_json", "detail": ""})]
        path.write_text(lines[0] + "\n")
        return "added one"
    gone = chance.randrange(len(lines))
    path.write_text("".join(lines[:gone] + lines[gone + 1 :]))
    return f"line {gone}"


# ---- rows, with every record mended


@mutation()
def drop_a_row(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    run.write(name, [r for r in rows if r is not row] or [dict(row, sample_id="other")])
    return f"{name}: {row['sample_id']}"


@mutation()
def double_a_row(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    run.write(name, [*rows, row])
    return f"{name}: {row['sample_id']}"


@mutation()
def exchange_two_rows(run: Tampered, chance: random.Random) -> str:
    name = max(("train-00000",), key=lambda n: len(run.rows(n)))
    rows = run.rows(name)
    a, b = chance.sample(range(len(rows)), 2)
    rows[a], rows[b] = rows[b], rows[a]
    run.write(name, rows)
    return f"{name}: {a} and {b}"


@mutation()
def rename_a_row(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    old, row["sample_id"] = row["sample_id"], f"x{chance.random()}"
    run.write(name, rows)
    return f"{name}: {old}"


@mutation()
def change_a_scalar(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    key = chance.choice(["position_offset", "finish_reason", "on_policy", "source"])
    if key == "finish_reason":
        row[key] = "length" if row[key] == "stop" else "stop"
    elif key == "source":
        row[key] += "0"
    else:
        row[key] = row[key] ^ 1
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {key}"


# ---- ids, masks, targets


def _shift(values: Any, chance: random.Random) -> int:
    by = chance.choice([-2, -1, 1, 2])
    values[:] = np.roll(values, by, axis=0)
    return by


@mutation()
def change_a_token(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    at = some_token(row, chance)
    row["input_ids"][at] ^= 1
    retarget(row)
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{at}]"


@mutation()
def shift_the_loss_mask(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    by = _shift(row["loss_mask"], chance)
    retarget(row)
    run.write(name, rows)
    return f"{name}: {row['sample_id']} by {by}"


@mutation()
def flip_the_loss_mask_somewhere(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    at = some_token(row, chance)
    row["loss_mask"][at] ^= 1
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{at}]"


@mutation()
def shift_the_targets(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    by = _shift(row["target_ids"], chance)
    run.write(name, rows)
    return f"{name}: {row['sample_id']} by {by}"


@mutation()
def flip_a_target_mask(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    at = some_index(row["target_mask"], chance)
    row["target_mask"][at] ^= 1
    run.write(name, rows)
    return f"{name}: {row['sample_id']}{at}"


@mutation()
def change_a_target(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    at = some_index(row["target_ids"], chance)
    row["target_ids"][at] += 1
    run.write(name, rows)
    return f"{name}: {row['sample_id']}{at}"


# ---- teacher rows


@mutation()
def shift_the_teacher(run: Tampered, chance: random.Random) -> str:
    """By one token: the classic off-by-one."""
    name, rows, row = some_row(run, chance)
    by = chance.choice([-1, 1])
    for column in ("teacher_top_ids", "teacher_top_logprobs", "teacher_tail_mass"):
        row[column][:] = np.roll(row[column], by, axis=0)
    run.write(name, rows)
    return f"{name}: {row['sample_id']} by {by}"


@mutation()
def exchange_two_teacher_ids(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    # Where the token itself is among them: elsewhere two ids with other values leave no trace.
    ids, tokens = row["teacher_top_ids"], row["input_ids"]
    places = [t for t in range(row["num_tokens"] - 1) if tokens[t + 1] in ids[t]]
    t = chance.choice(places)
    k = int(np.flatnonzero(ids[t] == tokens[t + 1])[0])
    other = max(range(ids.shape[1]), key=lambda j: abs(_lp(row, t, j) - _lp(row, t, k)))
    ids[t, k], ids[t, other] = ids[t, other], ids[t, k]
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}] {k} and {other}"


def _lp(row: Row, t: int, k: int) -> float:
    return float(row["teacher_top_logprobs"][t, k])


@mutation()
def change_a_logprob(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    t = some_token(row, chance)
    row["teacher_top_logprobs"][t, 0] -= 0.5
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}]"


@mutation()
def change_a_tail(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    t = some_token(row, chance)
    row["teacher_tail_mass"][t] += 0.02
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}]"


@mutation()
def change_a_token_logprob(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    ids, tokens = row["teacher_top_ids"], row["input_ids"]
    t = chance.choice([t for t in range(1, row["num_tokens"]) if tokens[t] in ids[t - 1]])
    row["token_logprobs"][t] -= 0.25
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}]"


@mutation()
def raise_a_vocabulary_id(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    at = some_index(row["teacher_top_ids"], chance)
    row["teacher_top_ids"][at] = run.footer(name)["geometry"]["vocab_size"] + chance.randrange(9)
    run.write(name, rows)
    return f"{name}: {row['sample_id']}{at}"


# ---- states


def some_states(row: Row, chance: random.Random) -> str:
    return chance.choice([n for n in row if n == "final_hidden" or n.endswith(("_key", "_value"))])


@mutation()
def put_in_a_nan(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    row[column][some_index(row[column], chance)] = chance.choice([np.nan, np.inf, -np.inf])
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}"


@mutation()
def empty_a_vector(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    row[column][some_token(row, chance)] = 0
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}"


@mutation()
def leave_the_dtype(run: Tampered, chance: random.Random) -> str:
    """A value that no bfloat16 has: float32 that was never rounded."""
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    at = some_index(row[column], chance)
    row[column].view(np.uint32)[at] |= 1
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}{at}"


@mutation()
def freeze_the_states(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    row[column][:] = row[column][some_token(row, chance)]
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}"


@mutation(replay=True)
def shift_the_states(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    by = _shift(row[column], chance)
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column} by {by}"


@mutation(replay=True)
def exchange_key_and_value(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    kind = chance.choice([n[:-4] for n in row if n.endswith("_key")])
    row[f"{kind}_key"], row[f"{kind}_value"] = row[f"{kind}_value"], row[f"{kind}_key"]
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {kind}"


@mutation(replay=True)
def exchange_heads(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = chance.choice([n for n in row if n.endswith(("_key", "_value"))])
    row[column][:] = row[column][:, ::-1].copy()
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}"


@mutation(replay=True)
def states_of_another_row(run: Tampered, chance: random.Random) -> str:
    name = "train-00000"
    rows = run.rows(name)
    a, b = chance.sample(range(len(rows)), 2)
    column = some_states(rows[a], chance)
    length = min(rows[a]["num_tokens"], rows[b]["num_tokens"])
    rows[a][column][:length] = rows[b][column][:length]
    run.write(name, rows)
    return f"{name}: {column} of row {b} in {a}"


@mutation(replay=True)
def change_a_state(run: Tampered, chance: random.Random) -> str:
    name, rows, row = some_row(run, chance)
    column = some_states(row, chance)
    at = some_index(row[column], chance)
    row[column][at] = 4.0 if row[column][at] != 4 else 2.0
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}{at}"


# ---- the physical form


@mutation()
def write_otherwise(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance)
    options = chance.choice(
        [
            {"compression": "snappy"},
            {"compression": "none"},
            {"use_byte_stream_split": False},
            {"write_statistics": True},
        ]
    )
    run.write_table(name, pq.read_table(run.path(name)), **options)
    return f"{name}: {options}"


@mutation()
def drop_a_column(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance)
    table = pq.read_table(run.path(name))
    column = chance.choice([c for c in table.column_names if c != "sample_id"])
    options = {"use_byte_stream_split": False, "use_dictionary": False, "write_statistics": False}
    run.write_table(name, table.drop_columns([column]), **options)
    return f"{name}: {column}"


@mutation()
def change_the_footer(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance)
    footer = run.footer(name)
    key = chance.choice(["fingerprint", "context_length", "sliding_window", "schemas"])
    if key == "fingerprint":
        footer[key] = "1" * 64
    elif key == "schemas":
        footer[key] = dict.fromkeys(footer[key], "2" * 64)
    else:
        footer["geometry"][key] = (footer["geometry"][key] or 0) + 1
    run.write(name, run.rows(name), footer)
    return f"{name}: {key}"


# ---- the suite


def make_runs(base: Path) -> dict[str, Path]:
    """Two valid runs: the tiny random Llama of the tests, and gemma4-nano."""
    from tiny_llama import write_tiny_llama

    (base / "model").mkdir(parents=True)
    write_tiny_llama(base / "model")
    held_out = (ROOT / "pipeline/data/gemma4-nano/held-out.jsonl").read_text().splitlines()
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(line + "\n" for line in [*held_out[:12], "not json"]))
    targets = {"llama": str(base / "model"), "gemma4-nano": "gemma4-nano"}
    for name, target in targets.items():
        settings = Settings.check(
            target=target,
            prompts=str(prompts),
            out=str(base / name),
            max_new_tokens=40,
            max_length=900,
            rollout_rows=5,
            shard_mb=1,
        )
        execute(settings, LocalWorker)
        assert validate(base / name).ok
    return {targets[name]: base / name for name in targets}


def hunt(count: int, seed: int, base: Path) -> int:
    """Returns how many of the mutants were found."""
    runs = make_runs(base)
    found, by_rule = 0, Counter[str]()
    for number in range(count):
        chance = random.Random(f"{seed} {number}")
        name, change, needs_replay = MUTATIONS[number % len(MUTATIONS)]
        target = list(runs)[number // len(MUTATIONS) % len(runs)]
        run = Tampered(runs[target], base / "mutant")
        what = change(run, chance)
        report = validate(run.out)
        if report.ok and needs_replay:
            report = validate(run.out, replay=Replay(1000, target))
        shutil.rmtree(run.out)
        found += not report.ok
        by_rule.update({finding.rule for finding in report.findings})
        if report.ok:
            print(f"SURVIVED {number}: {name} of {Path(target).name}: {what}", flush=True)
    rules = ", ".join(f"{rule} {times}" for rule, times in by_rule.most_common())
    print(f"{len(MUTATIONS)} kinds; rules that spoke: {rules}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        found = hunt(options.count, options.seed, Path(scratch))
    print(f"{found}/{options.count} found")
    if found != options.count:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
