"""Failures that users of such pipelines met on the input side; other cases are where they belong.

A1 test_chat (first prompt), A5-A8, A21, A23, A24 test_prompts, A12, A13 test_prompt_tools, A15, A17
test_prompt_thinking, A16, A18-A20 test_chat and test_prompt_masks, A25 here and in test_prompts.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import templates
from chats import byte_tokenizer, chat, renderer_for
from tiny_llama import CONTEXT_LENGTH
from typer.testing import CliRunner

from pipeline.chat import ChatRenderer
from pipeline.cli import app
from pipeline.errors import PipelineError, RowReject
from pipeline.planned_rows import make_renderer, plan_row
from pipeline.prompt_reasons import REJECT_REASONS
from pipeline.prompt_settings import PromptSettings
from pipeline.prompts import PromptRow, RejectedRow, read_prompts
from pipeline.settings import Settings

DOCS = Path(__file__).parent.parent / "docs"


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def told(words: list[str], stdin: bytes | None = None) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["prompts", *words, "--json"], input=stdin)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a2_a_tokenizer_without_a_template_needs_one(tmp_path: Path) -> None:
    """And the file that is named must print its BOS itself; nothing is made up."""
    tokenizer = byte_tokenizer(None)
    end = tokenizer.convert_tokens_to_ids("<|eot|>")
    settings = {"target": "-", "prompts": "-"}
    with pytest.raises(PipelineError, match=r"no chat template .*--chat-template FILE"):
        make_renderer(PromptSettings.check(**settings), tokenizer, [end])
    file = tmp_path / "template.jinja"
    file.write_text(templates.LLAMA3)
    named = PromptSettings.check(**settings, chat_template=str(file))
    ids = make_renderer(named, tokenizer, [end]).encode("<bos>").tolist()
    renderer = make_renderer(named, tokenizer, [end])
    first = renderer.encode(renderer.prompt_segments(chat("q"))[0]).tolist()
    assert first[:1] == ids == [tokenizer.bos_token_id] and first.count(ids[0]) == 1


def test_a3_roles_that_the_template_refuses_are_rejects(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "s"}
    rows = [[system, user], [user, user], [answer, user], [user]]
    path = write(tmp_path / "p.jsonl", *({"messages": turns} for turns in rows))
    tokenizer = byte_tokenizer(templates.NO_SYSTEM)
    renderer = ChatRenderer(tokenizer, eos_ids=[tokenizer.convert_tokens_to_ids("</turn>")])
    settings = PromptSettings.check(target="-", prompts=path)
    reasons = []
    for row in settings.read():
        try:
            if isinstance(row, RejectedRow):
                raise RowReject(row.reason, row.detail)
            plan_row(row, renderer, settings, 1000)
            reasons.append("")
        except RowReject as reject:
            reasons.append(reject.reason)
    assert reasons == ["template_refused", "consecutive_roles", "assistant_first", ""]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a9_a_column_that_changes_after_20_000_rows(tmp_path: Path, kind: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": i, "prompt": "q", "system": None if i < 20_000 else "S"} for i in range(20_001)
    ]
    if kind == "jsonl":
        rows[-1]["prompt"] = [{"role": "user", "content": [{"type": "text", "text": "q"}]}]
        path = write(tmp_path / "p.jsonl", *rows)
    else:
        path = str(tmp_path / "p.parquet")
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1000)
    found = list(read_prompts(path))
    assert len(found) == 20_001
    assert all(isinstance(row, PromptRow) and len(row.messages) == 1 for row in found[:-1])
    last = found[-1]
    assert isinstance(last, PromptRow)
    assert [turn[:2] for turn in last.messages] == [("system", "S"), ("user", "q")]


def test_a18_a_row_without_an_answer_has_no_mask() -> None:
    for name in ("llama3", "qwen3", "gemma", "gemma4"):
        with pytest.raises(RowReject, match="no_assistant_turn"):
            renderer_for(name).given_row(chat("q"))


def test_a25_a_prompt_of_the_whole_context_is_rejected_with_its_length(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """One token over, and just fitting; never cut."""
    around = len("user\n\nassistant\n\n") - 1 + 3
    texts = ["x" * (CONTEXT_LENGTH - 1 - around + more) for more in (0, 1)]
    path = write(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    found = told([path, "--target", str(tiny_llama_dir)])
    assert (found["tokens"], found["rejected"]) == (CONTEXT_LENGTH - 1, {"too_long": 1})
    short = told([path, "--target", str(tiny_llama_dir), "--max-length", "1000"])
    assert short["rejected"] == {"too_long": 2}


def test_the_options_of_a_run_are_those_of_pipeline_prompts(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    a = write(tmp_path / "a.jsonl", *({"q": f"a {i}", "uid": i} for i in range(10)))
    b = write(tmp_path / "b.jsonl", *({"q": f"b {i % 5}", "uid": 100 + i} for i in range(40)))
    words = [f"{a}=one:1", f"{b}=two:3", "--target", str(tiny_llama_dir)]
    words += ["--columns", "prompt=q,id=uid", "--dedup", "--limit", "12", "--shuffle", "1"]
    found = told(words)
    one, two = found["sources"]["one"], found["sources"]["two"]
    assert (one["accepted"], one["rejected"]) == (3, 0)
    assert two["accepted"] + two["rejected"] == 9 and two["accepted"] <= 5
    assert found["rejected"] == {"duplicate": two["rejected"]}


def test_every_option_that_changes_rows_is_in_the_fingerprint() -> None:
    base = {"target": "-", "prompts": "-", "out": "-"}
    changes: dict[str, Any] = {
        "columns": "id=uid",
        "limit": 3,
        "shuffle": 0,
        "dedup": True,
        "turns": "last",
        "thinking": "drop",
        "template_arg": ["enable_thinking=true"],
        "control_tokens": "text",
        "max_length": 99,
    }
    plain = Settings.check(**base).fingerprinted()
    for name, value in changes.items():
        changed = Settings.check(**base, **{name: value}).fingerprinted()
        assert {key for key in plain if plain[key] != changed[key]} == {name}
    by_content = {"target", "prompts", "tokenizer", "chat_template"}
    others = set(PromptSettings.model_fields) - set(changes) - by_content
    assert others == {"trust_remote_code"} and others <= set(plain)


def test_the_page_lists_every_reason_with_its_meaning() -> None:
    page = (DOCS / "prompts.md").read_text()
    table = page[page.index("| reason | meaning |") :].splitlines()[2:]
    assert table == [f"| `{reason}` | {meaning} |" for reason, meaning in REJECT_REASONS.items()]


def test_the_pages_example_rows_are_read(tmp_path: Path) -> None:
    page = (DOCS / "prompts.md").read_text()
    rows = page.split("```json\n")[1].split("```")[0]
    (tmp_path / "p.jsonl").write_text(rows)
    found = list(read_prompts(str(tmp_path / "p.jsonl")))
    assert len(found) == 6
    assert [row.reason for row in found if isinstance(row, RejectedRow)] == ["duplicate_id"]
