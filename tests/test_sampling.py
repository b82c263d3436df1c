"""Token choice: determinism, the distribution, and every border of top-k and top-p."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import PipelineError
from pipeline.models.base import Sampling
from pipeline.models.sampling import RowSampler, _nucleus_choice


def logits_of(*probs: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probs)).astype(np.float32)


def draws(logits: np.ndarray, count: int, seed: int = 7, **kwargs: float) -> list[int]:
    sampler = RowSampler(seed, Sampling(max_new_tokens=1, **{"temperature": 1.0, **kwargs}))
    return [sampler(logits) for _ in range(count)]


def test_greedy_is_arg_max_with_ties_to_the_lower_id() -> None:
    sampler = RowSampler(1, Sampling(max_new_tokens=1))
    assert sampler(np.array([0.5, 2.0, 2.0, -1.0], dtype=np.float32)) == 1
    assert sampler(np.array([-3.0, -2.0, -9.0], dtype=np.float32)) == 1


def test_same_seed_same_tokens_other_seed_other_tokens() -> None:
    logits = logits_of(*([1 / 64] * 64))
    assert draws(logits, 50, seed=3) == draws(logits, 50, seed=3)
    assert draws(logits, 50, seed=3) != draws(logits, 50, seed=4)


def test_draws_are_pinned_so_that_stored_rollouts_can_be_made_again() -> None:
    assert draws(logits_of(*([1 / 64] * 64)), 6, seed=2**64 - 1) == [15, 45, 26, 45, 22, 48]


def test_one_uniform_per_token_in_step_order() -> None:
    uniforms = np.random.Generator(np.random.Philox(key=5)).random(200)
    logits = logits_of(0.25, 0.5, 0.125, 0.125)
    edges = np.array([0.5, 0.75, 0.875])  # order by probability: ids 1, 0, 2, 3
    expected = [[1, 0, 2, 3][int(np.sum(u >= edges))] for u in uniforms]
    assert draws(logits, 200, seed=5) == expected


def test_frequencies_follow_the_tempered_softmax() -> None:
    probs = np.array([0.1, 0.2, 0.3, 0.4])
    tempered = probs**0.5 / np.sum(probs**0.5)
    counts = np.bincount(draws(logits_of(*probs), 20000, temperature=2.0), minlength=4)
    np.testing.assert_allclose(counts / 20000, tempered, atol=0.015)


def test_top_k_ties_at_the_border_go_to_the_lower_id() -> None:
    assert set(draws(logits_of(0.2, 0.2, 0.4, 0.2), 400, top_k=2)) == {0, 2}
    assert set(draws(logits_of(0.2, 0.2, 0.4, 0.2), 400, top_k=1)) == {2}
    assert set(draws(logits_of(0.25, 0.25, 0.25, 0.25), 400, top_k=9)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {0}),
        (0.5, {0}),  # the prefix {0} reaches exactly 0.5
        (0.501, {0, 1}),
        (0.75, {0, 1}),
        (0.76, {0, 1, 2}),  # ids 2 and 3 are tied: the lower one completes the prefix
        (1.0, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_prefix(top_p: float, kept: set[int]) -> None:
    probs = np.array([0.5, 0.25, 0.125, 0.125])
    grid = np.linspace(0, 1, 4000, endpoint=False)
    assert {_nucleus_choice(probs, top_p, float(u)) for u in grid} == kept


def test_top_p_is_measured_after_top_k() -> None:
    # Of {0.4, 0.3} the first holds 0.571 >= 0.5; of all four it would hold only 0.4.
    assert set(draws(logits_of(0.4, 0.3, 0.2, 0.1), 300, top_k=2, top_p=0.5)) == {0}


def test_the_largest_uniform_never_selects_an_impossible_token() -> None:
    probs = np.array([0.3, 0.0, 0.7, 0.0])
    assert _nucleus_choice(probs, 1.0, np.nextafter(1.0, 0.0)) == 0


def test_tiny_temperature_is_arg_max_without_overflow() -> None:
    assert draws(np.array([1e4, -1e4, 9e3], dtype=np.float32), 20, temperature=1e-300) == [0] * 20


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1025, max_size=1500),
    st.floats(0.01, 0.999),
    st.floats(0, 1, exclude_max=True),
)
def test_short_sort_equals_full_sort(weights: list[int], top_p: float, u: float) -> None:
    weights[0] += 1
    probs = np.array(weights, dtype=np.float64) / sum(weights)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    cumulative = np.cumsum(probs[order])
    kept = int(np.argmax(cumulative >= top_p)) + 1 if cumulative[-1] >= top_p else len(order)
    chosen = int(np.argmax(cumulative[:kept] > u * cumulative[kept - 1]))
    assert _nucleus_choice(probs, top_p, u) == order[chosen]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_named(bad: float) -> None:
    with pytest.raises(PipelineError, match="token id 2"):
        RowSampler(1, Sampling(max_new_tokens=1))(np.array([0.0, 1.0, bad], dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("max_new_tokens", 0),
    ],
)
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(PipelineError, match=name):
        RowSampler(1, Sampling(**{"max_new_tokens": 4, name: value}))


def test_seed_outside_64_bits_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"2\*\*64"):
        RowSampler(2**64, Sampling(max_new_tokens=1))
