"""`pipeline report`: every number against plain loops over the rows; the page's text and safety."""

import base64
import gc
import hashlib
import html.parser
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from run_files import shard_rows
from tampering import Tampered
from typer.testing import CliRunner

import pipeline.report.collect
import pipeline.report.vectors
from pipeline.cli import app
from pipeline.errors import PipelineError
from pipeline.models.load import find_target, load_tokenizer
from pipeline.report.collect import Statistics, collect, spans
from pipeline.report.command import gather, write_report
from pipeline.report.counts import LARGEST_INT, IntCounts, PositionMeans, position_bin
from pipeline.report.page import render
from pipeline.report.samples import SAMPLES, decoder_of, pieces
from pipeline.report.scripts import script_of
from pipeline.report.shares import DEPTHS, products
from pipeline.report.vectors import VectorStats
from pipeline.validate.reading import read_group

Row = dict[str, Any]


@pytest.fixture(scope="module")
def rows(tiny_run: Path) -> list[Row]:
    return shard_rows(tiny_run)


@pytest.fixture(scope="module")
def found(tiny_run: Path) -> Statistics:
    return collect(tiny_run)


def supervised(row: Row) -> list[int]:
    """The tokens t >= 1 that the teacher row before them predicts and that are supervised."""
    return [t for t in range(1, len(row["input_ids"])) if row["loss_mask"][t]]


def k_step_products(rows: list[Row], k: int) -> list[float]:
    """By the definition: t+1 to t+k in the row and supervised; teacher rows t to t+k-1."""
    return [
        float(
            np.prod([np.exp(np.float64(row["teacher_top_logprobs"][t + j, 0])) for j in range(k)])
        )
        for row in rows
        for t in range(len(row["input_ids"]) - k)
        if row["loss_mask"][t + 1 : t + 1 + k].all()
    ]


def test_sources_and_scripts_share_out_rows_tokens_and_bytes(
    tiny_run: Path, rows: list[Row], found: Statistics
) -> None:
    assert set(found.sources) == {"prompts.jsonl"}
    japanese = [row for row in rows if row["sample_id"] == "row-1"]
    assert {name: share.rows for name, share in found.scripts.items()} == {
        "Latin": len(rows) - 1,
        "Japanese": 1,
    }
    assert found.scripts["Japanese"].tokens == japanese[0]["num_tokens"]
    assert found.scripts["Japanese"].supervised == japanese[0]["loss_mask"].sum()
    assert found.total.rows == len(rows) == 7
    assert found.degenerate == sum(row["degenerate"] for row in rows)
    assert found.total.tokens == sum(row["num_tokens"] for row in rows)
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    disk = sum(shard["bytes"] for shard in manifest["shards"])
    # Of the files all but their footers, and every byte of that to one row.
    assert 0.9 * disk < found.total.disk_bytes < disk
    whole = sum(share.disk_bytes for share in found.scripts.values())
    assert whole == pytest.approx(found.total.disk_bytes)
    first = pq.ParquetFile(tiny_run / manifest["shards"][0]["file"]).metadata.row_group(0)
    compressed = sum(first.column(i).total_compressed_size for i in range(first.num_columns))
    tokens = manifest["shards"][0]["tokens"]
    assert found.scripts["Japanese"].disk_bytes == pytest.approx(
        compressed * japanese[0]["num_tokens"] / tokens
    )


def test_lengths_and_offsets_are_counted_exactly(rows: list[Row], found: Statistics) -> None:
    for counts, values in (
        (found.lengths, [row["num_tokens"] for row in rows]),
        (found.offsets, [row["position_offset"] for row in rows]),
        (found.last_positions, [r["position_offset"] + r["num_tokens"] - 1 for r in rows]),
    ):
        assert (counts.smallest, counts.largest) == (min(values), max(values))
        for share in (0.1, 0.5, 0.9, 0.99, 1.0):
            exact = np.quantile(values, share, method="inverted_cdf")
            assert counts.quantile(share) == exact, share
        assert counts.histogram(100, 5).tolist() == [
            sum(min(value // 100, 4) == i for value in values) for i in range(5)
        ]


def test_teacher_means_by_position(rows: list[Row], found: Statistics) -> None:
    """Entropy with the tail as one outcome, top-1 and top-k mass, in bins 0, 1, 2-3, 4-7, …"""
    in_row: dict[int, list[list[float]]] = {}
    in_answer: dict[int, list[list[float]]] = {}
    for row in rows:
        for t in supervised(row):
            p = np.exp(row["teacher_top_logprobs"][t - 1].astype(np.float64))
            tail = float(row["teacher_tail_mass"][t - 1])
            outcomes = np.array([*p, tail])[np.array([*p, tail]) > 0]
            values = [float(-(outcomes * np.log(outcomes)).sum()), float(p[0]), float(p.sum())]
            first = t
            while first and row["loss_mask"][first - 1]:
                first -= 1
            in_row.setdefault((t - 1).bit_length(), []).append(values)
            in_answer.setdefault((t - first).bit_length(), []).append(values)
    for means, expected in ((found.in_row, in_row), (found.in_answer, in_answer)):
        got = {first.bit_length(): (count, values) for first, _, count, values in means.rows()}
        assert got.keys() == expected.keys()
        for at, (count, values) in got.items():
            assert count == len(expected[at])
            np.testing.assert_allclose(values, np.mean(expected[at], axis=0), rtol=1e-6)


def test_agreement_counts_tokens_and_whole_answers(rows: list[Row], found: Statistics) -> None:
    tokens = hits = answers = whole = 0
    for row in rows:
        same = [row["teacher_top_ids"][t - 1, 0] == row["input_ids"][t] for t in supervised(row)]
        tokens, hits = tokens + len(same), hits + sum(same)
        mask = "".join(map(str, row["loss_mask"]))
        for answer in re.finditer("1+", mask):
            answers += 1
            whole += all(
                row["teacher_top_ids"][t - 1, 0] == row["input_ids"][t]
                for t in range(answer.start(), answer.end())
            )
    assert found.agreement == (tokens, hits, answers, whole)
    assert 0 < hits < tokens and answers == 8  # one row has two turns


def test_greedy_answers_are_the_teachers_own(nano_run: Path, tmp_path: Path) -> None:
    agreement = collect(nano_run).agreement
    assert agreement.tokens > 200
    assert agreement.token_share is not None and agreement.token_share > 0.97
    given = Tampered(nano_run, tmp_path / "given")
    for name in ("train-00000",):
        changed = given.rows(name)
        for row in changed:
            row["on_policy"] = 0
        given.write(name, changed)
    assert collect(given.out).agreement == (0, 0, 0, 0)


def test_acceptance_bound_is_the_mean_k_step_product(rows: list[Row], found: Statistics) -> None:
    expected = [float(np.mean(k_step_products(rows, k))) for k in range(1, DEPTHS + 1)]
    np.testing.assert_allclose(found.total.acceptance, expected, rtol=1e-9)
    assert found.total.expected_length(3) == pytest.approx(1 + sum(expected[:3]))
    assert found.total.starts.tolist() == [len(k_step_products(rows, k)) for k in range(1, 9)]
    japanese = [row for row in rows if row["sample_id"] == "row-1"]
    np.testing.assert_allclose(
        found.scripts["Japanese"].acceptance,
        [np.mean(k_step_products(japanese, k)) for k in range(1, DEPTHS + 1)],
        rtol=1e-9,
    )


def test_neither_answers_nor_products_reach_into_the_next_row() -> None:
    """Rows that begin with a supervised token, which no template gives, but a file may hold."""
    mask = np.array([0, 1, 1, 1, 1, 0, 1], dtype=bool)
    row_of = np.array([0, 0, 0, 1, 1, 1, 1])
    assert spans(mask, row_of).tolist() == [-1, 0, 0, 1, 1, -1, 2]
    top1 = np.array([0.5, 0.25, 0.9, 0.8, 0.7, 0.6, 0.1])
    sums, counts = products(top1, mask, row_of, rows=2)
    assert counts[:, :3].tolist() == [[2, 1, 0], [2, 0, 0]]
    np.testing.assert_allclose(sums[:, :2], [[0.5 + 0.25, 0.5 * 0.25], [0.8 + 0.6, 0]])


def vectors_of(found: Statistics, column: str, head: int | None) -> VectorStats:
    return next(v for v in found.vectors if (v.column, v.head) == (column, head))


def test_norms_and_channel_ranges_head_by_head(rows: list[Row], found: Statistics) -> None:
    names = [("final_hidden", None), *((n, h) for n in ("full_key", "full_value") for h in (0, 1))]
    assert [(v.column, v.head) for v in found.vectors] == names
    for column, head in names:
        at = slice(None) if head is None else (slice(None), head)
        values = np.concatenate([row[column][at] for row in rows]).astype(np.float64)
        norms = np.linalg.norm(values, axis=1)
        got = vectors_of(found, column, head)
        assert got.count == len(norms) and got.not_finite == 0
        exact = [norms.mean(), norms.std(), norms.min(), norms.max()]
        np.testing.assert_allclose([got.mean, got.std, got.smallest, got.largest], exact, rtol=1e-6)
        np.testing.assert_allclose(
            [got.median, got.p99],
            np.quantile(norms, [0.5, 0.99], method="inverted_cdf"),
            rtol=0.002,
        )
        np.testing.assert_array_equal(got.low, values.min(axis=0))
        np.testing.assert_array_equal(got.high, values.max(axis=0))
        peaks = np.abs(values).max(axis=0)
        assert got.channels[0].channel == int(peaks.argmax())
        assert got.channels[0].ratio == pytest.approx(peaks.max() / np.median(peaks))
        tokens = [(row["sample_id"], t) for row in rows for t in range(row["num_tokens"])]
        order = np.argsort(-norms, kind="stable")[:3]
        assert [e.norm for e in got.extremes] == pytest.approx(norms[order].tolist())
        assert (got.extremes[0].row, got.extremes[0].t) == tokens[order[0]]


def test_vectors_taken_in_blocks_are_the_same(
    tiny_run: Path, found: Statistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.report.vectors, "BLOCK_VALUES", 1000)
    for got, expected in zip(collect(tiny_run).vectors, found.vectors, strict=True):
        assert got.extremes == expected.extremes and got.count == expected.count
        assert got.mean == pytest.approx(expected.mean) and got.std == pytest.approx(expected.std)
        np.testing.assert_array_equal(got.low, expected.low)


def test_outliers_and_values_that_are_not_finite_are_counted_apart(
    tiny_run: Path, tmp_path: Path
) -> None:
    run = Tampered(tiny_run, tmp_path / "out")

    def change(row: Row) -> None:
        row["final_hidden"][5] *= 16
        row["final_hidden"][6] /= 16
        row["final_hidden"][7, 3] = np.nan
        row["full_key"][9, 1] *= 64

    run.edit_row(change)
    hidden = vectors_of(collect(run.out), "final_hidden", None)
    assert (hidden.outliers, hidden.not_finite) == (2, 1)
    assert (hidden.extremes[0].row, hidden.extremes[0].t) == ("row-0", 5)
    assert np.isfinite(hidden.high).all()
    before = collect(tiny_run)
    for head, more in ((0, 0), (1, 1)):
        outliers = vectors_of(before, "full_key", head).outliers
        assert vectors_of(collect(run.out), "full_key", head).outliers == outliers + more


def test_row_groups_are_let_go_of(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays that of one row group, whatever the samples and extremes keep."""
    alive: list[weakref.ref[Any]] = []

    def reading(*args: Any, **kwargs: Any) -> Any:
        group = read_group(*args, **kwargs)
        # The one that the caller's loop still names, and one of the rollouts beside it.
        assert sum(ref() is not None for ref in alive) <= 2
        alive.append(weakref.ref(next(iter(group.arrays.values())).base))
        return group

    monkeypatch.setattr(pipeline.report.collect, "read_group", reading)
    found = collect(tiny_run)
    gc.collect()
    assert len(alive) == 4 and len(found.samples) == 7
    assert not any(ref() is not None for ref in alive)


def test_a_hostile_position_does_not_make_a_long_table() -> None:
    counts = IntCounts()
    counts.add(np.array([3, 2**31 - 1, -5]))
    assert (counts.smallest, counts.largest, counts.total) == (0, LARGEST_INT, 3)
    assert position_bin(np.array([0, 1, 2, 3, 4, 7, 8, 2**40])).tolist() == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
        25,
    ]
    means = PositionMeans(1)
    means.add(np.array([2**40]), np.array([2.0]))
    assert [row[2:] for row in means.rows()] == [(1, [2.0])]


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("<|im_start|>user\nWhy is the sky blue?", "Latin"),
        ("<|im_start|>user\n空はなぜ青いのですか。", "Japanese"),
        ("<|im_start|>user\n天空为什么是蓝色的？", "Chinese (Han)"),
        ("user 하늘은 왜 파란가요?", "Korean"),
        ("user Почему небо голубое? print(x)", "Cyrillic"),
        ("def f(x):\n    return x  # почему\n" + "y = f(1)\n" * 9, "Latin"),
        ("1 + 1 = 2", "no letters"),
        ("", "no letters"),
    ],
)
def test_the_script_is_the_commonest_that_has_a_fifth_of_the_letters(
    text: str, script: str
) -> None:
    assert script_of(text) == script


def test_pieces_of_a_character_are_read_together(tiny_llama_dir: Path) -> None:
    tokenizer = load_tokenizer(find_target(str(tiny_llama_dir)))
    ids = tokenizer("a日é<|im_end|>")["input_ids"]
    assert len(ids) == 1 + 3 + 2 + 1
    decode = decoder_of(tokenizer)
    assert list(pieces(ids, decode)) == [
        (0, 1, "a"),
        (1, 4, "日"),
        (4, 6, "é"),
        (6, 7, "<|im_end|>"),
    ]
    cut = list(pieces(ids[2:4], decode))  # the end of 日 alone: no character
    assert [(start, stop) for start, stop, _ in cut] == [(0, 1), (1, 2)]
    assert "\ufffd" not in "".join(text for *_, text in cut)
    assert decode([10**6]) == "[1000000]"


class Reader(html.parser.HTMLParser):
    """What a browser would make of a page: its elements, their attributes, its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(*runs: Path) -> str:
    return render([gather(run, quick=False) for run in runs])


@pytest.fixture(scope="module")
def page(tiny_run: Path) -> str:
    return page_of(tiny_run)


def test_the_page_says_what_the_run_is(tiny_run: Path, page: str, found: Statistics) -> None:
    text = Reader(page).text
    manifest = json.loads((tiny_run / "manifest.json").read_text())
    for part in (
        manifest["target"]["sha256"],
        manifest["fingerprint"],
        manifest["semantics"]["pairing"],
        "temperature 1.0",
        "full: block 1, 2 × 8, default RoPE",
        "9 rows in.",
        f"{found.degenerate} rows are degenerate",
        "bad_json",
        "empty_conversation",
        "rules passed, 0 failed",
        f"{found.total.tokens:,} {found.total.supervised:,} supervised",
        f"≤ {found.total.expected_length(3):.2f}",
    ):
        assert part in text, part
    rollouts = manifest["rollouts"]
    generated = sum(c["supervised_tokens"] for c in rollouts)
    rate = generated / sum(c["seconds"] for c in rollouts)
    assert f"{generated:,} {rate:,.0f}" in text


def test_the_page_needs_and_may_load_nothing(page: str) -> None:
    reader = Reader(page)
    assert not reader.tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
    assert all(name not in ("src", "srcset", "style") for name, _ in reader.attributes)
    assert all(str(value)[0] == "#" for name, value in reader.attributes if name == "href")
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme" in style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = next(value for _, value in reader.attributes if str(value).startswith("default-src"))
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def test_hostile_text_stays_text(tiny_run: Path, tiny_llama_dir: Path, tmp_path: Path) -> None:
    """In ids, sources, tokens and the manifest: nothing becomes an element or an attribute."""
    run = Tampered(tiny_run, tmp_path / "out")
    attack = """"'><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}</style>"""
    in_tokens = "<b onclick=alert(2)>tokens</b>"
    tokenizer = load_tokenizer(find_target(str(tiny_llama_dir)))
    ids = np.array(tokenizer(in_tokens)["input_ids"], dtype=np.int32)

    def change(row: Row) -> None:
        row["sample_id"] = f"{attack}\u202e\x00"
        row["source"] = f"{attack}:12"
        row["finish_reason"] = attack
        first = int(np.flatnonzero(row["loss_mask"])[0])
        row["input_ids"][first : first + len(ids)] = ids

    run.edit_row(change)
    manifest = run.json("manifest.json")
    manifest["target"]["sha256"] = attack
    manifest["semantics"][attack] = attack
    manifest["versions"] = {attack: attack}
    manifest["rejected"] = {attack: 1}
    run.edit_json("manifest.json", **manifest)
    page = page_of(run.out)
    reader, clean = Reader(page), Reader(page_of(tiny_run))
    assert reader.tags - clean.tags <= {"li", "ul"}  # of the validator's findings
    assert not [name for name, _ in reader.attributes if name.startswith("on")]
    assert {name for name, _ in reader.attributes} == {name for name, _ in clean.attributes}
    assert reader.text.count("<script>alert(1)</script>") > 10
    assert in_tokens in "".join(reader.words) and "b" not in reader.tags - clean.tags
    assert "49" not in re.findall(r"onerror=alert\(1\)>(..)", reader.text)


def test_a_broken_run_is_called_so_with_its_findings(tiny_run: Path, tmp_path: Path) -> None:
    run = Tampered(tiny_run, tmp_path / "out")
    run.edit_row(lambda row: row["teacher_tail_mass"].__isub__(0.1))
    text = Reader(page_of(run.out)).text
    assert "Not valid" in text and "1 failed" in text
    assert "row row-0: teacher_tail_mass[0]:" in text


def test_samples_show_mask_offset_and_targets(tiny_run: Path, page: str, rows: list[Row]) -> None:
    found = collect(tiny_run)
    assert len(found.samples) == min(SAMPLES, len(rows))
    by_id = {row["sample_id"]: row for row in rows}
    for sample in found.samples:
        row = by_id[sample.sample_id]
        assert sample.position_offset == row["position_offset"]
        window = slice(sample.start, sample.start + len(sample.input_ids))
        np.testing.assert_array_equal(sample.target_ids, row["target_ids"][window])
        np.testing.assert_array_equal(sample.loss_mask, row["loss_mask"][window])
        assert sample.anchor is not None
        t = sample.start + sample.anchor
        assert row["loss_mask"][t : t + 4].tolist() == [0, 1, 1, 1]  # the first answer's start
        cells = f'<td class="r">{t}</td><td class="r">{row["position_offset"] + t:,}</td>'
        assert f'<tr class="anchor">{cells}' in page
    for css in ("m k1", "m k2", "m k3", "n"):
        assert f'<span class="{css}" title="t ' in page


def test_the_same_prompts_show_the_same_rows(tiny_run: Path, nano_run: Path) -> None:
    ids = [s.sample_id for s in collect(nano_run).samples]
    assert len(ids) == SAMPLES == len(set(ids)) and len(shard_rows(nano_run)) == 12
    assert ids == [s.sample_id for s in collect(nano_run).samples]


def test_two_runs_are_set_side_by_side(tiny_run: Path, nano_run: Path, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    arguments = ["report", str(tiny_run), "-o", str(output), "--compare", str(nano_run), "--quick"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and f"wrote {output}" in done.output
    page = output.read_text(encoding="utf-8")
    text = Reader(page).text
    assert f"A {tiny_run}" in text and f"B {nano_run}" in text
    assert "Feature sets mtp (common/v1, mtp/v1) mtp (common/v1, mtp/v1)" in text
    assert "Validator no findings no findings" in text
    assert re.search(r'<tr class="differs"><th scope="row">Target model</th>', page)
    assert not re.search(r'<tr class="differs"><th scope="row">Feature sets</th>', page)
    assert "--quick reads no rows" in text


def test_without_the_target_model_tokens_are_ids_and_the_page_says_why(
    tiny_run: Path, tmp_path: Path
) -> None:
    run = Tampered(tiny_run, tmp_path / "out")
    manifest = run.json("manifest.json")
    manifest["target"]["name"] = "/nowhere/model.gguf"
    run.edit_json("manifest.json", **manifest)
    text = Reader(page_of(run.out)).text
    assert "Tokens are shown as ids, because the tokenizer is not here: --target /nowhere" in text
    shards = tmp_path / "shards"
    shutil.copytree(tiny_run / "data", shards)
    text = Reader(page_of(shards)).text
    assert "no manifest.json says what the target model is" in text
    assert "unknown" in text and "no manifest.json says so" in text


def test_what_cannot_be_reported_is_one_line(tiny_run: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"--output .*: No such file or directory"):
        write_report([tiny_run], tmp_path / "none" / "r.html", quick=True)
    with pytest.raises(PipelineError, match=r"holds no manifest\.json"):
        write_report([tmp_path], tmp_path / "r.html")
    broken = Tampered(tiny_run, tmp_path / "out")
    path = broken.path("train-00001")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(PipelineError, match=r"train-00001.*`pipeline validate` lists all"):
        collect(broken.out)
