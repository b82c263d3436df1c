"""Weights of a GGUF file: every tensor equals its source, and nothing is left over or unfilled."""

import ctypes
import subprocess
import sys

import gguf
import gguf_files
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.errors import PipelineError
from pipeline.gguf import load_gguf_model, read_gguf
from pipeline.gguf import weights as weights_module

LLAMACPP = "llama.cpp tests: make llamacpp, or pip install 'drafter-features[llamacpp]'"

MODELS = {
    "llama": gguf_files.tiny_llama,
    "llama tied": lambda: gguf_files.tiny_llama(tie_word_embeddings=True, head_dim=32),
    "qwen2": gguf_files.tiny_qwen2,
    "qwen3": gguf_files.tiny_qwen3,
    "gemma4": gguf_files.tiny_gemma4,
    "gemma4 wide": lambda: gguf_files.tiny_gemma4(use_double_wide_mlp=True),
    "gemma4 moe": gguf_files.tiny_gemma4_moe,
}
IDS = torch.arange(7, 31)[None]  # longer than the sliding window


def load(path, dtype=torch.float32):
    return load_gguf_model(read_gguf(path), dtype=dtype)


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    """A tiny source model and its GGUF file."""
    model = MODELS[request.param]()
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return model, gguf_files.write(path, gguf_files.contents(model))


def test_every_tensor_and_buffer_equals_the_source(case):
    """B8 (Q/K rows per KV head), B9 (norms as they are), and buffers a file does not hold."""
    source, path = case
    loaded = load(path)
    want, got = source.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    # RoPE frequencies and embedding scales, which a build on the meta device leaves empty
    built = AutoModelForCausalLM.from_config(source.config).get_submodule("model")
    buffers = dict(built.named_buffers())
    assert any(name.endswith("inv_freq") for name in buffers)
    for name, value in loaded.get_submodule("model").named_buffers():
        assert value.dtype == buffers[name].dtype
        if not name.endswith("layer_scalar"):
            assert torch.equal(value, buffers[name]), name
    assert torch.equal(logits(loaded), logits(source))


def test_loaded_model_is_ready_for_inference(case):
    source, path = case
    loaded = load(path)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    tied = source.config.tie_word_embeddings
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    eos = [1, 5]  # the file's <eos>, and <|im_end|> by its text
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == eos


def test_bfloat16_is_the_rounded_source(case):
    source, path = case
    loaded = load(path, torch.bfloat16)
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(torch.bfloat16)), name
    for name, buffer in loaded.named_buffers():
        if name.endswith("inv_freq"):
            assert buffer.dtype == torch.float32
    built = AutoModelForCausalLM.from_config(source.config, dtype=torch.bfloat16).eval()
    built.load_state_dict(source.state_dict())
    assert torch.equal(logits(loaded), logits(built))


def test_llama_cpp_computes_the_same(case):
    """The file means to llama.cpp what it means to us: names, row order, experts, sharing."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=LLAMACPP)
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    _, path = case
    runtime = llama_cpp.Llama(
        str(path),
        n_ctx=64,
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
        flash_attn=False,
        type_k=0,  # float32
        type_v=0,
    )
    runtime.eval(IDS[0].tolist())
    want = np.array(runtime.scores[: IDS.shape[1]])
    runtime.close()
    got = logits(load(path))[0].numpy()
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 4e-3
    assert (got.argmax(-1) == want.argmax(-1)).all()


def test_chunks_do_not_change_the_weights(tmp_path, monkeypatch):
    """Tensors are filled a few rows at a time; llama's Q and K rows also change places."""
    monkeypatch.setattr(weights_module, "_CHUNK", 64 * 5)
    source = gguf_files.tiny_llama()
    loaded = load(gguf_files.write(tmp_path / "m.gguf", gguf_files.contents(source)))
    for name, value in source.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_quantised_tensors_are_dequantised(tmp_path):
    source = gguf_files.tiny_qwen3()
    contents = gguf_files.contents(source)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for key, value in contents.metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    stored = {}
    for name, data in contents.tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        packed = gguf.quantize(data, kind)
        stored[name] = gguf.dequantize(packed, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load(path)
    got = loaded.model.layers[1].mlp.down_proj.weight.numpy()
    np.testing.assert_array_equal(got, stored["blk.1.ffn_down.weight"])
    assert not np.array_equal(got, contents.tensors["blk.1.ffn_down.weight"])
    assert read_gguf(path).quantisation == {"Q8_0": 22, "F32": 13}


def test_dead_kv_of_shared_layers_changes_nothing(tmp_path):
    """B7: older converters keep K and V on layers that reuse another layer's; both files load."""
    source = gguf_files.tiny_gemma4()
    plain = gguf_files.write(tmp_path / "plain.gguf", gguf_files.contents(source))

    def add_dead(contents):
        for layer in (6, 7, 8):
            for name in ("attn_k", "attn_v", "attn_k_norm"):
                own = contents.tensors[f"blk.{layer - 3}.{name}.weight"]
                contents.tensors[f"blk.{layer}.{name}.weight"] = np.full_like(own, 3.0)

    dead = gguf_files.write(tmp_path / "dead.gguf", gguf_files.contents(source), add_dead)
    assert len(read_gguf(dead).tensors) == len(read_gguf(plain).tensors) + 9
    assert torch.equal(logits(load(dead)), logits(load(plain)))


def test_llama3_rope_factors(tmp_path):
    """rope_freqs.weight of a llama file becomes the llama3 RoPE that it encodes."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    source = gguf_files.tiny_llama(head_dim=64)
    scaled = gguf_files.tiny_llama(head_dim=64, rope_parameters=rope)
    plain = 500_000.0 ** -(np.arange(0, 64, 2) / 64)
    factors = (plain / scaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(8)

    def add_factors(contents):
        contents.metadata["llama.rope.freq_base"] = 500_000.0
        contents.tensors["rope_freqs.weight"] = np.round(factors, 5)

    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.contents(source), add_factors)
    loaded = load(path)
    assert loaded.config.rope_parameters == rope
    assert torch.equal(logits(loaded), logits(scaled))


@pytest.mark.parametrize("key", ["embedding_length", "attention.head_count", "context_length"])
@pytest.mark.parametrize("name", ["llama", "gemma4"])
def test_absurd_sizes_are_refused_without_memory(tmp_path, name, key):
    """G4: meta tensors cost nothing, and no size in the file can end in another exception."""

    def absurd(contents):
        contents.metadata[f"{name}.{key}"] = 2**32 - 2
        contents.metadata[f"{name}.attention.key_length"] = 2**32 - 2

    source = gguf_files.contents(MODELS[name]())
    with pytest.raises(PipelineError):
        load(gguf_files.write(tmp_path / "m.gguf", source, absurd))


def drop(name):
    return lambda contents: contents.tensors.pop(name)


def put(name, value):
    return lambda contents: contents.tensors.__setitem__(name, np.asarray(value, dtype=np.float32))


def rename_architecture(contents):
    """B11: a gemma4 file that says it is a llama, with llama's keys."""
    contents.metadata["general.architecture"] = "llama"
    for key in list(contents.metadata):
        if key.startswith("gemma4."):
            contents.metadata[key.replace("gemma4.", "llama.")] = contents.metadata.pop(key)
    for extra in (
        "rope.freq_base_swa",
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.dimension_count_swa",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
        "final_logit_softcapping",
    ):
        del contents.metadata[f"llama.{extra}"]
    contents.tensors.pop("rope_freqs.weight")


BROKEN = {
    "missing tensor": (drop("blk.4.ffn_up.weight"), "blk.4.ffn_up.weight is missing"),
    "missing K": (drop("blk.3.attn_k.weight"), "blk.3.attn_k.weight is missing"),
    "missing V": (drop("blk.3.attn_v.weight"), "blk.3.attn_v.weight is missing"),
    "missing scale": (drop("blk.2.layer_output_scale.weight"), "blk.2.layer_output_scale.weight"),
    "missing norm": (drop("output_norm.weight"), "output_norm.weight is missing"),
    "no rope_freqs": (drop("rope_freqs.weight"), "rope_freqs.weight is missing"),
    "wrong rope_freqs": (put("rope_freqs.weight", [2.0] * 16), "rope_freqs.weight is not 16"),
    "scaled rope_freqs": (
        put("rope_freqs.weight", [1.0] * 4 + [8.0] * 12),
        "rope_freqs.weight is not 16",
    ),
    "short rope_freqs": (put("rope_freqs.weight", [1.0] * 8), "rope_freqs.weight is not 16"),
    "extra tensor": (put("blk.1.extra.weight", [1.0]), "blk.1.extra.weight has no place"),
    "extra bias": (put("blk.1.attn_q.bias", [1.0] * 64), "blk.1.attn_q.bias has no place"),
    "extra V bias": (put("blk.3.attn_v.bias", [1.0]), "blk.3.attn_v.bias has no"),
    "wrong shape": (
        put("blk.1.attn_output.weight", np.zeros((64, 32))),
        r"blk.1.attn_output.weight has shape [64, 32] but model.layers.1.self_attn.o_proj.weight "
        "of the model needs [64, 64]; the file or its general.architecture is wrong",
    ),
    "NaN": (put("blk.1.attn_norm.weight", [float("nan")] * 64), "blk.1.attn_norm.weight holds NaN"),
    "lying architecture": (rename_architecture, "the file or its general.architecture is wrong"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tensors_are_named(tmp_path, name):
    change, message = BROKEN[name]
    source = gguf_files.contents(gguf_files.tiny_gemma4())
    path = gguf_files.write(tmp_path / "m.gguf", source, change)
    with pytest.raises(PipelineError) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value)


def test_values_too_large_for_the_dtype_are_refused(tmp_path):
    path = gguf_files.write(
        tmp_path / "m.gguf",
        gguf_files.contents(gguf_files.tiny_llama()),
        put("output_norm.weight", [70_000.0] * 64),
    )
    with pytest.raises(PipelineError, match=r"output_norm\.weight.*too narrow"):
        load(path, torch.float16)
    assert load(path, torch.bfloat16).model.norm.weight[0] == 70_144  # bfloat16's nearest


def test_too_little_memory_is_said_before_loading(tmp_path):
    """B17: with ulimit -v just above what the process has, needed and available GiB are told."""
    path = gguf_files.write(tmp_path / "m.gguf", gguf_files.contents(gguf_files.tiny_llama()))
    script = """
import resource, sys, torch
from pathlib import Path
from pipeline.errors import PipelineError
from pipeline.gguf import load_gguf_model, read_gguf
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (200 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    load_gguf_model(read_gguf(Path(sys.argv[1])), dtype=torch.float32)
except PipelineError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True
    )
    assert "the weights as float32 need 0.3 GiB, 0.2 GiB are available on cpu" in run.stdout
