"""From the device to the host's memory without stopping the device."""

import torch


class HostCopies:
    """Copies that run beside the kernels that follow them; `wait` before reading any of them.

    On CUDA each goes to pinned memory on a side stream, which first waits for what its device has
    been asked to compute so far. On a CPU a tensor is its own copy.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous CPU tensor that holds `tensor` after `wait`; any shape and dtype."""
        tensor = tensor.contiguous()
        if tensor.device.type != "cuda":
            return tensor.cpu()
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
            self._streams[tensor.device] = stream
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            copy.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not given to others before the copy is done
        return copy

    def wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
