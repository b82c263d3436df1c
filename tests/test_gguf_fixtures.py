"""The loader against numbers that llama.cpp itself computed (shared/fixtures)."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.gguf import gguf_config, load_gguf_model, read_gguf

FIXTURES = Path(__file__).parents[1].parent / "shared" / "fixtures"
pytestmark = pytest.mark.skipif(
    not FIXTURES.is_dir(), reason="shared/fixtures (llama.cpp's own numbers) is not here"
)
# F16 differs by llama.cpp's GELU table; Q4_K_M also by its quantised activations.
TOLERANCE = {"F16": 2e-3, "Q4_K_M": 6e-2}


def columns_of(model, ids, start):
    """One teacher-forced pass at absolute position `start`; numpy columns named as in the .npz."""
    ids = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        out = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(start, start + ids.shape[1])[None],
            use_cache=False,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
    columns = {"final_hidden": out.hidden_states[-1][0], "logits": out.logits[0]}
    for kind in ("sliding", "full"):
        key, value = out.shared_kv_states[f"{kind}_attention"]
        columns[f"{kind}_key"] = key[0].transpose(0, 1)
        columns[f"{kind}_value"] = value[0].transpose(0, 1)
    for block in (0, 5):
        columns[f"block_{block}"] = out.hidden_states[block + 1][0]
    return {name: column.numpy() for name, column in columns.items()}


@pytest.mark.parametrize("quantisation", ["F16", "Q4_K_M"])
def test_gemma4_equals_llama_cpp(quantisation):
    file = read_gguf(FIXTURES / f"gemma4-mini-{quantisation}.gguf")
    expected = np.load(FIXTURES / f"gemma4-mini-{quantisation}.npz")
    model = load_gguf_model(file, dtype=torch.float32)
    for start in (0, 1000):
        got = columns_of(model, expected["ids"], start)
        for name, column in got.items():
            if f"pos{start}/{name}" not in expected.files:  # blocks were kept at 0 only
                continue
            want = expected[f"pos{start}/{name}"]
            error = np.linalg.norm(column - want) / np.linalg.norm(want)
            assert error <= TOLERANCE[quantisation], (start, name, error)
        if quantisation == "F16":
            want = expected[f"pos{start}/logits"].argmax(-1)
            assert (got["logits"].argmax(-1) == want).all()


def test_gemma4_config_of_the_fixture():
    config = gguf_config(read_gguf(FIXTURES / "gemma4-mini-F16.gguf"))
    assert config.model_type == "gemma4_text"
    assert config.num_hidden_layers == 12
    assert config.num_kv_shared_layers == 6
    assert config.hidden_size_per_layer_input == 64
    assert config.sliding_window == 32
    assert config.final_logit_softcapping == 30.0
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert [config.per_layer_config[i].head_dim for i in (4, 5)] == [32, 64]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert config.rope_parameters["full_attention"]["partial_rotary_factor"] == 0.25
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert config.rms_norm_eps == 1e-6
