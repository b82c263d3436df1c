"""The dataset card (OUT/README.md): what `load_dataset(OUT)` reads, and what the columns mean."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from pipeline.errors import PipelineError
from pipeline.manifest import Commit
from pipeline.schema import Layout
from pipeline.units import size_text

_TEXT = """
# Drafter features of {target}

{rows:,} rows, {tokens:,} tokens ({supervised:,} of answers), {shards} shards of {size} together,
{bytes_per_token:,} bytes a token in their own dtypes. They train speculative drafters of this
target model: its final hidden states, shared KV caches, teacher rows and targets. Made by
drafter-features.

## How to load

```python
from datasets import load_dataset
rows = load_dataset("PATH", split="train").with_format("torch")  # float columns as float32, exact
conversations = load_dataset("PATH", "rollouts", split="train")
```

PATH is this folder, or the repository's owner/name. `streaming=True` and `columns=[…]` read only
what is asked for. bfloat16 and float16 columns are stored as float32, exactly.

## How it was made

{made}

`manifest.json` holds every setting, versions, geometry and semantics; `commits/` each file's
sha256; `rejects.jsonl` each row that was left out and why. `pipeline validate PATH` checks it all.

## How the columns line up

A drafter whose last known token is n gets embed(x_n), `final_hidden[n-1]`, KV rows `[:n]` and the
one position `position_offset + n`; its depth k predicts x_(n+k), whose teacher row is n+k-1.

## Columns

T is the row's own token count; token t sits at absolute position `position_offset + t`.

{columns}

## License

The YAML above states it. Answers and states come from the target model and from the prompts: their
licenses apply.
"""
# The Hub's own classes, by rows.
_SIZE_CATEGORIES = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
)


def dataset_card(
    layout: Layout,
    shards: Sequence[Commit],
    rollouts: Sequence[Commit],
    *,
    target: str,
    made: Mapping[str, str],
) -> str:
    """The card; its YAML names each committed file, so nothing else in the folder is loaded.

    made: what the table of "How it was made" says.
    """
    rows, size = sum(c.rows for c in shards), sum(c.bytes for c in shards)
    head = {
        "license": "unknown",  # of target model and prompts; `pipeline push --license` states one
        "pretty_name": f"Drafter features of {target}",
        "task_categories": ["text-generation"],
        "size_categories": [_size_category(rows)],
        "tags": ["speculative-decoding", "drafter-features"],
        "configs": [
            {
                "config_name": name,
                "data_files": [{"split": "train", "path": [commit.file for commit in commits]}],
            }
            for name, commits in (("default", shards), ("rollouts", rollouts))
        ],
    }
    text = _TEXT.format(
        target=target,
        rows=rows,
        tokens=sum(c.tokens for c in shards),
        supervised=sum(c.supervised_tokens for c in shards),
        shards=len(shards),
        size=size_text(size),
        bytes_per_token=layout.bytes_per_token,
        made=_table(made),
        columns=_columns(layout),
    )
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n{text}"


def _size_category(rows: int) -> str:
    return next((name for limit, name in _SIZE_CATEGORIES if rows < limit), "n>1B")


def _table(cells: Mapping[str, str]) -> str:
    lines = ["| what | value |", "|---|---|"]
    for name, value in cells.items():
        safe = value.replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | {safe} |")
    return "\n".join(lines)


def _columns(layout: Layout) -> str:
    lines = ["| column | dtype | shape | meaning |", "|---|---|---|---|"]
    for column in layout.columns:
        sizes = ["T" if size is None else str(size) for size in column.shape]
        shape = f"[{', '.join(sizes)}]" if sizes else "scalar"
        layer = f" (block {column.metadata['layer']})" if "layer" in column.metadata else ""
        lines.append(f"| `{column.name}` | {column.dtype} | {shape} | {column.meaning}{layer} |")
    return "\n".join(lines)


def split_card(text: str, name: str) -> tuple[dict[str, Any], str]:
    """A card's YAML and what follows it. Raises PipelineError for a card without such."""
    parts = text.split("---\n", 2)
    try:
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise PipelineError(f"{name}: its YAML cannot be read: {error}") from error
    if not isinstance(head, dict):
        raise PipelineError(f"{name}: does not begin with YAML between two lines of ---")
    return head, parts[2]
