"""How answers end: stop strings, limits, loops; and several answers to one prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipeline.answers import StopStrings, distinct_share, is_degenerate
from pipeline.errors import PipelineError
from pipeline.execute import LocalWorker, execute
from pipeline.models.base import Sampling
from pipeline.settings import Settings
from pipeline.validate import validate

MERGES = [("E", "N"), ("D", "."), ("Ã", "©")]  # the last two are the bytes of é


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {s: i for i, s in enumerate([*symbols, *("".join(pair) for pair in MERGES)])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    # Without its regex words are not kept apart from what follows them.
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def first_end(stops: StopStrings, ids: list[int]) -> int | None:
    """How many tokens a generation with these ids takes."""
    return next((n for n in range(1, len(ids) + 1) if stops(ids[:n])), None)


def test_a_stop_string_may_lie_across_token_borders(tokenizer: Any) -> None:
    """D6: "END" comes as "EN" and "D."; the ids go up to the token that completes it."""
    ids = tokenizer("the END. more")["input_ids"]
    assert [tokenizer.decode([i]) for i in ids[4:6]] == ["EN", "D."]
    stops = StopStrings(["END"], tokenizer)
    assert first_end(stops, ids) == 6
    assert stops.start(ids[:6]) == 4 and stops.start(ids[:5]) == -1
    with pytest.raises(PipelineError, match="an empty string"):
        StopStrings(["", "END"], tokenizer)


@given(st.text("aébENDx. 日", max_size=40), st.sampled_from(["END", "é", "日", "a b", "D.E"]))
def test_the_first_token_that_completes_the_string_ends_the_answer(
    tokenizer: Any, text: str, stop: str
) -> None:
    ids = tokenizer(text)["input_ids"]
    stops = StopStrings([stop, "not there"], tokenizer)
    whole = [n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n])]
    assert first_end(stops, ids) == (whole[0] if whole else None)
    assert stops.start(ids) == text.find(stop)


def test_a_terminator_comes_before_a_stop_string_and_that_before_the_limit() -> None:
    sampling = Sampling(max_new_tokens=3, ended=lambda ids: ids[-1] == 7)
    assert sampling.finish_of([1, 2], {9}, 3) is None
    assert sampling.finish_of([1, 9], {9}, 2) == "stop"
    assert sampling.finish_of([1, 7], {7}, 2) == "stop"
    assert sampling.finish_of([1, 7], {9}, 2) == "stop_string"
    assert sampling.finish_of([1, 2], {9}, 2) == "length"


def test_a_loop_is_an_answer_with_few_distinct_4_grams() -> None:
    assert distinct_share([1, 2] * 50) == 2 / 97
    assert distinct_share(range(100)) == 1.0
    assert distinct_share([7, 7, 7]) == 1.0  # too short to tell
    half = [*range(40), *[5] * 44]  # 37 distinct, 3 across the border, one of fives
    assert distinct_share(half) == pytest.approx(41 / 81)
    assert not is_degenerate(half, "length")
    assert is_degenerate([*half, 5, 5], "length")
    assert not is_degenerate([*half, 5, 5], "stop")


def run_once(model: Path, base: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(manifest, rollout rows by id) of a run of four prompts; validated."""
    base.mkdir()
    prompts = base / "prompts.jsonl"
    texts = ["Hi!", "日本語で? " * 9, "1+1 " * 20, "Why?"]
    rows = [{"id": f"r{i}", "prompt": text} for i, text in enumerate(texts)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"max_new_tokens": 64, "temperature": 1.0, "seed": 3, "rollout_rows": 3}
    execute(
        Settings.check(
            target=str(model),
            prompts=str(prompts),
            out=str(base / "out"),
            **(given | options),
        ),
        LocalWorker,
    )
    report = validate(base / "out")
    assert report.findings == ()
    files = sorted((base / "out" / "rollouts").glob("*.parquet"))
    answered = [row for file in files for row in pq.read_table(file).to_pylist()]
    manifest = json.loads((base / "out" / "manifest.json").read_text())
    return manifest, {row["sample_id"]: row for row in answered}


def answer_of(row: dict[str, Any]) -> list[int]:
    ids, mask = np.array(row["input_ids"]), np.array(row["loss_mask"])
    answer: list[int] = ids[mask == 1].tolist()
    return answer


def test_stop_strings_cut_a_run_where_its_text_has_them(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    _, free = run_once(tiny_llama_dir, tmp_path / "free")
    text = tokenizer.decode(answer_of(free["r0"]))
    stop = text[20:22]  # of random bytes: only this answer has it
    at = text.index(stop)
    _, stopped = run_once(tiny_llama_dir, tmp_path / "stopped", stop=[stop, "not there"])
    row = stopped["r0"]
    assert (row["finish_reason"], row["stop_string_start"]) == ("stop_string", at)
    kept = answer_of(row)
    assert kept == answer_of(free["r0"])[: len(kept)]  # the very ids, none cut or added
    assert stop in tokenizer.decode(kept) and stop not in tokenizer.decode(kept[:-1])
    assert [row["finish_reason"] for row in free.values()].count("length") > 1
    for row in stopped.values():
        if row["finish_reason"] == "stop_string":
            continue
        assert stop not in tokenizer.decode(answer_of(row))
        assert {**row, "source": ""} == {**free[row["sample_id"]], "source": ""}
        assert row["stop_string_start"] == -1


def test_loops_are_flagged_and_may_be_dropped(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """Greedy, the random target model soon repeats itself."""
    greedy = {"temperature": 0.0, "max_new_tokens": 200}
    manifest, rows = run_once(tiny_llama_dir, tmp_path / "all", **greedy)
    flagged = {name for name, row in rows.items() if row["degenerate"]}
    assert flagged == {
        name
        for name, row in rows.items()
        if row["finish_reason"] == "length" and distinct_share(answer_of(row)) < 0.5
    }
    assert flagged
    manifest, left = run_once(tiny_llama_dir, tmp_path / "some", drop_degenerate=True, **greedy)
    assert left.keys() == rows.keys() - flagged
    assert manifest["rejected"] == {"degenerate": len(flagged)}


def test_unfinished_answers_are_marked_and_may_be_dropped(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """D4: no end token is invented for an answer that was cut."""
    _, rows = run_once(tiny_llama_dir, tmp_path / "all")
    cut = {name for name, row in rows.items() if row["finish_reason"] == "length"}
    eos = 258  # <|im_end|>
    for name, row in rows.items():
        answer = answer_of(row)
        assert (answer[-1] == eos) == (name not in cut)
        assert len(answer) == 64 or name not in cut
    manifest, left = run_once(tiny_llama_dir, tmp_path / "some", drop_unfinished=True)
    assert cut and left.keys() == rows.keys() - cut
    assert manifest["rejected"] == {"unfinished": len(cut)}
    assert manifest["rows_in"] == 4 == manifest["rows_out"] + len(cut)


def test_samples_of_a_prompt_differ_and_do_not_depend_on_parts(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """D8: the seed is the run's and the row's. (In bfloat16 batch mates move the logits.)"""
    options = {"samples_per_prompt": 8, "dtype": "float32"}
    manifest, rows = run_once(tiny_llama_dir, tmp_path / "a", **options)
    assert manifest["rows_in"] == manifest["rows_out"] == 32
    assert list(rows) == [f"r{i}/{n}" for i in range(4) for n in range(8)]
    assert len({tuple(answer_of(rows[f"r0/{n}"])) for n in range(8)}) == 8
    assert len({tuple(rows[f"r0/{n}"]["input_ids"][:20]) for n in range(8)}) == 1
    _, again = run_once(tiny_llama_dir, tmp_path / "b", rollout_rows=32, **options)
    assert {n: answer_of(row) for n, row in again.items()} == {
        n: answer_of(row) for n, row in rows.items()
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_prompt": 2, "temperature": 0.0}, "greedy answers would all be the same"),
        ({"samples_per_prompt": 2, "turns": "given"}, "nothing is sampled"),
        ({"stop": [""]}, "an empty string would end every answer"),
        ({"stop": ["x"], "rollout_endpoint": "http://localhost:1"}, "not its ids"),
    ],
)
def test_options_that_contradict_each_other(
    options: dict[str, Any], message: str, tiny_llama_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(PipelineError, match=message):
        run_once(tiny_llama_dir, tmp_path / "run", **options)
    assert not (tmp_path / "run" / "out" / "manifest.json").exists()
