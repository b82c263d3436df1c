"""Ways to break a run, continued: states, and rows changed alike in a shard and its rollout."""

import json
import random
from collections.abc import Callable

import numpy as np
import pyarrow.parquet as pq
from mutations import mutation, some_file, some_index, some_row, some_token
from mutations_values import shift
from tampering import Row, Tampered, retarget

from pipeline.schema import FOOTER_KEY

# ---- states


def some_states(row: Row, chance: random.Random) -> str:
    return chance.choice([n for n in row if n.endswith(("_hidden", "_key", "_value"))])


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
    by = shift(row[column], chance)
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
def exchange_blocks(run: Tampered, chance: random.Random) -> str:
    """As if a block were counted from another number in one of two columns."""
    name, rows, row = some_row(run, chance)
    one, other = chance.sample([n for n in row if n.startswith("block_")], 2)
    row[one], row[other] = row[other], row[one]
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {one}, {other}"


@mutation()
def name_another_block(run: Tampered, chance: random.Random) -> str:
    name = some_file(run, chance)
    table = pq.read_table(run.path(name))
    field = table.schema.field(chance.choice([n for n in table.schema.names if "block_" in n]))
    block = int(field.metadata[b"block"]) + chance.choice([-1, 1])
    other = field.with_metadata({**field.metadata, b"block": str(block).encode()})
    at = table.schema.get_field_index(field.name)
    run.write_table(name, table.cast(table.schema.set(at, other)))
    return f"{name}: {field.name} as {block}"


@mutation()
def tell_other_semantics(run: Tampered, chance: random.Random) -> str:
    """In all files and the manifest alike, or in the files alone, without any record."""
    semantics = run.json("manifest.json")["semantics"]
    key = chance.choice(sorted(semantics))
    others = {"embedding_scale": 3.0, "logit_softcap": 7.0, "layers": {}, "rope": {}, "version": 2}
    scored = {"scored_by": "llamacpp", "generated_by": None}
    changed = {**semantics, key: (others | scored).get(key, f"not {semantics[key]}")}
    for name in sorted(p.stem for p in (run.out / "commits").glob("*.json")):
        table = pq.read_table(run.path(name))
        footer = json.dumps({**run.footer(name), "semantics": changed}).encode()
        metadata = {**table.schema.metadata, FOOTER_KEY: footer}
        run.write_table(name, table.replace_schema_metadata(metadata))
    run.edit_json("manifest.json", semantics=changed)
    if key != "generated_by" and chance.random() < 0.5:  # who answered stands nowhere else
        run.drop_records()
    return f"semantics.{key}"


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


@mutation(replay=True)
def scale_the_keys(run: Tampered, chance: random.Random) -> str:
    """As if K's norm had other weights; twice a value is of the same dtype."""
    name, rows, row = some_row(run, chance)
    column = chance.choice([n for n in row if n.endswith("_key")])
    row[column] *= chance.choice([2, -1, 0.5])
    run.write(name, rows)
    return f"{name}: {row['sample_id']} {column}"


# ---- alike in a shard and its rollout: these confirm each other, so rows.rollout is quiet


def in_both(
    run: Tampered, chance: random.Random, change: Callable[[Row], None], finish: str | None = None
) -> str:
    """Change a row, of that finish_reason if there is one, wherever it is."""
    names = sorted(p.stem for p in (run.out / "commits").glob("train*.json"))
    rows = [row for name in names for row in run.rows(name)]
    some = [row for row in rows if row["finish_reason"] == finish] or rows
    chosen: str = chance.choice(some)["sample_id"]
    run.edit_row(change, row=chosen, rollout=True)
    return chosen


def answer_starts(row: Row) -> list[int]:
    edges = np.diff(row["loss_mask"].astype(np.int8), prepend=0)
    return [int(t) for t in np.flatnonzero(edges == 1)]


@mutation()
def shift_both_masks(run: Tampered, chance: random.Random) -> str:
    by, finish = chance.choice([-3, -2, -1, 1, 2]), chance.choice(["stop", "length"])

    def change(row: Row) -> None:
        row["loss_mask"][:] = np.roll(row["loss_mask"], by)
        retarget(row)

    return f"{in_both(run, chance, change, finish)} by {by}"


@mutation()
def supervise_the_header(run: Tampered, chance: random.Random) -> str:
    """Control tokens of the template count as part of the answer."""
    tokens, turn = chance.randrange(1, 4), chance.random()

    def change(row: Row) -> None:
        starts = answer_starts(row)
        start = starts[int(turn * len(starts))]
        row["loss_mask"][start - tokens : start] = 1
        retarget(row)

    return f"{in_both(run, chance, change)}: {tokens} tokens"


@mutation()
def forget_the_answers_head(run: Tampered, chance: random.Random) -> str:
    def change(row: Row) -> None:
        starts = answer_starts(row)
        row["loss_mask"][starts[-1]] = 0
        if not row["loss_mask"].any():
            row["loss_mask"][0] = 1
        retarget(row)

    return in_both(run, chance, change, "stop")


@mutation()
def ask_something_else(run: Tampered, chance: random.Random) -> str:
    """Another token of the prompt."""
    place = chance.random()

    def change(row: Row) -> None:
        at = int(place * answer_starts(row)[0])
        row["input_ids"][at] ^= 1
        retarget(row)

    return in_both(run, chance, change)


@mutation()
def come_from_elsewhere(run: Tampered, chance: random.Random) -> str:
    return in_both(run, chance, lambda row: row.update(source="elsewhere:1"))


@mutation()
def call_the_answer_given(run: Tampered, chance: random.Random) -> str:
    return in_both(run, chance, lambda row: row.update(finish_reason="given", on_policy=0))


@mutation()
def turn_the_finish(run: Tampered, chance: random.Random) -> str:
    other = {"stop": "length", "length": "stop"}

    def change(row: Row) -> None:
        row["finish_reason"] = other[row["finish_reason"]]

    return in_both(run, chance, change)


@mutation(replay=True)
def answer_otherwise(run: Tampered, chance: random.Random) -> str:
    """Another likely token, with its own log-probability: consistent, but of another text."""
    place, rank = chance.random(), chance.randrange(1, 6)
    ends = run.json("manifest.json")["fingerprint_fields"]["eos_ids"]

    def change(row: Row) -> None:
        # Where the rollout has no teacher to look at, the same token as in the shard.
        if "teacher_top_ids" in row:
            free = [t for t in np.flatnonzero(row["loss_mask"]) if row["input_ids"][t] not in ends]
            t = int(free[int(place * len(free))])
            ids = row["teacher_top_ids"][t - 1]
            slots = [k for k in range(64) if ids[k] != row["input_ids"][t] and ids[k] not in ends]
            slot = slots[rank]
            chosen.append((t, int(ids[slot])))
            row["token_logprobs"][t] = row["teacher_top_logprobs"][t - 1, slot]
        t, token = chosen[0]
        row["input_ids"][t] = token
        retarget(row)

    chosen: list[tuple[int, int]] = []
    name = chance.choice(run.rows("train-00000"))["sample_id"]
    run.edit_row(change, row=name)  # the shard first
    run.edit_row(lambda row: change(row) if "text" in row else None, row=name, rollout=True)
    return f"{name}: {chosen[0]}"
