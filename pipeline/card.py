"""The dataset card (OUT/README.md): what `load_dataset(OUT)` reads, and what the columns mean."""

from collections.abc import Sequence

import yaml

from pipeline.manifest import Commit
from pipeline.schema import Layout

_TEXT = """
# Drafter features of {target}

{rows:,} rows, {tokens:,} tokens, {bytes_per_token:,} bytes a token in their own dtypes. Made by
drafter-features; `manifest.json` says how, `commits/` holds each file's sha256.

```python
from datasets import load_dataset
rows = load_dataset("PATH", split="train").with_format("torch")  # float columns as float32, exact
conversations = load_dataset("PATH", "rollouts", split="train")
```

## Columns

T is the row's own token count; token t sits at absolute position `position_offset + t`.

{columns}
"""


def dataset_card(
    layout: Layout, shards: Sequence[Commit], rollouts: Sequence[Commit], target: str
) -> str:
    """The card; its YAML names each committed file, so nothing else in the folder is loaded."""
    configs = [
        {
            "config_name": name,
            "data_files": [{"split": "train", "path": [commit.file for commit in commits]}],
        }
        for name, commits in (("default", shards), ("rollouts", rollouts))
    ]
    head = yaml.safe_dump({"configs": configs}, sort_keys=False)
    text = _TEXT.format(
        target=target,
        rows=sum(c.rows for c in shards),
        tokens=sum(c.tokens for c in shards),
        bytes_per_token=layout.bytes_per_token,
        columns=_columns(layout),
    )
    return f"---\n{head}---\n{text}"


def _columns(layout: Layout) -> str:
    lines = ["| column | dtype | shape | meaning |", "|---|---|---|---|"]
    for column in layout.columns:
        sizes = ["T" if size is None else str(size) for size in column.shape]
        shape = f"[{', '.join(sizes)}]" if sizes else "scalar"
        layer = f" (block {column.metadata['layer']})" if "layer" in column.metadata else ""
        lines.append(f"| `{column.name}` | {column.dtype} | {shape} | {column.meaning}{layer} |")
    return "\n".join(lines)
