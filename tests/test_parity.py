"""The parity report: its numbers on known differences, and two backends on one tiny model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.features import teacher_rows
from pipeline.models.base import PositionedRow, TeacherRows
from pipeline.models.hf import TransformersTarget
from pipeline.models.tiny import GGUF_NAME, write_tiny_gemma4
from pipeline.models.tiny_tokenizer import EOS_IDS
from pipeline.parity import compare, top_k_kl


def load_hf(folder: Path) -> TransformersTarget:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return TransformersTarget(model.eval(), eos_ids=frozenset(EOS_IDS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    write_tiny_gemma4(out, layers=4, full_every=2, hidden=64, head_dim=16, full_head_dim=32)
    return out


@pytest.fixture(scope="module")
def hf(tiny: Path) -> TransformersTarget:
    return load_hf(tiny)


@pytest.fixture(scope="module")
def rows() -> list[PositionedRow]:
    random = np.random.default_rng(0)
    return [
        PositionedRow(random.integers(11, 512, length).astype(np.int32), offset)
        for length, offset in [(40, 0), (1, 5), (70, 900)] + [(5, 3)] * 8
    ]


class Altered:
    """A target model with one of its outputs changed after the fact."""

    backend_version = "0"

    def __init__(self, target: TransformersTarget, change) -> None:
        self.target, self.change, self.backend = target, change, "altered"
        self.geometry, self.eos_ids = target.geometry, target.eos_ids

    def forward(self, rows, *, top_k, block_layers=()):
        outputs = self.target.forward(rows, top_k=top_k, block_layers=block_layers)
        return [self.change(output) for output in outputs]


def test_a_model_against_itself(hf, rows) -> None:
    report = compare(hf, hf, rows, 8, block_layers=[1])
    assert report.relative_l2 == dict.fromkeys(
        [
            "final_hidden",
            "sliding_key",
            "sliding_value",
            "full_key",
            "full_value",
            "block_1_hidden",
        ],
        0.0,
    )
    assert (report.rows, report.tokens, report.top_k) == (11, 40 + 1 + 70 + 40, 8)
    assert report.argmax_agreement == 1
    assert report.mean_kl == report.max_kl == report.mean_logprob_gap == 0
    assert report.violations(min_argmax_agreement=1, max_mean_kl=0) == []


def test_known_differences_are_measured(hf, rows) -> None:
    def change(output):
        key, value = output.shared_kv["full"]
        teacher = output.teacher
        ids = teacher.top_ids.clone()
        if len(ids) == 70:  # the two likeliest tokens swap ids in half of the longest row
            ids[:35, [0, 1]] = ids[:35, [1, 0]]
        logprobs = teacher.token_logprobs + 0.5
        logprobs[0] = 0
        return replace(
            output,
            final_hidden=output.final_hidden * 1.25,
            shared_kv={**output.shared_kv, "full": (-key, value)},
            teacher=teacher._replace(top_ids=ids, token_logprobs=logprobs),
        )

    report = compare(hf, Altered(hf, change), rows, 8)
    assert report.relative_l2["final_hidden"] == pytest.approx(0.25, rel=1e-6)
    assert report.relative_l2["full_key"] == pytest.approx(2, rel=1e-6)
    assert report.relative_l2["full_value"] == report.relative_l2["sliding_key"] == 0
    assert report.argmax_agreement == pytest.approx(1 - 35 / 151)
    assert report.mean_logprob_gap == pytest.approx(0.5, rel=1e-5)
    p = hf.forward(rows[2:3], top_k=8)[0].teacher.top_logprobs[:35, :2].double()
    swapped = (p[:, 0].exp() - p[:, 1].exp()) * (p[:, 0] - p[:, 1])
    assert report.mean_kl == pytest.approx(float(swapped.sum()) / 151, rel=1e-5)
    assert report.max_kl == pytest.approx(float(swapped.max()), rel=1e-5)
    assert len(report.violations(min_argmax_agreement=0.99, max_mean_kl=1e-3)) == 2


def teacher_of(logits: torch.Tensor, k: int) -> TeacherRows:
    ids, logprobs, tail, of_next = teacher_rows(logits, torch.zeros(len(logits)).long(), k)
    return TeacherRows(ids, logprobs, tail, of_next)


def test_kl_merges_what_is_not_in_both_lists() -> None:
    # Lists of two: a knows ids 0, 1; b knows ids 1, 2. Common is 1; the rest is 0, 2 and 3.
    p, q = torch.tensor([[0.5, 0.3, 0.15, 0.05]]), torch.tensor([[0.1, 0.5, 0.3, 0.1]])
    expected = 0.3 * math.log(0.3 / 0.5) + 0.7 * math.log(0.7 / 0.5)
    assert top_k_kl(teacher_of(p.log(), 2), teacher_of(q.log(), 2)).item() == pytest.approx(
        expected, rel=1e-6
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 24), st.floats(0.01, 4))
def test_kl_is_exact_with_every_token_and_never_above_it(seed: int, k: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(5, 24, generator=generator) * 2
    b = a + torch.randn(5, 24, generator=generator) * spread
    log_p, log_q = torch.log_softmax(a.double(), -1), torch.log_softmax(b.double(), -1)
    full = (log_p.exp() * (log_p - log_q)).sum(-1)
    # A rest of 1e-5 that is off by the 2e-7 of float32 is off by 2 %: so is its share of the KL.
    assert torch.all(top_k_kl(teacher_of(a, k), teacher_of(b, k)) <= full + 0.02)
    exact = top_k_kl(teacher_of(a, 24), teacher_of(b, 24))
    torch.testing.assert_close(exact, full, atol=1e-5, rtol=1e-4)


def test_models_of_other_shapes_are_refused(hf, rows) -> None:
    other = Altered(hf, None)
    other.geometry = replace(hf.geometry, num_layers=5)
    with pytest.raises(PipelineError, match="num_layers is 4 in the first and 5 in the second"):
        compare(hf, other, rows, 8)
    kv = {"full": hf.geometry.shared_kv["full"]}
    other.geometry = replace(hf.geometry, shared_kv=kv)
    with pytest.raises(PipelineError, match="sliding KV"):
        compare(hf, other, rows, 8)
    with pytest.raises(PipelineError, match="no rows"):
        compare(hf, hf, [], 8)


def test_report_prints_and_is_json(hf, rows) -> None:
    report = compare(hf, hf, rows[:1], 8)
    assert json.loads(json.dumps(report.as_dict()))["relative_l2"]["full_key"] == 0
    console = Console(width=100, record=True, file=None)
    with console.capture() as capture:
        console.print(report)
    assert "relative L2 of final_hidden" in capture.get()
    assert "100.00%" in capture.get()


def test_llama_cpp_and_transformers_on_one_model(tiny: Path, hf, rows) -> None:
    pytest.importorskip(
        "llama_cpp", reason="llama.cpp tests: pip install 'drafter-features[llamacpp]'"
    )
    from pipeline.models.llamacpp import LlamaCppTarget

    with LlamaCppTarget(
        tiny / GGUF_NAME,
        kv_dtype="float32",
        flash_attention="off",
        threads=1,
        context_tokens=256,
        eos_ids=frozenset(EOS_IDS),
    ) as llama:
        report = compare(llama, hf, rows, 32, block_layers=[0, 3])
    assert report.argmax_agreement == 1
    # Block 3 is the last: transformers' hidden_states would give it after the final norm.
    assert max(report.relative_l2.values()) <= 2e-3
    assert min(report.relative_l2.values()) > 1e-6  # two arithmetics, not one compared to itself
    assert report.mean_kl <= 1e-4
    assert report.violations(min_argmax_agreement=0.99, max_mean_kl=1e-3) == []
