"""What `rope_freqs.weight` says: each value divides the RoPE frequency of one dimension pair."""

from typing import Any

import numpy as np
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.errors import PipelineError
from pipeline.gguf.reader import GGUFFile

ROPE_FREQS = "rope_freqs.weight"
# Released Llama-3.x models all use these; the factor itself is read from the tensor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_UNROTATED = 1e29  # converters write 1e30: the angle is then 0 at every position


def proportional_factor(file: GGUFFile, head_dim: int) -> float:
    """Share of a full-attention head that rotates: the 1s among head_dim / 2 divisors.

    Raises PipelineError when the tensor is missing or is no proportional RoPE; without it every
    dimension would rotate and nothing would look wrong.
    """
    if ROPE_FREQS not in file.tensors:
        raise PipelineError(
            f"{file.path}: the tensor {ROPE_FREQS} is missing, though the model has "
            "full-attention layers whose proportional RoPE it defines; convert the model again"
        )
    divisors = file.read(ROPE_FREQS)
    rotated = int((divisors == 1).sum())
    if (
        divisors.shape != (head_dim // 2,)
        or rotated == 0
        or not bool((divisors[:rotated] == 1).all())
        or not bool((divisors[rotated:] >= _UNROTATED).all())
    ):
        raise PipelineError(
            f"{file.path}: the tensor {ROPE_FREQS} is not {head_dim // 2} values of 1 (rotated) "
            "followed by 1e30 (not rotated), the only form this architecture has"
        )
    return rotated / (head_dim // 2)


def check_no_freqs(file: GGUFFile) -> None:
    """Refuse divisors that would come on top of another kind of RoPE scaling."""
    if ROPE_FREQS in file.tensors:
        raise PipelineError(f"{file.path}: {ROPE_FREQS} and rope.scaling.type are both given")


def llama_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """rope_parameters of a llama-family file: plain, or llama3 when the divisors are exactly that.

    Raises PipelineError when the divisors fit no known rule.
    """
    plain = {"rope_type": "default", "rope_theta": theta}
    if ROPE_FREQS not in file.tensors:
        return plain
    divisors = file.read(ROPE_FREQS)
    if divisors.shape == (head_dim // 2,) and bool((divisors == 1).all()):
        return plain
    scaled = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(str(np.float32(divisors.max()))),
        **_LLAMA3,
    }
    if divisors.shape != (head_dim // 2,) or not _explains(scaled, divisors, head_dim):
        raise PipelineError(
            f"{file.path}: the tensor {ROPE_FREQS} is not the llama3 RoPE scaling "
            f"{_LLAMA3}; this RoPE is not supported (use --backend llamacpp)"
        )
    return scaled


def _explains(rope: dict[str, Any], divisors: np.ndarray[Any, Any], head_dim: int) -> bool:
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_parameters=dict(rope)
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    return bool(np.allclose(plain / frequencies.numpy(), divisors, rtol=1e-4))
