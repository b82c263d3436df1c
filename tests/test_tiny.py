"""The tiny random Gemma-4: both files hold one model, with every feature of the real one."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import PipelineError
from pipeline.models.base import PositionedRow
from pipeline.models.tiny import GGUF_NAME, write_tiny_gemma4
from pipeline.models.tiny_tokenizer import EOS_IDS, tiny_vocabulary

SMALL = {
    "layers": 4,
    "full_every": 2,
    "hidden": 64,
    "head_dim": 16,
    "full_head_dim": 32,
    "per_layer_input": 8,
    "window": 8,
}
LLAMA_CPP = "llama.cpp tests: pip install 'drafter-features[llamacpp]'"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    write_tiny_gemma4(out)
    return out


@pytest.fixture(scope="module")
def native(tiny: Path):
    pytest.importorskip("llama_cpp", reason=LLAMA_CPP)
    from pipeline.models.llamacpp_native import Model

    model = Model(tiny / GGUF_NAME, n_gpu_layers=0)
    yield model
    model.close()


@pytest.fixture(scope="module")
def tokenizer(tiny: Path):
    return AutoTokenizer.from_pretrained(tiny)


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        write_tiny_gemma4(tmp_path / name, seed=seed, **SMALL)
    first, second, other = (digests(tmp_path / name) for name in "abc")
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {
        "model-F16.gguf",
        "model.safetensors",
    }


def test_both_files_hold_the_same_numbers(tiny: Path) -> None:
    hf = load_file(tiny / "model.safetensors")
    tensors = {tensor.name: tensor.data for tensor in GGUFReader(tiny / GGUF_NAME).tensors}
    for hf_name, gguf_name in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
        "model.layers.4.self_attn.k_proj.weight": "blk.4.attn_k.weight",
        "model.layers.5.self_attn.k_norm.weight": "blk.5.attn_k_norm.weight",
        "model.layers.11.layer_scalar": "blk.11.layer_output_scale.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        np.testing.assert_array_equal(
            hf[hf_name].float().numpy(), tensors[gguf_name].astype(np.float32), err_msg=hf_name
        )
    scalars = torch.cat([hf[f"model.layers.{i}.layer_scalar"] for i in range(12)]).float()
    assert scalars.std() > 0.01 and torch.all((scalars - 0.9).abs() < 0.3)
    assert len(tensors) == len(hf) + 1  # and rope_freqs.weight
    np.testing.assert_array_equal(tensors["rope_freqs.weight"], np.float32([1.0] * 8 + [1e30] * 24))


@pytest.mark.parametrize(
    ("layers", "full_every", "shared"), [(42, 6, 18), (12, 6, 6), (9, 3, 3), (4, 2, 2)]
)
def test_kv_sharing_is_scaled_from_18_of_42(
    tmp_path: Path, layers: int, full_every: int, shared: int
) -> None:
    write_tiny_gemma4(tmp_path, **SMALL | {"layers": layers, "full_every": full_every})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_kv_shared_layers"] == shared
    names = {tensor.name for tensor in GGUFReader(tmp_path / GGUF_NAME).tensors}
    with_keys = {i for i in range(layers) if f"blk.{i}.attn_k.weight" in names}
    assert with_keys == set(range(layers - shared))
    assert [kind == "full_attention" for kind in config["layer_types"]] == [
        (i + 1) % full_every == 0 for i in range(layers)
    ]


@pytest.mark.parametrize("layers", [12, 42])
def test_llama_cpp_and_transformers_agree(tmp_path: Path, layers: int) -> None:
    pytest.importorskip("llama_cpp", reason=LLAMA_CPP)
    from pipeline.models.llamacpp import LlamaCppTarget

    write_tiny_gemma4(tmp_path, layers=layers, hidden=128)
    ids = np.random.default_rng(0).integers(11, 512, 90).astype(np.int32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)[None].long(), output_hidden_states=True)
    with LlamaCppTarget(
        tmp_path / GGUF_NAME,
        kv_dtype="float32",
        flash_attention="off",
        threads=1,
        context_tokens=128,
        eos_ids=frozenset(EOS_IDS),
    ) as target:
        output = target.forward([PositionedRow(ids, 0)], top_k=2)[0]
    hidden = expected.hidden_states[-1][0]
    error = torch.linalg.norm(output.final_hidden - hidden) / torch.linalg.norm(hidden)
    assert error <= 2e-3
    assert torch.equal(output.teacher.top_ids[:, 0].long(), expected.logits[0].argmax(-1))
    # Neither a flat nor a frozen distribution: the model is worth testing with.
    assert 1.0 < expected.logits.std() < 8.0 and expected.logits.abs().max() <= 30.0
    assert len(set(output.teacher.top_ids[:, 0].tolist())) > 20


def llama_cpp_ids(native, text: str) -> list[int]:
    api, data = native.lib.api, text.encode()
    buffer = (api.llama_token * (len(data) + 8))()
    vocab = api.llama_model_get_vocab(native.handle)
    count = api.llama_tokenize(vocab, data, len(data), buffer, len(buffer), False, True)
    return list(buffer[:count])


PROBES = [
    "the quick brown fox and then the other",
    "  two  spaces   three",
    "déjà vu, composed; de\u0301ja\u0300 vu, decomposed",
    "日本語のテストです。ありがとうございます",
    "👩‍👩‍👧 family",
    "1234567 3.14",
    "line\nbreak\n\n\nthree\n",
    "tab\there\r\n",
    "<|turn>user\nHi<turn|>\n<|turn>model\n",
    "a<eos>b <|think|>x <unused0> <0x41>",
    " leading and trailing ",
    "",
    "\n",
]


@pytest.mark.parametrize("text", PROBES)
def test_tokenizer_equals_llama_cpps(tokenizer, native, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == llama_cpp_ids(native, text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁\0")))
def test_any_text_survives_and_equals_llama_cpps(tokenizer, native, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == llama_cpp_ids(native, text)
    assert tokenizer.decode(ids) == text


def test_chat_template_in_gemma4_shape(tokenizer) -> None:
    def render(*turns: tuple[str, object], **kwargs: object) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)

    assert render(("user", " Hi "), add_generation_prompt=True) == (
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
    )
    parts = [{"type": "text", "text": "yo"}, {"type": "image"}]
    assert render(("system", "S"), ("user", "Q"), ("assistant", parts)) == (
        "<bos><|turn>system\nS<turn|>\n<|turn>user\nQ<turn|>\n<|turn>model\nyo<turn|>\n"
    )
    assert render(("user", "Q"), enable_thinking=True) == (
        "<bos><|turn>system\n<|think|><turn|>\n<|turn>user\nQ<turn|>\n"
    )
    with pytest.raises(Exception, match="not tool"):
        render(("tool", "x"))
    ids = tokenizer(render(("user", "Hi")), add_special_tokens=False)["input_ids"]
    assert ids.count(2) == 1 and ids[:2] == [2, 5]
    assert tokenizer("hi")["input_ids"][0] == 2


def test_gguf_carries_template_and_special_ids(tiny: Path) -> None:
    fields = GGUFReader(tiny / GGUF_NAME).fields
    template = fields["tokenizer.chat_template"].contents()
    assert template == (tiny / "chat_template.jinja").read_text()
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 1
    generation = json.loads((tiny / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 6, 7]


def test_larger_vocabularies_are_filled_with_unused_tokens() -> None:
    vocabulary = tiny_vocabulary(2048)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == 2048
    assert vocabulary.tokens[-1].startswith("<unused")
    assert len(vocabulary.kinds) == 2048


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 13}, "multiple of 6"),
        ({"layers": 6}, "at least 12"),
        ({"vocab_size": 64}, "at least"),
        ({"kv_heads": 3}, "heads a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        write_tiny_gemma4(tmp_path, **sizes)
