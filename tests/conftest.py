"""What several test files share: a tiny random Llama on disk, and one finished run of it."""

import json
import os
import sys
from pathlib import Path

import pytest

# jobs/ is not installed with the package.
sys.path.insert(0, str(Path(__file__).parent.parent))
# Tests run side by side on few cores; these are read when torch and the tokenizers start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See tiny_llama.py."""
    from tiny_llama import write_tiny_llama

    path = tmp_path_factory.mktemp("tiny_llama")
    write_tiny_llama(path)
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run: 9 rows in, 2 rejected; 2 rollout parts, 2 shards.

    Read-only: copy it before changing anything.
    """
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base = tmp_path_factory.mktemp("tiny_run")
    # Long enough that the features pass 1.5 MB, which makes two shards.
    texts = ["Hi! " * 60, "日本語で? " * 20, "1+1 " * 80, "def f(x):\n" * 25, "Why?", "A b c " * 60]
    rows = [
        {"id": f"row-{i}", "messages": [{"role": "user", "content": text}]}
        for i, text in enumerate(texts)
    ]
    turns = [("user", "One"), ("assistant", "x"), ("user", "Two " * 50)]
    rows.append({"id": "turns", "messages": [{"role": r, "content": c} for r, c in turns]})
    rows.append({"id": "empty", "messages": []})
    lines = [*(json.dumps(row) for row in rows), "not json"]
    prompts = base / "prompts.jsonl"
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = Settings.check(
        target=str(tiny_llama_dir),
        prompts=str(prompts),
        out=str(base / "out"),
        max_new_tokens=96,
        temperature=1.0,
        seed=7,
        rollout_rows=4,
        shard_mb=1,
    )
    execute(settings, LocalWorker)
    return base / "out"


@pytest.fixture(scope="session")
def nano_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve greedy answers of gemma4-nano on transformers, bfloat16. Read-only, as tiny_run."""
    from pipeline.execute import LocalWorker, execute
    from pipeline.settings import Settings

    base = tmp_path_factory.mktemp("nano")
    held_out = Path(__file__).parent.parent / "pipeline/data/gemma4-nano/held-out.jsonl"
    prompts = base / "prompts.jsonl"
    prompts.write_text("".join(held_out.read_text().splitlines(keepends=True)[:12]))
    settings = Settings.check(
        target="gemma4-nano",
        prompts=str(prompts),
        out=str(base / "out"),
        max_new_tokens=32,
        max_length=512,
    )
    execute(settings, LocalWorker)
    return base / "out"
