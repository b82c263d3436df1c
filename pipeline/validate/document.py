"""docs/validation.md: the rules, as the code has them.

python -m pipeline.validate.document > docs/validation.md
"""

from pipeline.validate.replay import REPLAY_RULES
from pipeline.validate.run import RULES

# Why the rules of a group exist: what goes wrong in training without them.
WHY = {
    "manifest": "The manifest says what the run is. A copy that lies about its rows, settings or "
    "completeness makes every number computed from it wrong.",
    "commits": "A file counts only through its record; a record that cannot be read or is of "
    "another run hides lost or mixed data.",
    "plan": "The plan holds what was asked, as token ids, before any answer was there. Without it "
    "a shard and its rollout that were changed alike only confirm each other.",
    "card": "`load_dataset` reads exactly what the card names.",
    "files": "Missing, cut, doubled or foreign files are what copies and crashes leave behind.",
    "parquet": "Damaged pages decode to wrong numbers if nobody looks at their checksums.",
    "footer": "A file says itself which run, geometry and settings it is of; files of two runs "
    "look alike.",
    "schema": "A column of another type, order or meaning is read without complaint.",
    "semantics": "With another pairing, norm side or position than the trainer expects the loss "
    "looks perfect and nothing is accepted; a block off by one is a neighbour's numbers.",
    "encoding": "Row groups that do not fit into memory, footers that grow, codecs that other "
    "readers lack.",
    "rows": "Rows lost, doubled or exchanged change the data mix; a row whose columns differ in "
    "length shifts everything behind it.",
    "tokens": "An id outside the vocabulary crashes or wraps in the embedding.",
    "masks": "The loss mask decides what is learnt; one that is empty, full, or ends beside the "
    "terminator trains on the wrong tokens without any error.",
    "positions": "K is rotated at its absolute position: a wrong offset makes every key wrong.",
    "numbers": "NaN spreads to all weights; zero or constant states, and values that the "
    "column's dtype does not have, mean that something else was captured.",
    "kv": "K and V exchanged, or taken at another place of the graph, look like any numbers.",
    "teacher": "The teacher rows are the targets' distribution; unsorted, shifted or not summing "
    "to one they train the drafter towards something the target model never said.",
    "targets": "Targets are ids shifted by k; off by one, across a turn or into the next row they "
    "teach what cannot be predicted.",
    "replay": "Valid numbers in the wrong place leave no trace in the bytes: only the target model "
    "itself can tell.",
}

_HEAD = """\
# Validation rules

`pipeline validate DIR` checks every byte it can from the files alone, without torch, one row group
in memory at a time. DIR is OUT of a run (also `s3://…`), OUT/data, or a directory with just shards.
Exit code 0: clean, 1: findings, 2: cannot run. `--json` for programs, `--all` for every finding.

- `--quick` reads records, footers and hashes, and no row.
- `--allow-missing` takes a partly downloaded copy: what is there is checked in full.
- `--replay N --target T` takes N random rows (drawn by `--seed`; the report names them) through the
  target model again, and with them every row of their micro-batches, which costs no more. The rows
  it says were left out were not compared: N as large as the run takes all. A row is computed in
  its own micro-batch, at its recorded offset, on the recorded backend. On the machine that made
  them rows come out equal to the bit. Elsewhere a value may be off by 2^-5 (bfloat16), 2^-7
  (float16) or 2^-9 (float32) of max(|value|, RMS of the column in that row); a log-probability by
  0.25, 0.05 or 0.01 nats, by the dtype the target model runs in (0.05 for llama.cpp). A greedy
  token of a drawn row may lie 0.5, 0.1 or 0.02 nats below the likeliest (1.0 for llama.cpp, which
  rounds activations to 8 bits: 0.35 was seen), since it was decoded alone and is checked in one
  pass.

`python tests/mutants.py --count 400 --seed 1` (`make mutants`) breaks valid runs of a tiny Llama
and of gemma4-nano: once by each rule's own corruption, then in 400 ways of 58 kinds, with hashes,
records and the plan mended wherever possible, also alike in a shard and its rollout. 473/473 found,
and every rule spoke but `encoding.row_group`, which has a test of its own. States exchanged for
other valid values, which the bytes cannot give away, are among them and need `--replay`.

What nothing here can tell: the rollouts' `text`, which is for reading only (the ids count), the
target model's name and the versions in manifest.json. That K was rotated once, and which of two
unlikely tokens has which log-probability, is seen by `--replay` alone: neither footer nor manifest
holds weights, but for the lengths that k_norm's allow.

`python -m pipeline.validate.bench --rows 480` compares the speed with plain Arrow scans of the same
columns (1.5 GB, 4.4 GB uncompressed, two cores): one process reads at 0.73 of the speed of a scan
that verifies page checksums, 0.78 of one that also takes the SHA-256 of the files, as validation
does; 0.7 GB of memory at most. Two processes are worth their start (imports) only above some GB.

A rule is one function with one message and one test that breaks it. This page is made from them by
`python -m pipeline.validate.document`.
"""


def document() -> str:
    """The page: why each group of rules exists, and its rules."""
    rules = [*RULES, *REPLAY_RULES]
    groups = list(dict.fromkeys(rule.id.partition(".")[0] for rule in rules))
    lines = [_HEAD]
    for group in groups:
        lines += [f"## {group}", "", WHY[group], "", "| rule | what must hold | if not |"]
        lines.append("|---|---|---|")
        for rule in rules:
            if rule.id.partition(".")[0] == group:
                lines.append(f"| `{rule.id}` | {rule.requires} | {rule.remedy} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
