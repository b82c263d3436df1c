"""GGUF keys -> transformers configuration: exact keys, nothing guessed, nothing skipped."""

import time

import gguf_files
import pytest

from pipeline.errors import PipelineError
from pipeline.gguf import gguf_config, read_gguf


def put(key, value):
    return lambda contents: contents.metadata.__setitem__(key, value)


def drop(key):
    return lambda contents: contents.metadata.pop(key)


@pytest.fixture(scope="module")
def sources():
    """Contents are rebuilt per test from these models; the models are never changed."""
    return {
        "llama": gguf_files.tiny_llama(),
        "qwen2": gguf_files.tiny_qwen2(),
        "qwen3": gguf_files.tiny_qwen3(),
        "gemma4": gguf_files.tiny_gemma4(),
        "wide": gguf_files.tiny_gemma4(use_double_wide_mlp=True),
        "moe": gguf_files.tiny_gemma4_moe(),
    }


@pytest.fixture
def config_of(sources, tmp_path):
    def config_of(name, change=None):
        contents = gguf_files.contents(sources[name])
        return gguf_config(read_gguf(gguf_files.write(tmp_path / "m.gguf", contents, change)))

    return config_of


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma4", "wide", "moe"])
def test_config_equals_the_source(sources, config_of, name):
    want, got = sources[name].config.to_dict(), config_of(name).to_dict()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "architectures"):
        want.pop(key, None), got.pop(key, None)
    assert got == want


def test_special_ids_come_from_the_vocabulary(config_of):
    config = config_of("gemma4")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, [1, 5], 0)


def test_keys_that_end_alike_are_not_mixed(config_of):
    """B4: embedding_length and …_per_layer_input, freq_base and freq_base_swa."""
    config = config_of("gemma4", put("gemma4.rope.freq_base", 123.0))
    assert config.rope_parameters["full_attention"]["rope_theta"] == 123.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    config = config_of("gemma4", put("gemma4.rope.freq_base_swa", 77.0))
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 77.0
    config = config_of("gemma4", put("gemma4.embedding_length_per_layer_input", 16))
    assert (config.hidden_size, config.hidden_size_per_layer_input) == (64, 16)
    config = config_of("gemma4", put("gemma4.embedding_length", 640))
    assert (config.hidden_size, config.hidden_size_per_layer_input) == (640, 8)


def test_sliding_head_length(config_of):
    """B5: the key, or the shape of a sliding layer's query norm, never a default."""
    assert config_of("gemma4").per_layer_config[0].head_dim == 16
    config = config_of("gemma4", drop("gemma4.attention.key_length_swa"))
    assert [config.per_layer_config[i].head_dim for i in (0, 1, 2)] == [16, 16, 32]

    def drop_both(contents):
        contents.metadata.pop("gemma4.attention.key_length_swa")
        contents.tensors.pop("blk.0.attn_q_norm.weight")

    with pytest.raises(PipelineError, match=r"gemma4\.attention\.key_length_swa is missing"):
        config_of("gemma4", drop_both)


def test_partial_rotary_factor_comes_from_rope_freqs(config_of):
    """B6: 4 of 16 frequencies rotate in the file as made; here 8 do."""
    assert config_of("gemma4").rope_parameters["full_attention"]["partial_rotary_factor"] == 0.25

    def half(contents):
        contents.tensors["rope_freqs.weight"][:8] = 1.0

    rope = config_of("gemma4", half).rope_parameters["full_attention"]
    assert rope["partial_rotary_factor"] == 0.5


def test_moe_and_shared_key_values(config_of):
    config = config_of("moe")
    assert (config.num_experts, config.top_k_experts, config.moe_intermediate_size) == (4, 2, 32)
    assert config.attention_k_eq_v
    assert [config.per_layer_config[i].num_key_value_heads for i in (1, 2)] == [2, 1]
    assert config_of("wide").use_double_wide_mlp
    assert not config_of("gemma4").use_double_wide_mlp


def test_linear_rope_scaling(config_of):
    def scaled(contents):
        contents.metadata["llama.rope.scaling.type"] = "linear"
        contents.metadata["llama.rope.scaling.factor"] = 4.0

    rope = config_of("llama", scaled).rope_parameters
    assert rope == {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0}


def test_key_value_heads_default_to_heads(config_of):
    assert config_of("llama").num_key_value_heads == 2
    assert config_of("llama", drop("llama.attention.head_count_kv")).num_key_value_heads == 4


BAD = {
    "unknown key": ("gemma4", put("gemma4.attention.new_thing", 3), "attention.new_thing is not k"),
    "unknown llama key": ("llama", put("llama.logit_scale", 2.0), "llama.logit_scale is not known"),
    "unknown qwen2 key": ("qwen2", put("qwen2.attention.scale", 2.0), "qwen2.attention.scale"),
    "missing": (
        "gemma4",
        drop("gemma4.rope.freq_base_swa"),
        "gemma4.rope.freq_base_swa is missing",
    ),
    "missing pattern": (
        "gemma4",
        drop("gemma4.attention.sliding_window_pattern"),
        "sliding_window_pattern is missing",
    ),
    "missing eps": (
        "llama",
        drop("llama.attention.layer_norm_rms_epsilon"),
        "layer_norm_rms_epsilon is missing",
    ),
    "missing qwen3 head size": (
        "qwen3",
        drop("qwen3.attention.key_length"),
        "qwen3.attention.key_length is missing",
    ),
    "text for a number": ("llama", put("llama.embedding_length", "64"), "embedding_length is '64'"),
    "nan": ("llama", put("llama.rope.freq_base", float("nan")), "rope.freq_base is nan"),
    "zero heads": ("llama", put("llama.attention.head_count", 0), "attention.head_count is 0"),
    "zero KV heads": ("llama", put("llama.attention.head_count_kv", 0), "head_count_kv is 0"),
    "experts in llama": ("llama", put("llama.expert_count", 8), "llama.expert_count is 8; 0"),
    "yarn": ("qwen2", put("qwen2.rope.scaling.type", "yarn"), "scaling.type is 'yarn'"),
    "partial RoPE": (
        "llama",
        put("llama.rope.dimension_count", 8),
        "rope.dimension_count is 8; 16",
    ),
    "vocab_size": ("llama", put("llama.vocab_size", 7), "llama.vocab_size is 7; 384"),
    "not causal": ("llama", put("llama.attention.causal", False), "attention.causal is False"),
    "short pattern": (
        "gemma4",
        put("gemma4.attention.sliding_window_pattern", [True, False]),
        "one flag for each of 9 layers",
    ),
    "last layer slides": (
        "gemma4",
        put("gemma4.attention.sliding_window_pattern", [True] * 9),
        "end with a full-attention layer",
    ),
    "all shared": ("gemma4", put("gemma4.attention.shared_kv_layers", 9), "shared_kv_layers is 9"),
    "no own full layer": (
        "gemma4",
        put("gemma4.attention.shared_kv_layers", 7),
        "shared_kv_layers is 7 of 9",
    ),
    "FFN sizes": (
        "gemma4",
        put("gemma4.feed_forward_length", [96] * 8 + [100]),
        "neither constant nor doubled",
    ),
    "FFN count": ("gemma4", put("gemma4.feed_forward_length", [96] * 8), "8 values for 9 layers"),
    "KV heads differ with V": (
        "gemma4",
        put("gemma4.attention.head_count_kv", [2, 2, 1] * 3),
        "only without V tensors",
    ),
    "value length": ("gemma4", put("gemma4.attention.value_length", 16), "value_length is 16; 32"),
    "too many experts used": ("moe", put("gemma4.expert_used_count", 5), "is 5 of 4 experts"),
    "huge block_count": ("gemma4", put("gemma4.block_count", 10**6), "block_count is 1000000"),
    "small block_count": ("llama", put("llama.block_count", 2), "llama.block_count is 2 but"),
    "zero width": (
        "gemma4",
        put("gemma4.embedding_length", 0),
        "embedding_length is 0; a positive",
    ),
    "zero window": ("gemma4", put("gemma4.attention.sliding_window", 0), "sliding_window is 0"),
    "odd heads": ("llama", put("llama.attention.head_count", 6), "refuses the sizes of this llama"),
    "architecture": ("llama", put("general.architecture", "gemma3n"), "'gemma3n' is not supported"),
    "only the tag": (
        "gemma4",
        put("general.architecture", "llama"),
        "llama.block_count is missing",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_keys_are_named(config_of, name):
    source, change, message = BAD[name]
    started = time.perf_counter()
    with pytest.raises(PipelineError) as error:
        config_of(source, change)
    assert message in str(error.value)
    assert time.perf_counter() - started < 5
