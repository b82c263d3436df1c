"""Ways to break a run, continued: ids, masks, targets and teacher rows."""

import random
from typing import Any

import numpy as np
from mutations import mutation, some_index, some_row, some_token
from tampering import Row, Tampered, retarget

# ---- ids, masks, targets


def shift(values: Any, chance: random.Random) -> int:
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
    by = shift(row["loss_mask"], chance)
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
    by = shift(row["target_ids"], chance)
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


@mutation(replay=True)
def exchange_other_teacher_ids(run: Tampered, chance: random.Random) -> str:
    """Of the likeliest and an unlikely token, neither being the next one: all sums stay right."""
    name, rows, row = some_row(run, chance)
    ids, tokens = row["teacher_top_ids"], row["input_ids"]
    free = [t for t in range(row["num_tokens"] - 1) if tokens[t + 1] not in ids[t, [0, -1]]]
    t = chance.choice(free)
    ids[t, [0, -1]] = ids[t, [-1, 0]]
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}]"


@mutation(replay=True)
def lower_an_unlikely_token(run: Tampered, chance: random.Random) -> str:
    """One outside the top ids, where the bytes only give a bound."""
    name, rows, row = some_row(run, chance)
    ids, tokens = row["teacher_top_ids"], row["input_ids"]
    places = [t for t in range(1, row["num_tokens"]) if tokens[t] not in ids[t - 1]]
    t = chance.choice(places or [0])
    row["token_logprobs"][t] -= 3
    run.write(name, rows)
    return f"{name}: {row['sample_id']}[{t}]"
