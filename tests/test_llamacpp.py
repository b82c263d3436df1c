"""The llama.cpp backend against its own fixtures, transformers, and itself in other batches."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from pipeline.errors import PipelineError
from pipeline.models.base import Generation, PositionedRow, Prompt, RowOutput, Sampling
from pipeline.models.gguf_writer import add_tokenizer
from pipeline.models.llamacpp import LlamaCppTarget
from pipeline.models.llamacpp_library import LogRouter
from pipeline.models.llamacpp_native import Context
from pipeline.models.sampling import RowSampler
from pipeline.models.tiny import GGUF_NAME, write_tiny_gemma4
from pipeline.models.tiny_tokenizer import EOS_IDS, tiny_vocabulary

pytest.importorskip("llama_cpp", reason="llama.cpp tests: pip install 'drafter-features[llamacpp]'")
FIXTURES = Path(__file__).resolve().parents[2] / "shared" / "fixtures"
EOS = frozenset(EOS_IDS)
EXACT = {"kv_dtype": "float32", "flash_attention": "off"}
WINDOW = 8
# llama.cpp rounds activations to float16 before an F16 product and looks GELU up in a float16
# table, so the last bit of a sum (other cells, other tile sizes) grows to this. Measured: 2e-4.
BATCH_TOLERANCE = 1e-3


def load(path: Path, **kwargs) -> LlamaCppTarget:
    defaults = {"threads": 1, "context_tokens": 1024, "eos_ids": EOS}
    return LlamaCppTarget(path, **defaults | kwargs)


def random_ids(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(11, 512, length).astype(np.int32)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.norm(a.double() - b.double()) / torch.linalg.norm(b.double()))


def columns(output: RowOutput) -> dict[str, torch.Tensor]:
    kv = {
        f"{kind}_{name}": tensor
        for kind, pair in output.shared_kv.items()
        for name, tensor in zip(("key", "value"), pair, strict=True)
    }
    blocks = {f"block_{i}": tensor for i, tensor in output.block_hidden.items()}
    return {"final_hidden": output.final_hidden} | kv | blocks


def assert_same(a: RowOutput, b: RowOutput, tolerance: float, part: slice = slice(None)) -> None:
    for name, tensor in columns(b).items():
        assert relative(columns(a)[name][part], tensor[part]) <= tolerance, name
    assert torch.equal(a.teacher.top_ids[part, 0], b.teacher.top_ids[part, 0])
    for name in ("top_logprobs", "token_logprobs"):
        one, other = getattr(a.teacher, name)[part], getattr(b.teacher, name)[part]
        assert torch.linalg.norm(one - other) <= tolerance * torch.linalg.norm(other), name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    write_tiny_gemma4(
        out,
        layers=6,
        full_every=2,
        hidden=64,
        head_dim=16,
        full_head_dim=32,
        per_layer_input=8,
        window=WINDOW,
        context_length=4096,
    )
    return out


@pytest.fixture(scope="module")
def target(tiny: Path):
    with load(tiny / GGUF_NAME, **EXACT) as target:
        yield target


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="shared/fixtures is not beside this checkout")
@pytest.mark.parametrize("name", ["gemma4-mini-F16", "gemma4-mini-Q4_K_M"])
@pytest.mark.parametrize("offset", [0, 1000])
def test_every_column_equals_the_fixtures(name: str, offset: int) -> None:
    stored = np.load(FIXTURES / f"{name}.npz")
    ids = stored["ids"].astype(np.int32)
    with load(FIXTURES / f"{name}.gguf", eos_ids=frozenset({1}), **EXACT) as target:
        output = target.forward([PositionedRow(ids, offset)], top_k=512, block_layers=[0, 5])[0]
        kv = target.geometry.shared_kv
    assert kv["sliding"].layer == stored["sliding_layer"] == 4
    assert kv["full"].layer == stored["full_layer"] == 5
    compared = 0
    for column, tensor in columns(output).items():
        if f"pos{offset}/{column}" in stored:
            expected = torch.from_numpy(stored[f"pos{offset}/{column}"])
            assert relative(tensor, expected) <= 1e-4, column
            compared += 1
    assert compared == (7 if offset == 0 else 5)
    # All 512 of the top-k are the whole distribution, in another order.
    logits = torch.from_numpy(stored[f"pos{offset}/logits"])
    logprobs = torch.empty_like(logits).scatter_(
        1, output.teacher.top_ids.long(), output.teacher.top_logprobs
    )
    assert relative(logprobs, torch.log_softmax(logits, dim=-1)) <= 1e-4
    assert torch.equal(
        output.teacher.top_ids[:, :8].long(), torch.from_numpy(stored[f"pos{offset}/top_ids"])
    )


def test_teacher_rows_are_the_distribution_after_the_soft_cap(tiny: Path, target) -> None:
    ids = random_ids(1, 60)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None].long()).logits[0]
    expected = torch.log_softmax(logits, dim=-1)
    teacher = target.forward([PositionedRow(ids, 0)], top_k=5)[0].teacher
    # Near ties may swap places between two arithmetics; each id has its own probability, though.
    of_ids = expected.gather(1, teacher.top_ids.long())
    assert relative(teacher.top_logprobs, of_ids) <= 5e-3
    assert relative(teacher.top_logprobs, expected.topk(5).values) <= 5e-3
    torch.testing.assert_close(
        teacher.tail_mass, 1 - teacher.top_logprobs.exp().sum(-1), atol=1e-5, rtol=0
    )
    of_next = expected[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0]
    assert teacher.token_logprobs[0] == 0
    assert relative(teacher.token_logprobs[1:], of_next) <= 5e-3


def test_a_batch_equals_its_rows_alone_at_their_own_offsets(target) -> None:
    rows = [
        PositionedRow(random_ids(seed, length), offset)
        for seed, (length, offset) in enumerate([(90, 0), (3, 700), (41, 13), (1, 0), (70, 3000)])
    ]
    together = target.forward(rows, top_k=4, block_layers=[0, 5])
    for row, output in zip(rows, together, strict=True):
        alone = target.forward([row], top_k=4, block_layers=[0, 5])[0]
        assert len(output.final_hidden) == len(row.ids)
        assert_same(output, alone, BATCH_TOLERANCE)
    assert relative(together[0].final_hidden[:3], together[1].final_hidden) > 0.1


def test_the_offset_moves_keys_and_nothing_else(target) -> None:
    ids = random_ids(2, 30)
    here, there = target.forward([PositionedRow(ids, 0), PositionedRow(ids, 900)], top_k=4)
    assert relative(there.final_hidden, here.final_hidden) <= 1e-3
    for kind in ("sliding", "full"):
        assert relative(there.shared_kv[kind][1], here.shared_kv[kind][1]) <= 1e-3
        assert relative(there.shared_kv[kind][0], here.shared_kv[kind][0]) > 0.05, kind
    # A full layer rotates a quarter of its head: pairs (i, i + 16) with i < 4 of 32.
    still = [i for i in range(32) if i % 16 >= 4]
    key, moved = here.shared_kv["full"][0], there.shared_kv["full"][0]
    assert relative(moved[..., still], key[..., still]) <= 1e-3


def rotate(key: torch.Tensor, shift: int, frequencies: torch.Tensor) -> torch.Tensor:
    half = key.shape[-1] // 2
    angle = shift * frequencies.double()
    a, b = key.double()[..., :half], key.double()[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@pytest.mark.parametrize(
    ("kind", "frequencies"),
    [
        ("sliding", 1e4 ** (-torch.arange(8) / 8)),
        ("full", torch.where(torch.arange(16) < 4, 1e6 ** (-torch.arange(16) / 16), 0.0)),
    ],
)
def test_keys_rotate_back(target, kind: str, frequencies: torch.Tensor) -> None:
    ids = random_ids(3, 4)  # the first token sees only itself: its key differs by RoPE alone
    here, there = target.forward([PositionedRow(ids, 0), PositionedRow(ids, 500)], top_k=1)
    back = rotate(there.shared_kv[kind][0][:1], -500, frequencies)
    assert relative(back, here.shared_kv[kind][0][:1]) <= 1e-4


def test_rows_longer_than_a_decode_call_keep_every_kv_row(tiny: Path, target) -> None:
    ids = random_ids(4, 600)
    assert target.forward([PositionedRow(ids[:1], 0)], top_k=1)
    assert target._context.batch_tokens == 512
    whole = target.forward([PositionedRow(ids, 5)], top_k=4, block_layers=[2])[0]
    for pair in whole.shared_kv.values():
        assert all(len(tensor) == 600 > WINDOW for tensor in pair)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        expected = model(
            torch.from_numpy(ids)[None].long(),
            position_ids=torch.arange(5, 605)[None],
            attention_mask=torch.ones(1, 600),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
    assert relative(whole.final_hidden, expected.hidden_states[-1][0]) <= 2e-3
    assert relative(whole.block_hidden[2], expected.hidden_states[3][0]) <= 2e-3
    for kind in ("sliding", "full"):
        states = expected.shared_kv_states[f"{kind}_attention"]
        for captured, state in zip(whole.shared_kv[kind], states, strict=True):
            assert relative(captured, state[0].transpose(0, 1)) <= 2e-3, kind


def test_logits_exist_for_one_bounded_chunk_at_a_time(
    tiny: Path, target, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [PositionedRow(random_ids(n, length), n) for n, length in enumerate([100, 20, 9, 5])]
    whole = target.forward(rows, top_k=4, block_layers=[1])
    monkeypatch.setattr("pipeline.models.llamacpp._LOGITS_BYTES", 40 * 4 * 512)
    with load(tiny / GGUF_NAME, **EXACT) as small:
        outputs = small.forward(rows, top_k=4, block_layers=[1])
        assert small._context.batch_tokens == 40
    for output, expected in zip(outputs, whole, strict=True):
        assert_same(output, expected, BATCH_TOLERANCE)


def test_later_tokens_change_nothing_before_them(target) -> None:
    ids = random_ids(5, 60)
    changed = ids.copy()
    changed[40] = (ids[40] + 1 - 11) % 501 + 11
    a, b = (target.forward([PositionedRow(row, 0)], top_k=4)[0] for row in (ids, changed))
    assert_same(a, b, 0.0, slice(0, 40))
    assert relative(a.final_hidden[40:], b.final_hidden[40:]) > 0.05


def test_kv_is_rounded_as_the_cache_rounds_it(tiny: Path, target) -> None:
    row = PositionedRow(random_ids(6, 30), 0)
    exact = target.forward([row], top_k=2)[0]
    with load(tiny / GGUF_NAME, hidden_dtype="bfloat16", flash_attention="off") as half:
        output = half.forward([row], top_k=2)[0]
        assert (half.geometry.hidden_dtype, half.geometry.kv_dtype) == ("bfloat16", "float16")
    assert output.final_hidden.dtype == torch.bfloat16
    for kind in ("sliding", "full"):
        for rounded, full in zip(output.shared_kv[kind], exact.shared_kv[kind], strict=True):
            assert rounded.dtype == torch.float16
            assert relative(rounded, full) <= 5e-3


def write_dense(path: Path, architecture: str) -> transformers.PreTrainedModel:
    """A random llama, qwen2 or qwen3 as GGUF, its rows of Q and K ordered as converters do."""
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[architecture]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        initializer_range=0.15, rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    model = model_class(config).eval()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    add_tokenizer(writer, tiny_vocabulary(512))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 3)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = array.shape[0] // 16
            array = array.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_llama_family_in_transformers_layout(tmp_path: Path, architecture: str) -> None:
    model = write_dense(tmp_path / "model.gguf", architecture)
    ids = random_ids(7, 40)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        expected = model(
            torch.from_numpy(ids)[None].long(),
            position_ids=torch.arange(20, 60)[None],
            attention_mask=torch.ones(1, 40),
            output_hidden_states=True,
            past_key_values=cache,
        )
    with load(tmp_path / "model.gguf", **EXACT) as target:
        assert set(target.geometry.shared_kv) == {"full"}
        assert target.geometry.shared_kv["full"].layer == 2
        output = target.forward([PositionedRow(ids, 20)], top_k=3, block_layers=[1])[0]
    layer = cache.layers[2]
    assert relative(output.final_hidden, expected.hidden_states[-1][0]) <= 2e-3
    assert relative(output.block_hidden[1], expected.hidden_states[2][0]) <= 2e-3
    assert relative(output.shared_kv["full"][0], layer.keys[0].transpose(0, 1)) <= 2e-3
    assert relative(output.shared_kv["full"][1], layer.values[0].transpose(0, 1)) <= 2e-3
    assert torch.equal(output.teacher.top_ids[:, 0].long(), expected.logits[0].argmax(-1))


def assert_answers(a: list[Generation], b: list[Generation]) -> None:
    assert [(x.ids.tolist(), x.finish_reason) for x in a] == [
        (x.ids.tolist(), x.finish_reason) for x in b
    ]


# 20 prompts over 3 sequences: most start in a place that another answer has left.
PROMPTS = [Prompt(random_ids(100 + n, 1 + n % 7), seed=n) for n in range(20)]


def test_greedy_answers_are_the_arg_max_of_the_teacher_forced_pass(tiny: Path) -> None:
    with load(tiny / GGUF_NAME, max_sequences=3, context_tokens=200, **EXACT) as target:
        answers = target.generate(PROMPTS, Sampling(max_new_tokens=40))
        rows = [
            PositionedRow(np.concatenate([prompt.ids, answer.ids]), 0)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
        outputs = target.forward(rows, top_k=1)
    for prompt, answer, output in zip(PROMPTS, answers, outputs, strict=True):
        first = len(prompt.ids)
        chosen = output.teacher.token_logprobs[first:]
        best = output.teacher.top_logprobs[first - 1 : -1, 0]
        assert torch.all(chosen >= best - 0.05)  # a near tie may fall the other way
        assert torch.mean((chosen == best).double()) >= 0.9
        at_end = [int(i) in EOS for i in answer.ids]
        assert not any(at_end[:-1])
        assert at_end[-1] == (answer.finish_reason == "stop")
        assert len(answer.ids) == 40 or answer.finish_reason == "stop"
        assert answer.ids.dtype == np.int32
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert len({tuple(answer.ids) for answer in answers}) == 20


def test_sampled_answers_follow_the_rule_and_their_own_seed(tiny: Path) -> None:
    sampling = Sampling(max_new_tokens=10, temperature=0.8, top_p=0.9, top_k=40)
    with load(tiny / GGUF_NAME, max_sequences=3, context_tokens=200, **EXACT) as target:
        answers = target.generate(PROMPTS, sampling)
        assert_answers(target.generate(PROMPTS, sampling), answers)
        rows = [
            PositionedRow(np.concatenate([prompt.ids, answer.ids]), 0)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ]
        outputs = target.forward(rows, top_k=512)
        others = [prompt._replace(seed=prompt.seed + 1000) for prompt in PROMPTS]
        changed = target.generate([PROMPTS[0], *others[1:]], sampling)
    same = total = 0
    for prompt, answer, output in zip(PROMPTS, answers, outputs, strict=True):
        sampler = RowSampler(prompt.seed, sampling)
        for place, token in enumerate(answer.ids, start=len(prompt.ids) - 1):
            logprobs = np.empty(512, dtype=np.float32)
            logprobs[output.teacher.top_ids[place].numpy()] = output.teacher.top_logprobs[place]
            same += sampler(logprobs) == token
            total += 1
    assert same >= 0.97 * total  # a uniform number next to a border may fall the other way
    assert_answers(changed[:1], answers[:1])
    assert sum(a.ids.tolist() != b.ids.tolist() for a, b in zip(changed, answers, strict=True)) > 15


def test_one_sequence_at_a_time_is_exactly_independent_of_the_other_prompts(tiny: Path) -> None:
    sampling = Sampling(max_new_tokens=10, temperature=1.0)
    with load(tiny / GGUF_NAME, max_sequences=1, **EXACT) as target:
        answers = target.generate(PROMPTS, sampling)
        assert_answers(target.generate(PROMPTS[::-1], sampling)[::-1], answers)
        assert_answers(target.generate(PROMPTS[7:8], sampling), answers[7:8])


def test_each_listed_id_stops_and_is_kept_once(tiny: Path) -> None:
    prompt = Prompt(random_ids(8, 5), seed=1)
    sampling = Sampling(max_new_tokens=12)
    with load(tiny / GGUF_NAME, eos_ids=frozenset(), **EXACT) as target:
        free = target.generate([prompt], sampling)[0]
    assert free.finish_reason == "length" and len(free.ids) == 12
    fifth = int(free.ids[4])
    first_at = free.ids.tolist().index(fifth)
    with load(tiny / GGUF_NAME, eos_ids=frozenset({1, fifth}), **EXACT) as target:
        answer = target.generate([prompt], sampling)[0]
    assert answer.finish_reason == "stop"
    assert answer.ids.tolist() == free.ids.tolist()[: first_at + 1]


def test_long_prompts_pass_through_several_decode_calls(tiny: Path) -> None:
    prompts = [Prompt(random_ids(9, 600), 0), Prompt(random_ids(10, 3), 0)]
    with load(tiny / GGUF_NAME, **EXACT) as target:
        answers = target.generate(prompts, Sampling(max_new_tokens=1))
        outputs = target.forward([PositionedRow(prompt.ids, 0) for prompt in prompts], top_k=1)
    assert [int(a.ids[0]) for a in answers] == [int(o.teacher.top_ids[-1, 0]) for o in outputs]


def test_a_full_context_ends_the_answer_with_length(tiny: Path) -> None:
    with load(tiny / GGUF_NAME, context_tokens=64, eos_ids=frozenset(), **EXACT) as target:
        prompts = [Prompt(random_ids(11, n), 0) for n in (63, 60, 10)]
        answers = target.generate(prompts, Sampling(max_new_tokens=500))
        assert [len(a.ids) for a in answers] == [1, 4, 54]
        assert {a.finish_reason for a in answers} == {"length"}
        with pytest.raises(PipelineError, match="prompt 1 has 64 tokens"):
            target.generate([prompts[0], Prompt(random_ids(1, 64), 0)], Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("rows", "kwargs", "message"),
    [
        ([(5, 0), (2000, 0)], {}, "row 1 has 2000 tokens"),
        ([(5, 4092)], {}, "positions 4092 to 4096"),
        ([(5, -1)], {}, "positions -1"),
        ([(0, 0)], {}, "row 0 has no tokens"),
        ([(5, 0)], {"block_layers": [6]}, "0 to 5"),
        ([(5, 0)], {"block_layers": [-1]}, "0 to 5"),
        ([(5, 0)], {"block_layers": [1, 1]}, "named once"),
        ([(5, 0)], {"top_k": 0}, "top_k"),
    ],
)
def test_bad_rows_are_named(target, rows, kwargs, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        target.forward(
            [PositionedRow(random_ids(0, n), offset) for n, offset in rows], **{"top_k": 2} | kwargs
        )


def test_more_sequences_than_cells(tiny: Path, target) -> None:
    rows = [PositionedRow(random_ids(n, 3), n) for n in range(4)]
    with load(tiny / GGUF_NAME, max_sequences=256, context_tokens=5, **EXACT) as small:
        for output, row in zip(small.forward(rows, top_k=2), rows, strict=True):
            assert_same(output, target.forward([row], top_k=2)[0], BATCH_TOLERANCE)
        answers = small.generate([Prompt(row.ids, 0) for row in rows], Sampling(max_new_tokens=9))
        assert [len(a.ids) for a in answers] == [2] * 4


def test_ids_outside_the_vocabulary_are_named(target) -> None:
    bad = np.array([5, 6, 512], dtype=np.int32)
    with pytest.raises(PipelineError, match="row 0: token 2 has id 512"):
        target.forward([PositionedRow(bad, 0)], top_k=2)
    with pytest.raises(PipelineError, match="prompt 0: token 2 has id 512"):
        target.generate([Prompt(bad, 0)], Sampling(max_new_tokens=1))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kv_dtype": "q8_0"}, "kv_dtype"),
        ({"hidden_dtype": "int8"}, "hidden_dtype"),
        ({"flash_attention": "maybe"}, "flash_attention"),
        ({"threads": 0}, "threads"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_sequences": 257}, "at most 256"),
        ({"eos_ids": frozenset({512})}, r"EOS ids \[512\]"),
    ],
)
def test_bad_settings_are_named(tiny: Path, kwargs, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        load(tiny / GGUF_NAME, **kwargs)


def test_files_that_cannot_be_loaded(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"absent\.gguf"):
        load(tmp_path / "absent.gguf")
    data = (tiny / GGUF_NAME).read_bytes()
    for size in (0, 100, len(data) // 3, len(data) - 1):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(PipelineError, match=r"cut\.gguf"):
            load(tmp_path / "cut.gguf")


def test_llama_cpps_own_refusal_carries_its_reason(tmp_path: Path) -> None:
    from pipeline.models.llamacpp_native import Model

    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(PipelineError, match=r"bad\.gguf: llama\.cpp cannot load it \(.*\w+.*\)"):
        Model(tmp_path / "bad.gguf", n_gpu_layers=0)


def native_context(target: LlamaCppTarget, cells: int, sequences: int) -> Context:
    return Context(
        target._model,
        cells=cells,
        batch_tokens=512,
        sequences=sequences,
        outputs=300,
        threads=1,
        kv_type=0,
        flash_attention=0,
        capture=None,
    )


def test_a_context_that_llama_cpp_refuses_carries_its_reason(target) -> None:
    with pytest.raises(PipelineError, match=r"cannot make a context of 512 tokens \(.*256.*\)"):
        native_context(target, cells=512, sequences=300)
    with pytest.raises(ValueError, match="301 sequences, 300 outputs"):
        native_context(target, cells=512, sequences=301)


def test_a_full_cache_is_an_error_not_a_wrong_answer(target) -> None:
    context = native_context(target, cells=256, sequences=1)
    assert context.batch_tokens == 256  # never more than the cells
    zeros, wanted = np.zeros(200, dtype=np.int32), np.zeros(200, dtype=np.bool_)
    positions = np.arange(200, dtype=np.int32)
    context.decode(random_ids(0, 200), positions, zeros, wanted)
    with pytest.raises(PipelineError, match="decode of 200 tokens failed with status 1"):
        context.decode(random_ids(0, 200), positions + 200, zeros, wanted)
    with pytest.raises(ValueError, match="257 tokens"):
        context.decode(*(np.zeros(257, dtype=np.int32),) * 3, np.zeros(257, dtype=np.bool_))
    context.close()


def test_a_closed_target_says_so(tiny: Path) -> None:
    target = load(tiny / GGUF_NAME)
    target.close()
    target.close()
    with pytest.raises(PipelineError, match="closed"):
        target.forward([PositionedRow(random_ids(0, 4), 0)], top_k=2)


def test_log_pieces_become_lines_whatever_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    router = LogRouter()
    text = "token '日'".encode()
    with caplog.at_level(logging.DEBUG, logger="pipeline.llamacpp"):
        router(2, text[:8])
        router(5, text[8:] + b"\nbroken \xe6\x97")
        router(5, b"\n")
        router(4, b"it failed\n")
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.DEBUG, "token '日'"),
        (logging.DEBUG, "broken \N{REPLACEMENT CHARACTER}"),
        (logging.ERROR, "it failed"),
    ]
    assert router.last_words() == "it failed"
    assert router.last_words() == "it gave no reason"


def test_without_llama_cpp_the_remedy_is_named(tiny: Path) -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from pathlib import Path\n"
        "from pipeline.errors import PipelineError\n"
        "from pipeline.models.llamacpp import LlamaCppTarget\n"
        "try:\n"
        f"    LlamaCppTarget(Path({str(tiny / GGUF_NAME)!r}), threads=1, context_tokens=8,\n"
        "        eos_ids=frozenset())\n"
        "except PipelineError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert "pip install 'drafter-features[llamacpp]'" in result.stdout
