"""The transformers backend against plain one-sequence passes of the same model."""

import tempfile
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, make_target, tiny_model
from transformers import DynamicCache

from pipeline.errors import PipelineError
from pipeline.features import exact_top_k
from pipeline.models.base import PositionedRow, Prompt, Sampling
from pipeline.models.hf import TransformersTarget
from pipeline.models.load import spread

LENGTHS = [3, 25, 40, 1, 12]
OFFSETS = [0, 1000, 7, 3000, 512]
TOP_K = 11


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> TransformersTarget:
    return make_target(request.param)


def make_rows(lengths: list[int], offsets: list[int]) -> list[PositionedRow]:
    rng = np.random.default_rng(0)
    return [
        PositionedRow(rng.integers(6, VOCAB, n).astype(np.int32), offset)
        for n, offset in zip(lengths, offsets, strict=True)
    ]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@torch.inference_mode()
def plain_pass(target: TransformersTarget, row: PositionedRow) -> dict[str, torch.Tensor]:
    """Hidden states, K/V and logits of one sequence, by transformers' own documented outputs."""
    model = target.model
    positions = torch.arange(row.offset, row.offset + len(row.ids))[None]
    ids = torch.tensor(row.ids, dtype=torch.long)[None]
    out = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        position_ids=positions,
        output_hidden_states=True,
        use_cache=False,
    )
    found = {"final_hidden": out.hidden_states[-1][0], "logits": out.logits[0]}
    for i, hidden in enumerate(out.hidden_states[1:-1]):
        found[f"block_{i}"] = hidden[0]
    if target.geometry.architecture.startswith("gemma4"):
        shared = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=False,
            return_shared_kv_states=True,
        ).shared_kv_states
        pairs = {kind: shared[f"{kind}_attention"] for kind in ("sliding", "full")}
    else:
        cache = DynamicCache()  # no config: every layer keeps all rows
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=positions,
            use_cache=True,
            **{target._cache_argument: cache},
        )
        pairs = {
            kind: (cache.layers[kv.layer].keys, cache.layers[kv.layer].values)
            for kind, kv in target.geometry.shared_kv.items()
        }
    for kind, (key, value) in pairs.items():
        found[f"{kind}_key"] = key[0].transpose(0, 1)
        found[f"{kind}_value"] = value[0].transpose(0, 1)
    return found


def test_geometry_names_the_last_unshared_layer_of_each_type() -> None:
    gemma = make_target("gemma4").geometry
    assert {k: (v.layer, v.kv_heads, v.head_dim) for k, v in gemma.shared_kv.items()} == {
        "sliding": (4, 2, 16),
        "full": (5, 2, 32),
    }
    assert gemma.shared_kv["full"].rope_type == "proportional"
    assert (gemma.shared_kv["sliding"].rope_theta, gemma.shared_kv["full"].rope_theta) == (1e4, 1e6)
    assert (gemma.sliding_window, gemma.logit_softcap, gemma.context_length) == (8, 30.0, 4096)
    llama = make_target("llama").geometry
    assert {k: (v.layer, v.kv_heads, v.head_dim) for k, v in llama.shared_kv.items()} == {
        "full": (2, 2, 8)
    }
    assert llama.sliding_window is None
    mistral = make_target("mistral").geometry
    assert list(mistral.shared_kv) == ["sliding"] and mistral.shared_kv["sliding"].layer == 2


def test_a_batch_equals_plain_single_passes(target: TransformersTarget) -> None:
    rows = make_rows(LENGTHS, OFFSETS)
    blocks = list(range(target.geometry.num_layers - 1))
    outputs = target.forward(rows, top_k=TOP_K, block_layers=blocks)
    for row, output in zip(rows, outputs, strict=True):
        expected = plain_pass(target, row)
        length = len(row.ids)
        assert relative_error(output.final_hidden, expected["final_hidden"]) < 1e-5
        for i in blocks:
            assert relative_error(output.block_hidden[i], expected[f"block_{i}"]) < 1e-5
        assert set(output.shared_kv) == set(target.geometry.shared_kv)
        for kind, (key, value) in output.shared_kv.items():
            kv = target.geometry.shared_kv[kind]
            assert key.shape == value.shape == (length, kv.kv_heads, kv.head_dim)
            assert relative_error(key, expected[f"{kind}_key"]) < 1e-5
            assert relative_error(value, expected[f"{kind}_value"]) < 1e-5
        logprobs = torch.log_softmax(expected["logits"].float(), dim=-1)
        top = torch.topk(logprobs, TOP_K)
        assert torch.equal(output.teacher.top_ids.long(), top.indices)
        assert torch.allclose(output.teacher.top_logprobs, top.values, atol=1e-5)
        assert torch.allclose(output.teacher.tail_mass, 1 - top.values.exp().sum(-1), atol=1e-5)
        taken = logprobs[:-1].gather(1, torch.tensor(row.ids[1:], dtype=torch.long)[:, None])[:, 0]
        assert output.teacher.token_logprobs[0] == 0
        assert torch.allclose(output.teacher.token_logprobs[1:], taken, atol=1e-5)


def test_a_batch_of_n_equals_n_batches_of_one(target: TransformersTarget) -> None:
    rows = make_rows(LENGTHS, OFFSETS)
    together = target.forward(rows, top_k=TOP_K)
    for row, output in zip(rows, together, strict=True):
        alone = target.forward([row], top_k=TOP_K)[0]
        assert relative_error(output.final_hidden, alone.final_hidden) < 1e-5
        assert torch.equal(output.teacher.top_ids, alone.teacher.top_ids)
        for kind, (key, value) in output.shared_kv.items():
            assert relative_error(key, alone.shared_kv[kind][0]) < 1e-5
            assert relative_error(value, alone.shared_kv[kind][1]) < 1e-5


def test_later_tokens_change_nothing_before_them(target: TransformersTarget) -> None:
    row = make_rows([30], [100])[0]
    changed = row.ids.copy()
    changed[20:] = changed[20:][::-1] % (VOCAB - 6) + 6
    assert (changed[20:] != row.ids[20:]).any()
    a = target.forward([row], top_k=TOP_K)[0]
    b = target.forward([PositionedRow(changed, row.offset)], top_k=TOP_K)[0]
    assert torch.equal(a.final_hidden[:20], b.final_hidden[:20])
    assert torch.equal(a.teacher.top_logprobs[:20], b.teacher.top_logprobs[:20])
    for kind in a.shared_kv:
        for got, expected in zip(a.shared_kv[kind], b.shared_kv[kind], strict=True):
            assert torch.equal(got[:20], expected[:20])
    assert not torch.equal(a.final_hidden[20:], b.final_hidden[20:])


def unrotate(
    key: torch.Tensor, offset: int, *, theta: float, head_dim: int, active: int
) -> torch.Tensor:
    """Turn K [T, H, C] back by `offset` positions: pairs (i, i + C/2), `active` of them turning."""
    half = head_dim // 2
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) * 2 / head_dim)
    frequency[active:] = 0
    cos, sin = torch.cos(offset * frequency), torch.sin(offset * frequency)
    low, high = key.double()[..., :half], key.double()[..., half:]
    return torch.cat([low * cos + high * sin, high * cos - low * sin], dim=-1)


@pytest.mark.parametrize(
    ("architecture", "kind", "active"),
    [("llama", "full", 4), ("gemma4", "sliding", 8), ("gemma4", "full", 4)],
)
def test_unrotating_the_key_by_the_offset_gives_the_unshifted_key(
    architecture: str, kind: str, active: int
) -> None:
    """C6: proportional RoPE turns a quarter of the pairs, spaced over the whole head."""
    target = make_target(architecture)
    kv = target.geometry.shared_kv[kind]
    ids = make_rows([24], [0])[0].ids
    at_zero = target.forward([PositionedRow(ids, 0)], top_k=1)[0]
    shifted = target.forward([PositionedRow(ids, 700)], top_k=1)[0]
    # The first block's K depends on nothing but its token; deeper ones only up to rounding.
    back = unrotate(
        shifted.shared_kv[kind][0], 700, theta=kv.rope_theta, head_dim=kv.head_dim, active=active
    )
    assert relative_error(back, at_zero.shared_kv[kind][0]) < 1e-4
    assert relative_error(shifted.shared_kv[kind][0], at_zero.shared_kv[kind][0]) > 0.1
    assert relative_error(shifted.shared_kv[kind][1], at_zero.shared_kv[kind][1]) < 1e-4


def test_all_kv_rows_are_kept_on_rows_longer_than_the_window() -> None:
    target = make_target("gemma4")
    assert target.geometry.sliding_window == 8
    output = target.forward(make_rows([100], [5]), top_k=1)[0]
    assert output.shared_kv["sliding"][0].shape == (100, 2, 16)
    assert output.shared_kv["full"][0].shape == (100, 2, 32)


@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65, 95, 96, 97])
def test_lengths_around_multiples_of_32(length: int) -> None:
    """C11, C12: a batch mate makes `length` the padded or the padding width."""
    target = make_target("gemma4")
    rows = make_rows([length, 16], [0, 9])
    together = target.forward(rows, top_k=TOP_K)
    for row, output in zip(rows, together, strict=True):
        alone = target.forward([row], top_k=TOP_K)[0]
        assert relative_error(output.final_hidden, alone.final_hidden) < 1e-5
        assert bool(torch.isfinite(output.final_hidden).all())


def test_bfloat16_teacher_rows_are_the_models_own_logits() -> None:
    target = make_target("gemma4", dtype=torch.bfloat16)
    row = make_rows([20], [50])[0]
    output = target.forward([row], top_k=TOP_K)[0]
    expected = plain_pass(target, row)
    assert output.final_hidden.dtype == torch.bfloat16
    assert torch.equal(output.final_hidden, expected["final_hidden"])
    values, ids = exact_top_k(expected["logits"].float(), TOP_K)
    assert torch.equal(output.teacher.top_ids.long(), ids)
    log_norm = torch.logsumexp(expected["logits"].float(), dim=-1, keepdim=True)
    assert torch.equal(output.teacher.top_logprobs, values - log_norm)


def test_a_softcapped_logit_never_passes_the_cap() -> None:
    """C16; and without the cap the same hidden states give larger ones."""
    target = make_target("gemma4", final_logit_softcapping=2.0)
    hidden = target.forward(make_rows([12], [0]), top_k=1)[0].final_hidden
    assert float(target._logits(hidden).abs().max()) <= 2.0
    assert float(target.model.lm_head(hidden).abs().max()) > 2.0


def test_length_dependent_rope_runs_row_by_row() -> None:
    """C5: with dynamic RoPE a longer batch mate would change a short row."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    target = make_target("llama", rope_parameters=rope, max_position_embeddings=32)
    assert not target.geometry.can_shift
    rows = make_rows([100, 10], [0, 0])
    together = target.forward(rows, top_k=TOP_K)
    alone = target.forward([rows[1]], top_k=TOP_K)[0]
    assert torch.equal(together[1].final_hidden, alone.final_hidden)


def test_logits_that_are_not_lm_head_of_the_final_norm_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda _m, _i, logits: logits * 1.0)
    TransformersTarget(model, eos_ids=frozenset({2}))  # a hook alone changes nothing
    forward = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out

    model.forward = scaled
    with pytest.raises(PipelineError, match="logits are not lm_head"):
        TransformersTarget(model, eos_ids=frozenset({2}))


def test_logits_of_a_whole_micro_batch_never_exist_at_once(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C19: lm_head runs over chunks of tokens, and chunk borders change nothing."""
    rows = make_rows(LENGTHS, OFFSETS)
    whole = target.forward(rows, top_k=TOP_K)
    sizes = []
    logits = target._logits

    def recorded(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(target, "_logits", recorded)
    monkeypatch.setattr("pipeline.models.hf.LOGITS_BYTES", {"cpu": 4 * VOCAB * 7})
    chunked = target.forward(rows, top_k=TOP_K)
    assert max(sizes) == 7 and sum(sizes) == sum(LENGTHS)
    for a, b in zip(whole, chunked, strict=True):
        assert torch.equal(a.teacher.top_ids, b.teacher.top_ids)
        assert torch.allclose(a.teacher.top_logprobs, b.teacher.top_logprobs, atol=1e-5)
        assert torch.allclose(a.teacher.token_logprobs, b.teacher.token_logprobs, atol=1e-5)


def test_only_requested_blocks_are_kept() -> None:
    """C9: no hook stays behind, and nothing else holds a block's output."""
    target = make_target("gemma4")
    rows = make_rows([10], [0])
    assert set(target.forward(rows, top_k=1, block_layers=[3])[0].block_hidden) == {3}
    assert target.forward(rows, top_k=1)[0].block_hidden == {}
    assert not any(layer._forward_hooks for layer in target.model.base_model.layers)


def test_memory_of_blocks_does_not_grow_with_depth() -> None:
    """C9: when the last of 42 blocks has run, only the asked one and the newest are alive."""
    target = make_target("llama", num_hidden_layers=42)
    blocks = target.model.base_model.layers
    outputs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watch(_module: Any, _inputs: Any, output: Any) -> None:
        outputs.append(weakref.ref(output[0] if isinstance(output, tuple) else output))
        alive.append(sum(ref() is not None for ref in outputs))

    hooks = [block.register_forward_hook(watch) for block in blocks]
    target.forward(make_rows([64], [0]), top_k=1, block_layers=[3])
    for hook in hooks:
        hook.remove()
    assert len(alive) == 42 and max(alive) <= 3  # block 3's, the newest and its input


@pytest.mark.parametrize("architecture", ["llama", "gemma4"])
def test_a_model_spread_by_accelerate_gives_the_same(architecture: str) -> None:
    """Its hooks move weights and activations; here between disk and CPU, for want of two GPUs."""
    pytest.importorskip("accelerate")
    target = make_target(architecture)
    rows = make_rows([5, 17], [0, 900])
    expected = target.forward(rows, top_k=TOP_K, block_layers=(0, 1))
    answers = target.generate([Prompt(rows[0].ids, 0)], Sampling(max_new_tokens=8))

    model = tiny_model(architecture)
    blocks = len(model.base_model.layers)
    device_map = {name: "cpu" for name, _ in model.base_model.named_children()}
    device_map = {f"model.{name}": where for name, where in device_map.items() if name != "layers"}
    device_map |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(blocks)}
    device_map["lm_head"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        spread_model = spread(model, device_map, offload_dir=folder)
        spread_target = TransformersTarget(spread_model, eos_ids=frozenset({2, 5}))
        got = spread_target.forward(rows, top_k=TOP_K, block_layers=(0, 1))
        again = spread_target.generate([Prompt(rows[0].ids, 0)], Sampling(max_new_tokens=8))
    assert again[0].ids.tolist() == answers[0].ids.tolist()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.final_hidden, other.final_hidden)
        assert torch.equal(one.teacher.top_logprobs, other.teacher.top_logprobs)
        assert torch.equal(one.block_hidden[1], other.block_hidden[1])
        for kind, (key, value) in other.shared_kv.items():
            assert torch.equal(one.shared_kv[kind][0], key)
            assert torch.equal(one.shared_kv[kind][1], value)
