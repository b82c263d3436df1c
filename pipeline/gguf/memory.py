"""Whether the weights fit, asked before the first of them is allocated."""

import resource
from collections.abc import Iterable
from pathlib import Path

import torch

from pipeline.errors import PipelineError

_GIB = 1 << 30
_WORKING_BYTES = 1 << 28  # chunks being dequantised, and torch's own allocations


def check_memory(
    path: Path, tensors: Iterable[torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise PipelineError with needed and available GiB unless the weights fit on `device`."""
    needed = sum(t.numel() for t in tensors) * dtype.itemsize + _WORKING_BYTES
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if needed > available:
        raise PipelineError(
            f"{path}: the weights as {str(dtype).removeprefix('torch.')} need "
            f"{needed / _GIB:.1f} GiB, {available / _GIB:.1f} GiB are available on {device}; use "
            "a smaller dtype, a larger machine or --backend llamacpp"
        )


def available_memory() -> int:
    """Bytes this process may still allocate: free memory, the cgroup's limit, and ulimit -v."""
    limits = [_meminfo_available(), *_cgroup_available()]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits.append(soft - pages * resource.getpagesize())
    return max(0, min(limits))


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise PipelineError("/proc/meminfo has no MemAvailable line; a Linux kernel is needed")


def _cgroup_available() -> list[int]:
    """What the container's memory limit leaves (cgroup v2, then v1); empty where there is none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        root = Path("/sys/fs/cgroup")
        try:
            text = (root / limit).read_text().strip()
            if text != "max":
                return [int(text) - int((root / used).read_text())]
        except (OSError, ValueError):
            continue
    return []
