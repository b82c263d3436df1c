"""Draft vocabularies: what must be in, what is counted, offsets, coverage; never another map."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from run_files import shard_rows
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pipeline.errors import PipelineError
from pipeline.loading import FeatureIndex
from pipeline.models.load import find_target, load_tokenizer
from pipeline.vocab import build_vocab, check_vocab, command, count_transitions, read_vocab
from pipeline.vocab.build import coverage
from pipeline.vocab.classes import (
    GROUPS,
    always_kept,
    is_code,
    is_japanese,
    is_math,
    is_symbol,
    script_of,
    token_texts,
)
from pipeline.vocab.command import write_vocab

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """gemma4-nano's: 2048 tokens, byte fallbacks, pieces of code."""
    return load_tokenizer(find_target("gemma4-nano"))


def test_groups_by_the_decoded_text() -> None:
    japanese = ["日本", "です", "カ", "。", "ｱ", " 私"]
    assert all(map(is_japanese, japanese)) and not any(map(is_japanese, ["a", "é", "한", "+"]))
    assert all(map(is_math, ["+", "≤", "∑", "x²="[1:], "→", "𝛼", "²⁴"[1:], " = "]))
    assert not any(map(is_math, ["a", "(", "日"]))
    assert all(map(is_symbol, ["!", " (", "€", "「", "..."])) and not any(
        map(is_symbol, ["a!", "1", " "])
    )
    assert all(map(is_code, ["    ", "();", "\n", " == ", "0"])) and not any(
        map(is_code, ["a", "é", ""])
    )
    texts = {
        " the": "LATIN",
        "日": "CJK",
        "の": "HIRAGANA",
        "ж": "CYRILLIC",
        "42": "digits",
        "):": "symbols",
    }
    assert {text: script_of(text) for text in texts} == texts
    assert script_of("\n") == "space" and script_of("\ufffd") == "part of a character"


def test_tags_parts_of_characters_and_simplified_chinese_are_in_no_group() -> None:
    """A large vocabulary has thousands of each."""
    for text in ("<unused42>", "<table>", "a=b", "\ufffd", " \ufffd", "这", "对于"):
        assert not any(belongs(text) for belongs in GROUPS.values()), text
    assert is_japanese("的") and is_japanese("々日") and is_symbol("👍🏽")


def characters() -> Any:
    """A vocabulary of characters with byte fallback, which has the letters of byte-level ones."""
    texts = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "Ġ", "ġ", "日", "本", "▁"]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(texts)}, merges=[], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_single_characters_are_no_bytes() -> None:
    assert always_kept(characters(), {0}) == set(range(257))
    assert token_texts(characters(), 263)[257:] == ["Ġ", "ġ", "日", "本", " ", ""]


def test_bytes_of_a_byte_level_vocabulary(tiny_llama_dir: Path) -> None:
    tokenizer = load_tokenizer(find_target(str(tiny_llama_dir)))
    assert always_kept(tokenizer, set()) == set(range(259))  # 256 bytes and 3 specials
    texts = token_texts(tokenizer, 259)
    assert texts.count("\ufffd") == 128  # those past ASCII spell no character alone


def test_specials_terminators_and_bytes_are_always_in(tokenizer: Any) -> None:
    kept = always_kept(tokenizer, {1, 2000})
    names = {tokenizer.convert_ids_to_tokens(i) for i in kept if i != 2000}
    assert {"<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"} <= names
    assert {f"<0x{b:02X}>" for b in range(256)} <= names
    assert 2000 in kept


def test_the_most_frequent_fill_the_rest_ties_to_the_lower_id(tokenizer: Any) -> None:
    counts = np.zeros(2048, np.int64)
    counts[[2000, 1900, 1800, 1700]] = [5, 9, 9, 1]
    kept = always_kept(tokenizer, {1})
    vocab = build_vocab(counts, size=len(kept) + 3, tokenizer=tokenizer, eos_ids={1})
    assert set(vocab.ids.tolist()) == kept | {1900, 1800, 2000}
    one_less = build_vocab(counts, size=len(kept) + 1, tokenizer=tokenizer, eos_ids={1})
    assert set(one_less.ids.tolist()) == kept | {1800}
    i = np.arange(len(vocab.ids))
    assert (i + vocab.d2t == vocab.ids).all() and vocab.t2d.sum() == len(vocab.ids)
    assert vocab.d2t.dtype == np.int64 and vocab.t2d.dtype == np.bool_ and len(vocab.t2d) == 2048


def test_whole_groups_and_sizes_that_cannot_be(tokenizer: Any) -> None:
    counts = np.zeros(2048, np.int64)
    texts = [tokenizer.decode([i]) for i in range(2048)]
    code = {i for i, text in enumerate(texts) if text and is_code(text)}
    kept = always_kept(tokenizer, {1}) | code
    vocab = build_vocab(
        counts, size=len(kept), tokenizer=tokenizer, eos_ids={1}, must_include=["code"]
    )
    assert set(vocab.ids.tolist()) == kept
    options = {"tokenizer": tokenizer, "eos_ids": {1}, "must_include": ["code"]}
    with pytest.raises(PipelineError, match=rf"between {len(kept):,} \(.* code\) and the 2,048"):
        build_vocab(counts, size=len(kept) - 1, **options)
    with pytest.raises(PipelineError, match="--size 2049"):
        build_vocab(counts, size=2049, **options)
    with pytest.raises(PipelineError, match="--must-include klingon: choose from japanese, "):
        build_vocab(counts, size=2048, tokenizer=tokenizer, eos_ids={1}, must_include=["klingon"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, d: (t, d.astype(np.int32)), "must be bool"),
        (lambda t, d: (t, d + 1999), "leads to ids"),
        (lambda t, d: (t, np.array([3, 2, 2])), "draft id 1 does not lead to a higher id"),
        (lambda t, d: (~t, d), "disagree on token 0"),
        (lambda t, d: (t, d[:-1]), "disagree on token 9"),
    ],
)
def test_a_broken_map_is_named(change: Any, message: str) -> None:
    t2d = np.zeros(20, np.bool_)
    t2d[[3, 5, 9]] = True
    d2t = np.array([3, 4, 7])
    assert check_vocab(t2d, d2t).ids.tolist() == [3, 5, 9]
    with pytest.raises(PipelineError, match=message):
        check_vocab(*change(t2d, d2t))


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=12), max_size=6))
def test_transitions_equal_counting_by_hand(rows: list[list[tuple[int, int]]]) -> None:
    first: Counter[tuple[int, ...]] = Counter()
    second: Counter[tuple[int, ...]] = Counter()
    for row in rows:
        for t, (_, supervised) in enumerate(row):
            ids = [i for i, _ in row]
            if supervised and t >= 1:
                first[tuple(ids[t - 1 : t + 1])] += 1
            if supervised and t >= 2:
                second[tuple(ids[t - 2 : t + 1])] += 1
    found = count_transitions(
        (np.array([i for i, _ in row], np.int32), np.array([m for _, m in row], np.uint8))
        for row in rows
    )
    for counted, expected in ((found.first, first), (found.second, second)):
        keys = [tuple(key) for key in counted.keys.tolist()]
        assert (
            keys == sorted(expected)
            and dict(zip(keys, counted.counts.tolist(), strict=True)) == expected
        )


def write(run: Path, out: Path, **options: Any) -> dict[str, Any]:
    given = {"size": 700, "must_include": ["code"], "markov": True, "target": None}
    return write_vocab(str(run), out, **(given | options), console=QUIET)


def test_a_vocabulary_of_a_run(nano_run: Path, tmp_path: Path, tokenizer: Any) -> None:
    report = write(nano_run, tmp_path / "a")
    vocab = read_vocab(tmp_path / "a")
    rows = shard_rows(nano_run)
    supervised = np.concatenate([r["input_ids"][r["loss_mask"] == 1] for r in rows])
    counts = np.bincount(supervised, minlength=2048)
    assert report["coverage"]["all"]["tokens"] == len(supervised)
    share = np.isin(supervised, vocab.ids).mean()
    assert report["coverage"]["all"]["share"] == round(float(share), 6) > 0.9
    assert report["coverage"]["sources"].keys() == {"prompts.jsonl"}
    again = coverage(vocab, {"x": counts}, tokenizer)
    assert again["scripts"] == report["coverage"]["scripts"]
    assert sum(s["tokens"] for s in again["scripts"].values()) == len(supervised)
    # What is left out is no more frequent than the least frequent free choice that is in.
    forced = set(always_kept(tokenizer, {1, 2, 3})) | {
        i for i in range(2048) if is_code(tokenizer.decode([i]))
    }
    free = [counts[i] for i in vocab.ids.tolist() if i not in forced]
    assert counts[~vocab.t2d].max() <= min(free)
    tables = load_file(tmp_path / "a" / "transitions.safetensors")
    assert tables["first_counts"].sum() == tables["second_counts"].sum() == len(supervised)
    # The same inputs give the same bytes, and an existing map is left alone.
    write(nano_run, tmp_path / "b")
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert names == {"vocab.safetensors", "vocab.json", "transitions.safetensors"}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    write(nano_run, tmp_path / "a")
    before = (tmp_path / "a" / "vocab.safetensors").read_bytes()
    with pytest.raises(PipelineError, match="another draft vocabulary is there already"):
        write(nano_run, tmp_path / "a", size=800)
    assert (tmp_path / "a" / "vocab.safetensors").read_bytes() == before


def test_counts_are_bounded_and_in_the_vocabulary(
    nano_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = FeatureIndex(nano_run, ["source", "input_ids", "loss_mask"])
    apart = command._count(index, 2048)
    monkeypatch.setattr(command, "SOURCES_KEPT", 0)
    together = command._count(index, 2048)
    assert apart.keys() == {"prompts.jsonl"} and together.keys() == {"all others"}
    assert together["all others"].tolist() == apart["prompts.jsonl"].tolist()
    with pytest.raises(PipelineError, match="a token id outside the vocabulary of 5"):
        command._count(index, 5)


def test_the_same_map_again_is_said_to_be_there(nano_run: Path, tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        console = Console(file=io.StringIO(), width=200)
        write_vocab(
            str(nano_run),
            tmp_path / "v",
            size=700,
            must_include=[],
            markov=False,
            target=None,
            console=console,
        )
        said.append("nothing was written" in console.file.getvalue())  # type: ignore[attr-defined]
    assert said == [False, True]


def test_a_map_that_was_changed_or_is_of_another_tokenizer(
    nano_run: Path, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    write(nano_run, tmp_path / "a")
    data = bytearray((tmp_path / "a" / "vocab.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "a" / "vocab.safetensors").write_bytes(data)
    with pytest.raises(PipelineError, match=r"is not the file that vocab\.json describes"):
        read_vocab(tmp_path / "a")
    (tmp_path / "a" / "vocab.safetensors").write_bytes(b"nonsense")
    with pytest.raises(PipelineError, match="cannot read a draft vocabulary"):
        read_vocab(tmp_path / "a")
    with pytest.raises(PipelineError, match="has another tokenizer than the run"):
        write(nano_run, tmp_path / "c", target=str(tiny_llama_dir))
    assert not (tmp_path / "c").exists()


def test_the_command_prints_json(nano_run: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from pipeline.cli import app

    words = ["vocab", str(nano_run), "--size", "600", "-o", str(tmp_path / "v"), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["size"] == 600
