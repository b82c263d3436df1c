"""Generation by the transformers backend against greedy decoding without a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, VOCAB, make_target
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from pipeline.errors import PipelineError
from pipeline.models import hf_generate
from pipeline.models.base import Prompt, Sampling
from pipeline.models.hf import TransformersTarget
from pipeline.models.hf_generate import JOINING, joining


@pytest.fixture(scope="module", params=ARCHITECTURES)
def target(request: pytest.FixtureRequest) -> TransformersTarget:
    return make_target(request.param)


@torch.inference_mode()
def greedy_reference(target: TransformersTarget, prompt: np.ndarray, limit: int) -> list[int]:
    """One token at a time, the whole sequence again each time."""
    ids = [int(i) for i in prompt]
    answer: list[int] = []
    while len(answer) < limit:
        logits = target.model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0, -1]
        answer.append(int(torch.argmax(logits)))
        if answer[-1] in target.eos_ids:
            break
    return answer


def test_greedy_batches_equal_single_decoding_without_a_cache(target: TransformersTarget) -> None:
    rng = np.random.default_rng(3)
    prompts = [Prompt(rng.integers(6, VOCAB, n).astype(np.int32), n) for n in (3, 17, 9, 30)]
    answers = target.generate(prompts, Sampling(max_new_tokens=12))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids.tolist() == greedy_reference(target, prompt.ids, 12)
        stopped = answer.ids[-1] in target.eos_ids
        assert answer.finish_reason == ("stop" if stopped else "length")


def test_any_eos_stops_and_is_kept_once() -> None:
    """D2: the target is made to prefer id 5, the second of its two terminators."""
    target = make_target("gemma4")
    prompt = Prompt(np.array([7, 8, 9], dtype=np.int32), 0)
    answer = greedy_reference(target, prompt.ids, 8)
    target.eos_ids = frozenset({2, answer[4]})
    first = answer.index(answer[4])
    got = target.generate([prompt], Sampling(max_new_tokens=8))[0]
    assert (got.ids.tolist(), got.finish_reason) == (answer[: first + 1], "stop")
    target.eos_ids = frozenset({2})
    got = target.generate([prompt], Sampling(max_new_tokens=4))[0]
    assert (got.ids.tolist(), got.finish_reason) == (answer[:4], "length")


def test_sampled_answers_depend_on_the_rows_own_seed_alone() -> None:
    target = make_target("gemma4")
    rng = np.random.default_rng(5)
    prompts = [Prompt(rng.integers(6, VOCAB, 10).astype(np.int32), 100 + i) for i in range(5)]
    same = [Prompt(prompts[0].ids, 100 + i) for i in range(8)]
    sampling = Sampling(max_new_tokens=10, temperature=1.0, top_p=0.95, top_k=50)
    together = target.generate(prompts, sampling)
    reverse = target.generate(prompts[::-1], sampling)[::-1]
    alone = [target.generate([prompt], sampling)[0] for prompt in prompts]
    for a, b, c in zip(together, reverse, alone, strict=True):
        assert a.ids.tolist() == b.ids.tolist() == c.ids.tolist()
    answers = {tuple(answer.ids.tolist()) for answer in target.generate(same, sampling)}
    assert len(answers) == 8  # D8


def test_a_prompt_that_fills_the_context_is_refused_and_answers_stop_at_its_end() -> None:
    target = make_target("llama", max_position_embeddings=16)
    target.eos_ids = frozenset()
    with pytest.raises(PipelineError, match="prompt of 16 tokens leaves no room"):
        target.generate([Prompt(np.full(16, 7, np.int32), 0)], Sampling(max_new_tokens=4))
    answer = target.generate([Prompt(np.full(13, 7, np.int32), 0)], Sampling(max_new_tokens=9))[0]
    assert (len(answer.ids), answer.finish_reason) == (3, "length")


def test_rows_that_finish_leave_the_others_unchanged(target: TransformersTarget) -> None:
    """Rows of other lengths stop at other steps; each keeps its own padding and positions."""
    rng = np.random.default_rng(11)
    prompts = [Prompt(rng.integers(6, VOCAB, n).astype(np.int32), n) for n in (30, 4, 17, 11, 24)]
    before = target.eos_ids
    try:
        target.eos_ids = frozenset()
        free = [greedy_reference(target, prompt.ids, 9) for prompt in prompts]
        # What the longest and the third prompt say at steps 1 and 3 ends answers from now on.
        target.eos_ids = frozenset({free[0][1], free[2][3]})
        expected = [greedy_reference(target, prompt.ids, 9) for prompt in prompts]
        answers = target.generate(prompts, Sampling(max_new_tokens=9))
    finally:
        target.eos_ids = before
    assert len({len(answer) for answer in expected}) > 1
    assert [answer.ids.tolist() for answer in answers] == expected


def test_waiting_prompts_join_the_rows_under_way(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined rows bring padding, a window and positions of their own into a running cache."""
    rng = np.random.default_rng(23)
    lengths = [2, 3, 5, 7, 9, 12, 14, 21, 28, 30]
    prompts = [Prompt(rng.integers(6, VOCAB, n).astype(np.int32), n) for n in lengths]
    monkeypatch.setattr(target, "eos_ids", frozenset())
    monkeypatch.setattr(hf_generate, "ROWS", 4)
    monkeypatch.setattr(hf_generate, "JOINING", 2)
    sizes: list[tuple[int, int]] = []
    step = target._last_logits

    def recorded(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append((ids.shape[0], ids.shape[1]))
        return step(ids, *rest)

    monkeypatch.setattr(target, "_last_logits", recorded)

    def ended(answer: Sequence[int]) -> bool:  # soon for some answers, late or never for others
        return (sum(answer) + 3 * len(answer)) % 5 == 0

    expected = []
    for prompt in prompts:
        free = greedy_reference(target, prompt.ids, 14)
        expected.append(next((free[:n] for n in range(1, 15) if ended(free[:n])), free))
    answers = target.generate(prompts, Sampling(max_new_tokens=14, ended=ended))
    assert len({len(answer) for answer in expected}) > 2
    assert [answer.ids.tolist() for answer in answers] == expected
    prefills = [i for i, (_, columns) in enumerate(sizes) if columns > 1]
    assert len(prefills) > 2 and sizes[prefills[0]][0] == 4
    assert any(sizes[i][0] < sizes[i + 2][0] for i in prefills[1:-1])  # some rows were under way


def test_columns_that_are_padding_in_every_row_go_when_prompts_join() -> None:
    target = make_target("gemma4")
    cache = DynamicCache(config=target.model.config)
    mask = torch.tensor([[0] * 20 + [1] * 10, [0] * 18 + [1] * 12])
    ids = torch.arange(60).reshape(2, 30) % VOCAB
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    target._last_logits(ids, mask, positions, cache)
    other = hf_generate._Batch([7], DynamicCache(config=target.model.config), mask[:1, -14:])
    target._last_logits(ids[:1, -14:], other.mask, positions[:1, -14:], other.cache)
    batch = hf_generate._Batch([3, 4], cache, mask)
    batch.join(other)
    assert batch.rows == [3, 4, 7]
    assert batch.mask.tolist() == [[0] * 2 + [1] * 10, [1] * 12, [0] * 2 + [1] * 10]
    kept = {
        (layer.is_sliding, layer.get_seq_length(), layer.keys.shape[-2])
        for layer in cache.layers
        if isinstance(layer, DynamicLayer)
    }
    assert kept == {(True, 12, 7), (False, 12, 12)}  # a window of 8 leaves 7 of the past
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):  # the newcomer is the first row once more
            torch.testing.assert_close(layer.keys[0, :, -7:], layer.keys[2, :, -7:])


def test_prompts_join_in_company_and_only_rows_of_like_length() -> None:
    assert joining([36, 40, *[50] * 40], []) == 32
    assert joining([36, 40, 700], []) == 2  # 700 tokens of padding for two rows
    assert joining([], [40]) == 0
    few, many = [50] * (32 - JOINING), [50] * (33 - JOINING)
    assert joining([60] * 20, few) == JOINING
    assert joining([60] * 20, many) == 0
    assert joining([60] * 3, many) == 3  # no more will come, so nothing is gained by waiting
    assert joining([600, 700], [*few[1:], 40]) == 0
    assert joining([500, 700], [*few[1:], 40]) == 1
