"""Teacher rows, targets, offsets: values checked by hand or by a slow plain rule."""

import tomllib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.features import exact_top_k, k_step_targets, teacher_rows
from pipeline.geometry import Geometry, SharedKV
from pipeline.schema import SCHEMA_ROOT
from pipeline.seeds import position_offset, row_seed

VECTOR = tomllib.loads((SCHEMA_ROOT / "alignment.toml").read_text())


def geometry(*, context_length: int = 100, rope_type: str = "default") -> Geometry:
    kv = SharedKV(layer=0, kv_heads=1, head_dim=2, rope_type=rope_type, rope_theta=1e4)
    return Geometry(
        architecture="llama",
        num_layers=1,
        hidden_size=4,
        vocab_size=10,
        context_length=context_length,
        sliding_window=None,
        logit_softcap=None,
        embedding_scale=1.0,
        shared_kv={"full": kv},
        hidden_dtype="float32",
        kv_dtype="float32",
    )


@pytest.mark.parametrize("row", [VECTOR, VECTOR["two_turns"]])
def test_the_alignment_vector(row: dict[str, list[int]]) -> None:
    ids = np.array(row["input_ids"], dtype=np.int32)
    mask = np.array(row["loss_mask"], dtype=np.uint8)
    target_ids, target_mask = k_step_targets(ids, mask, 3)
    assert target_mask.tolist() == row["target_mask"]
    if "target_ids" in row:
        assert target_ids.tolist() == row["target_ids"]
    assert (target_ids.dtype, target_mask.dtype) == (np.int32, np.uint8)


def test_the_vectors_drafting_example_follows_from_its_row() -> None:
    """DESIGN §3: the example's own numbers, from the columns alone."""
    n, drafting = VECTOR["drafting"]["n"], VECTOR["drafting"]
    assert drafting["token"] == VECTOR["input_ids"][n]
    assert drafting["hidden_row"] == n - 1
    assert drafting["kv_rows"] == list(range(n))
    assert drafting["position"] == VECTOR["position_offset"] + n == VECTOR["positions"][n]
    depths = [k for k in (1, 2, 3) if VECTOR["target_mask"][n][k - 1]]
    assert drafting["labels"] == [VECTOR["target_ids"][n][k - 1] for k in depths]
    assert drafting["labels"] == [VECTOR["input_ids"][n + k] for k in depths]
    assert drafting["teacher_rows"] == drafting["latent_targets"] == [n + k - 1 for k in depths]


def test_the_readme_draws_the_same_vector() -> None:
    text = (SCHEMA_ROOT / "README.md").read_text()
    for t, (token, mask) in enumerate(zip(VECTOR["input_ids"], VECTOR["loss_mask"], strict=True)):
        ids = ", ".join(map(str, VECTOR["target_ids"][t]))
        masks = " ".join(map(str, VECTOR["target_mask"][t]))
        assert f"| {t} | {token} | {mask} | {ids} | {masks} |" in text


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=40))
def test_targets_follow_the_rule_token_by_token(tokens: list[tuple[int, bool]]) -> None:
    ids = np.array([i for i, _ in tokens], dtype=np.int32)
    mask = np.array([m for _, m in tokens], dtype=np.uint8)
    target_ids, target_mask = k_step_targets(ids, mask, 4)
    for t in range(len(ids)):
        for k in range(1, 5):
            exists = t + k < len(ids)
            assert target_ids[t, k - 1] == (ids[t + k] if exists else -100)
            assert target_mask[t, k - 1] == int(exists and bool(mask[t + 1 : t + k + 1].all()))


def slow_top_k(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=9, max_size=9), min_size=1, max_size=5),
    st.integers(1, 9),
)
def test_top_k_breaks_ties_to_the_lower_id(rows: list[list[int]], k: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float32)
    values, ids = exact_top_k(logits, k)
    for row, got_values, got_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
        expected = slow_top_k([float(v) for v in row], k)
        assert got_ids == expected
        assert got_values == [row[i] for i in expected]


def test_top_k_of_bfloat16_logits_over_a_real_vocabulary() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert all(len(set(row)) < 3000 for row in logits.tolist())  # many ties
    _, ids = exact_top_k(logits, 64)
    assert ids.tolist() == [slow_top_k(row, 64) for row in logits.tolist()]


def test_teacher_rows_are_log_softmax_in_float32_over_the_whole_vocabulary() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, -5.0, 0.0, 1.0]])
    top_ids, top_logprobs, tail, next_logprobs = teacher_rows(logits, torch.tensor([2, 0]), 2)
    assert top_ids.tolist() == [[1, 3], [0, 3]] and top_ids.dtype == torch.int32
    full = torch.log_softmax(logits.double(), dim=-1)
    assert torch.allclose(top_logprobs.double(), torch.stack([full[0, [1, 3]], full[1, [0, 3]]]))
    assert torch.allclose(
        tail.double(), 1 - torch.stack([full[0, [1, 3]], full[1, [0, 3]]]).exp().sum(-1), atol=1e-6
    )
    assert torch.allclose(next_logprobs.double(), torch.stack([full[0, 2], full[1, 0]]))


def test_the_tail_is_never_negative_and_vanishes_when_everything_is_kept() -> None:
    logits = torch.randn(50, 7, generator=torch.Generator().manual_seed(1)) * 10
    _, top_logprobs, tail, _ = teacher_rows(logits, torch.zeros(50, dtype=torch.long), 64)
    assert top_logprobs.shape == (50, 7)
    assert float(tail.min()) >= 0 and float(tail.max()) < 1e-6


def test_a_row_of_nan_does_not_break_its_neighbours() -> None:
    logits = torch.tensor([[float("nan")] * 4, [0.0, 3.0, 1.0, 2.0]])
    _, ids = exact_top_k(logits, 2)
    assert ids[1].tolist() == [1, 3]
    _, ids = exact_top_k(logits[:1], 2)
    assert ids.shape == (1, 2)


def test_offsets_are_uniform_and_depend_on_seed_and_id_alone() -> None:
    offsets = [
        position_offset(geometry(), seed=3, sample_id=f"r{i}", num_tokens=90, shift_max=8192)
        for i in range(5000)
    ]
    counts = Counter(offsets)
    assert sorted(counts) == list(range(11))  # 90 + 10 fits the context of 100
    assert min(counts.values()) > 5000 / 11 * 0.8
    again = position_offset(geometry(), seed=3, sample_id="r7", num_tokens=90, shift_max=8192)
    other = [
        position_offset(geometry(), seed=4, sample_id=f"r{i}", num_tokens=90, shift_max=8192)
        for i in range(50)
    ]
    assert again == offsets[7] and other != offsets[:50]


@pytest.mark.parametrize(
    ("num_tokens", "shift_max", "rope_type"),
    [(100, 8192, "default"), (10, 0, "default"), (10, 8192, "dynamic"), (10, 8192, "longrope")],
)
def test_no_shift_where_none_fits(num_tokens: int, shift_max: int, rope_type: str) -> None:
    for i in range(20):
        assert (
            position_offset(
                geometry(rope_type=rope_type),
                seed=0,
                sample_id=str(i),
                num_tokens=num_tokens,
                shift_max=shift_max,
            )
            == 0
        )


def test_seeds_of_rows_and_purposes_differ() -> None:
    seeds = {row_seed(s, p, i) for s in (0, 1) for p in ("position", "turn 0") for i in ("a", "b")}
    assert len(seeds) == 8
    assert row_seed(1, "position", "a") == 0xF3C634966D043EA2  # pinned: shards depend on it


def test_log_probabilities_that_round_to_the_same_are_a_tie() -> None:
    """Far from 0 the difference of two logits in the last bit is lost: the lower id comes first."""
    logits = torch.zeros((1, 300))
    logits[0, 7], logits[0, 3] = 1.0, float(np.nextafter(np.float32(1.0), np.float32(0.0)))
    logits[0, 100] = 30.0
    ids, logprobs, _, following = teacher_rows(logits, torch.tensor([7]), 3)
    assert logits[0, 7] > logits[0, 3] and logprobs[0, 1] == logprobs[0, 2] == following[0]
    assert ids[0].tolist() == [100, 3, 7]


@pytest.mark.parametrize("levels", [2, 7, 40, 10**6])
@pytest.mark.parametrize("top_k", [1, 5, 64])
def test_teacher_rows_are_the_exact_top_k_however_many_tie(levels: int, top_k: int) -> None:
    """Against a full sort by (log-probability, id), with many more ties than are looked at."""
    torch.manual_seed(levels)
    logits = (torch.rand(9, 3000) * levels).floor() / levels * 20
    following = torch.randint(0, 3000, (9,))
    ids, logprobs, tail, chosen = teacher_rows(logits, following, top_k)
    full = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    for row in range(9):
        order = sorted(range(3000), key=lambda i: (-float(full[row, i]), i))[:top_k]
        assert ids[row].tolist() == order
        assert torch.equal(logprobs[row], full[row, order])
        assert float(chosen[row]) == float(full[row, following[row]])
        assert float(tail[row]) == pytest.approx(1 - float(logprobs[row].double().exp().sum()))
