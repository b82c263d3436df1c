"""gemma4-nano, the trained Gemma-4 that ships with the package, through both backends."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_files import shard_rows
from typer.testing import CliRunner

from jobs.nano_card import answer_logprobs, read_held_out
from pipeline.chat import ChatRenderer
from pipeline.cli import app
from pipeline.execute import LocalWorker, execute
from pipeline.models.base import PositionedRow, TargetModel
from pipeline.models.load import find_target, load_eos_ids, load_target, load_tokenizer
from pipeline.models.nano import HELD_OUT_NAME, NANO_FOLDER
from pipeline.parity import compare
from pipeline.settings import Settings
from pipeline.validate import validate

needs_llamacpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None,
    reason="llama.cpp tests: make llamacpp, or pip install 'drafter-features[llamacpp]'",
)


def load_nano(target: str = "gemma4-nano", backend: str = "transformers") -> TargetModel:
    files = find_target(target)
    return load_target(
        files,
        backend=backend,
        dtype="float32",
        kv_cache_dtype="float32",
        device="cpu",
        threads=1,
        max_length=1024,
        eos_ids=load_eos_ids(files, load_tokenizer(files)),
    )


def test_every_gemma4_feature_is_on() -> None:
    target = load_nano()
    geometry, config = target.geometry, target.model.config  # type: ignore[attr-defined]
    assert {k: (v.layer, v.kv_heads, v.head_dim) for k, v in geometry.shared_kv.items()} == {
        "sliding": (2, 2, 32),
        "full": (3, 2, 64),
    }
    assert (geometry.sliding_window, geometry.logit_softcap) == (64, 30.0)
    assert (geometry.hidden_size, geometry.vocab_size) == (256, 2048)
    assert (geometry.context_length, config.hidden_size_per_layer_input) == (131072, 32)
    scalars = [float(layer.layer_scalar) for layer in target.model.model.layers]  # type: ignore
    assert len(set(scalars)) == geometry.num_layers == 8
    parameters = sum(p.numel() for p in target.model.parameters())  # type: ignore[attr-defined]
    assert 4_000_000 < parameters < 6_000_000


def test_it_has_learnt_something() -> None:
    """At least 1.5 nats below the unigram entropy, on every eighth held-out chat."""
    files = find_target("gemma4-nano")
    tokenizer, target = load_tokenizer(files), load_nano()
    renderer = ChatRenderer(tokenizer, eos_ids=target.eos_ids)
    logprobs, ids = answer_logprobs(target, renderer, read_held_out(NANO_FOLDER)[::8])
    frequencies = np.unique(ids, return_counts=True)[1] / len(ids)
    assert -logprobs.mean() < -(frequencies * np.log(frequencies)).sum() - 1.5


def run_nano(out: Path, target: str, backend: str) -> list[dict[str, Any]]:
    settings = Settings.check(
        target=target,
        backend=backend,
        prompts=str(NANO_FOLDER / HELD_OUT_NAME),
        out=str(out),
        limit=8,
        max_new_tokens=200,
        dtype="float32",
        kv_cache_dtype="float32",
        seed=7,
    )
    execute(settings, LocalWorker)
    report = validate(out)
    assert report.ok, [finding.message for finding in report.findings]
    return shard_rows(out)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("nano")
    quantise = ["--quantise", "Q4_K_M"] if importlib.util.find_spec("llama_cpp") else []
    done = CliRunner().invoke(app, ["tiny-target", "gemma4-nano", str(out), *quantise])
    assert done.exit_code == 0, done.output
    return out


def test_rollouts_features_and_targets(tmp_path: Path) -> None:
    """Answers that end by themselves, so targets and terminators are real ones."""
    rows = run_nano(tmp_path, "gemma4-nano", "transformers")
    assert len(rows) == 8
    assert sum(row["finish_reason"] == "stop" for row in rows) >= 4
    for row in rows:
        assert row["target_mask"].sum() > 0
        assert row["sliding_key"].shape == (row["num_tokens"], 2, 32)
        assert row["full_key"].shape == (row["num_tokens"], 2, 64)
        supervised = np.flatnonzero(row["loss_mask"])
        # Greedy: each supervised token is the teacher's first choice one row before.
        agree = row["teacher_top_ids"][supervised - 1, 0] == row["input_ids"][supervised]
        assert agree.mean() > 0.98


@needs_llamacpp
def test_the_gguf_says_the_same_through_llamacpp(gguf: Path, tmp_path: Path) -> None:
    served = run_nano(tmp_path, str(gguf / "gemma4-nano-F16.gguf"), "llamacpp")
    rows = [PositionedRow(row["input_ids"], row["position_offset"]) for row in served]
    a = load_nano(str(gguf / "gemma4-nano-F16.gguf"), "llamacpp")
    report = compare(a, load_nano(), rows, 64)
    assert report.argmax_agreement == 1.0
    assert max(report.relative_l2.values()) < 2e-3
    quantised = load_nano(str(gguf / "gemma4-nano-Q4_K_M.gguf"), "llamacpp")
    assert 0.8 < compare(a, quantised, rows[:2], 64).argmax_agreement < 1.0


def test_the_card_states_its_numbers() -> None:
    card = (NANO_FOLDER / "README.md").read_text()
    for words in ("license: apache-2.0", "--eval", "held-out loss", "unigram entropy", "PSF"):
        assert words in card
    assert len(read_held_out(NANO_FOLDER)) == 200
    assert json.loads((NANO_FOLDER / "config.json").read_text())["sliding_window"] == 64
    assert not [p for p in NANO_FOLDER.iterdir() if p.suffix in (".bin", ".pt", ".pkl")]
