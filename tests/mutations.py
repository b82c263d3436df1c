"""Ways to break a run, for mutants.py. Here: bytes, records, whole rows, the physical form."""

import json
import random
import shutil
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
from tampering import Row, Tampered

from pipeline.plan import part_name

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


@mutation()
def contradict_the_fingerprint(run: Tampered, chance: random.Random) -> str:
    """What the manifest tells its readers, while the fields that the digest covers stay."""
    manifest = run.json("manifest.json")
    part, key, value = chance.choice(
        [
            ("settings", "temperature", 0.5),
            ("settings", "dtype", "float16"),
            ("settings", "turns", "given"),
            ("sampling", "top_p", 0.5),
            ("target", "sha256", "0" * 64),
            ("semantics", "draft_position", "position_offset + n - 1"),
            ("semantics", "final_hidden", "before the final norm"),
        ]
    )
    run.edit_json("manifest.json", **{part: {**manifest[part], key: value}})
    return f"{part}.{key}"


@mutation()
def name_another_backend(run: Tampered, chance: random.Random) -> str:
    key = chance.choice(["scored_by", "generated_by"])
    run.edit_json("manifest.json", **{key: "llamacpp"})
    return key


# ---- the plan


@mutation()
def damage_the_plan(run: Tampered, chance: random.Random) -> str:
    """A bit of its prompts, which no commit record has a digest of."""
    path = chance.choice(sorted((run.out / "plan").glob("part-*.parquet")))
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"{path.name}: byte {at}"


@mutation()
def lose_a_file_of_the_plan(run: Tampered, chance: random.Random) -> str:
    path = chance.choice(sorted((run.out / "plan").iterdir()))
    path.unlink()
    return path.name


@mutation()
def plan_another_token(run: Tampered, chance: random.Random) -> str:
    """With the plan's own digest, and the record of the rollouts made from it, mended."""
    index = chance.randrange(len(run.json("plan/plan.json")["parts"]))
    rows = run.plan_rows(index)
    row = chance.choice(rows)
    at = chance.randrange(len(row["segments"][0]))
    row["segments"][0][at] ^= 1
    run.write_plan(index, rows)
    return f"{part_name(index)}: {row['sample_id']}[{at}]"


@mutation()
def invent_a_reject(run: Tampered, chance: random.Random) -> str:
    """A row that was taken away, said to have been rejected; all counts agree."""
    name, rows, row = some_row(run, chance)
    run.write(name, [r for r in rows if r is not row] or [dict(row, sample_id="other")])
    lost = {"source": row["source"], "sample_id": row["sample_id"], "detail": ""}
    with (run.out / "rejects.jsonl").open("a") as file:
        file.write(json.dumps({**lost, "reason": "bad_json"}) + "\n")
    rejected = run.json("manifest.json")["rejected"]
    counts = {**rejected, "bad_json": rejected.get("bad_json", 0) + 1}
    run.edit_json("manifest.json", rejected=counts)
    return f"{name}: {row['sample_id']}"


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
