"""GGUF tensors -> a transformers model, tensor by tensor, nothing left over or unfilled."""

import re
from collections.abc import Iterable, Iterator

import gguf
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pipeline.errors import PipelineError
from pipeline.gguf.config import gguf_config
from pipeline.gguf.memory import check_memory
from pipeline.gguf.reader import GGUFFile
from pipeline.gguf.rope import ROPE_FREQS

_CHUNK = 1 << 20  # elements dequantised at a time: 4 MiB as float32, which stays in cache
# Scales that a file names after the tensor they belong to: model suffix -> that tensor
_SCALES = {
    ".router.scale": ".router.proj",
    ".router.per_expert_scale": ".experts.down_proj",
}
_DEAD_KV = re.compile(r"^blk\.(\d+)\.attn_(k|v|k_norm)\.weight$")


def load_gguf_model(file: GGUFFile, *, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Build the model of a GGUF file with its weights dequantised to `dtype` on `device`.

    The model is in eval mode and needs no gradients. Never more than one copy of the weights is
    in memory. Every tensor of the file is used or known to be redundant, and every parameter and
    persistent buffer is filled from a tensor of exactly its shape.

    Raises PipelineError naming the tensor or key otherwise, and when memory is too small.
    """
    config = gguf_config(file)
    model = _build(file, config, dtype)
    targets = dict(_targets(model))
    names = _tensor_names(file, config, targets)
    _check_tensors(file, config, targets, names)
    check_memory(file.path, targets.values(), dtype, torch.device(device))
    for name, target in targets.items():
        rows = _row_order(file, config, names[name])
        value = _fill(file, names[name], torch.empty(target.shape, dtype=dtype), rows)
        _replace(model, name, value.to(device))
    model.tie_weights()
    _fill_derived_buffers(model, torch.device(device))
    return model.eval()


def _build(file: GGUFFile, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without any weights: meta tensors take no memory whatever sizes the file claims."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise PipelineError(
            f"{file.path}: transformers cannot build a {file.architecture} model of these sizes: "
            f"{' '.join(str(error).split())}"
        ) from None


def _targets(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (a tied one once) and persistent buffers, in the model's own order."""
    persistent = model.state_dict(keep_vars=True)
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name in persistent)


def _tensor_names(
    file: GGUFFile, config: PreTrainedConfig, targets: Iterable[str]
) -> dict[str, str]:
    """Parameter name -> its name in the file, such as blk.3.attn_q.weight."""
    arch = next(a for a, text in gguf.MODEL_ARCH_NAMES.items() if text == file.architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    names: dict[str, str] = {}
    for target in targets:
        base, suffix = target, ".weight"
        for ending, parameter in _SCALES.items():
            if target.endswith(ending):
                base, suffix = target.removesuffix(ending) + parameter, ".scale"
        name = table.get_name(base, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise PipelineError(
                f"{file.path}: the installed gguf package knows no tensor for {target} of "
                f"{file.architecture}; upgrade gguf"
            )
        names[target] = (
            name if name.endswith((".weight", ".bias")) else name + (suffix or ".weight")
        )
    return names


def _check_tensors(
    file: GGUFFile,
    config: PreTrainedConfig,
    targets: dict[str, torch.Tensor],
    names: dict[str, str],
) -> None:
    """Every tensor needed is there with its shape, and no other tensor is left."""
    for name, target in targets.items():
        info = file.tensors.get(names[name])
        if info is None:
            raise PipelineError(
                f"{file.path}: the tensor {names[name]} is missing ({name} of the model); the "
                "file is incomplete or its general.architecture is wrong"
            )
        if info.shape != tuple(target.shape):
            raise PipelineError(
                f"{file.path}: the tensor {names[name]} has shape {list(info.shape)} but "
                f"{name} of the model needs {list(target.shape)}; the file or its "
                "general.architecture is wrong"
            )
    left = set(file.tensors) - set(names.values()) - {ROPE_FREQS}
    first_shared = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    left -= {n for n in left if (m := _DEAD_KV.match(n)) and int(m[1]) >= first_shared}
    if left:
        raise PipelineError(
            f"{file.path}: the tensor {min(left)} has no place in a {file.architecture} model "
            f"({len(left)} such tensors in all); the file or its general.architecture is wrong"
        )


def _row_order(file: GGUFFile, config: PreTrainedConfig, name: str) -> torch.Tensor | None:
    """For llama's Q and K, the model row of each file row; None where rows stay as they are.

    llama files interleave the two halves of each head (rotary pairs (0, 1), (2, 3), …) where
    transformers keeps them apart (pairs (i, i + head_dim / 2)).
    """
    match = re.match(r"^blk\.\d+\.attn_([qk])\.", name)
    if file.architecture != "llama" or match is None:
        return None
    heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
    rows = torch.arange(heads * config.head_dim)
    return rows.view(heads, 2, config.head_dim // 2).transpose(1, 2).reshape(-1)


def _fill(
    file: GGUFFile, name: str, target: torch.Tensor, order: torch.Tensor | None
) -> torch.Tensor:
    """Dequantise a tensor into `target`, a few rows at a time; `order` says where rows go."""
    width = target.shape[-1]
    flat = target.view(-1, width)
    step = max(1, _CHUNK // width)
    for start in range(0, len(flat), step):
        stop = min(start + step, len(flat))
        rows = torch.from_numpy(file.read_rows(name, start, stop)).to(flat.dtype)
        # The extremes of values with NaN are NaN; isfinite of every value takes 20 times as long.
        if not all(bool(extreme.isfinite()) for extreme in torch.aminmax(rows)):
            raise PipelineError(
                f"{file.path}: the tensor {name} holds NaN or infinite values as {flat.dtype}; "
                "the file is damaged or the dtype too narrow (try bfloat16)"
            )
        flat[slice(start, stop) if order is None else order[start:stop]] = rows
    return target


def _replace(model: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value
    # transformers skips what carries this mark when it initialises a model's other buffers.
    getattr(module, leaf)._is_hf_initialized = True


def _fill_derived_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that no file holds (RoPE frequencies, embedding scales).

    The meta build left them without values; transformers' own initialisation computes them, as
    it does in from_pretrained. They start as NaN so that one it forgets cannot pass as a number.
    """
    persistent = model.state_dict(keep_vars=True)
    derived = [name for name, _ in model.named_buffers() if name not in persistent]
    for name in derived:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        module._buffers[leaf] = torch.full_like(getattr(module, leaf), float("nan"), device=device)
    for module in model.modules():
        module._is_hf_initialized = not any(
            b is not None and not getattr(b, "_is_hf_initialized", False)
            for b in module._buffers.values()
        )
    model.initialize_weights()
    for name in derived:
        if bool(torch.isnan(model.get_buffer(name)).any()):
            raise PipelineError(
                f"this transformers version does not initialise the buffer {name}; "
                "use a version this package supports"
            )
