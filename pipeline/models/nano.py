"""gemma4-nano: a small trained Gemma-4 that ships with the package (jobs/train_nano_target.py)."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.models.gguf_writer import write_gguf
from pipeline.models.llamacpp_quantise import quantisation_type, quantise_gguf
from pipeline.models.tiny import tiny_config
from pipeline.models.tiny_tokenizer import read_hf_vocabulary

if TYPE_CHECKING:
    from transformers import Gemma4TextConfig

NANO_NAME = "gemma4-nano"
NANO_FOLDER = Path(__file__).resolve().parent.parent / "data" / NANO_NAME
HELD_OUT_NAME = "held-out.jsonl"  # prompts of modules it was not trained on, in NANO_FOLDER


def nano_config() -> "Gemma4TextConfig":
    """Row lengths are multiples of 256 wherever Gemma-4's are, so that k-quants apply."""
    return tiny_config(
        layers=8,
        full_every=4,
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=32,
        full_head_dim=64,
        per_layer_input=32,
        window=64,
        vocab_size=2048,
    )


def write_nano_gguf(out: Path, quantise: str | None = None) -> list[Path]:
    """Write gemma4-nano as GGUF into the directory `out`: F16, and one quantisation of it.

    quantise: a type name of llama.cpp, such as Q4_K_M or Q8_0; needs llama-cpp-python.
    Returns the files written, F16 first: `gemma4-nano-F16.gguf`, `gemma4-nano-Q4_K_M.gguf`.
    Raises PipelineError for an unknown type, or if llama-cpp-python is missing or refuses.
    """
    from safetensors.torch import load_file
    from transformers import Gemma4TextConfig

    if quantise is not None:
        quantisation_type(quantise)  # bad names are told before anything is written
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NANO_NAME}-F16.gguf"
    weights = load_file(NANO_FOLDER / "model.safetensors")
    write_gguf(
        path,
        NANO_NAME,
        Gemma4TextConfig.from_pretrained(NANO_FOLDER),
        read_hf_vocabulary(NANO_FOLDER),
        {name: tensor.float().numpy() for name, tensor in weights.items()},
    )
    if quantise is None:
        return [path]
    quantised = out / f"{NANO_NAME}-{quantise.upper()}.gguf"
    quantise_gguf(path, quantised, quantise)
    return [path, quantised]
