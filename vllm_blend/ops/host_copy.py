"""Copies between the host and the device that the host does not wait for."""

from __future__ import annotations

import numpy as np
import torch


def to_device(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """Return host values on the device; through pinned memory to a GPU, so that the host does not wait."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(target: torch.Tensor, values: np.ndarray) -> None:
    """Write host values to a tensor that stays where it is; through pinned memory to a GPU, as `to_device`."""
    tensor = torch.from_numpy(values)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


class HostCopy:
    """A tensor on its way to the host, queued on the current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
