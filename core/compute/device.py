"""A device as the loop sees it: where tensors live, how results come back, how many launches may be out.

    HostCopy   results on their way to the host; `read` is legal once the launch is behind

`LaggedCpu` exists for tests: a CPU whose results arrive one launch late, so that every property that must hold under
launch-ahead can be tested without an accelerator. Reading early is an error there, not a wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from polymux.core.errors import ConfigError, InternalError


def send(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array on a device. The host does not wait: a copy from memory that is not pinned would come after all that
    was launched before, and the host with it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostCopy:
    """Tensors copied to the host without waiting. Order of launch is order of arrival."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def read(self) -> dict[str, torch.Tensor]:
        return self._tensors


class Device:
    """The CPU: a launch has finished when it returns, so launching ahead would only delay what the host knows."""

    depth = 1
    """Launches in flight before the oldest is collected."""

    def __init__(self, name: str = "cpu") -> None:
        self.torch = torch.device(name)

    def copy_to_host(self, tensors: dict[str, torch.Tensor]) -> HostCopy:
        return HostCopy(tensors)

    def upload(self, numbers: Mapping[str, list[int] | np.ndarray]) -> dict[str, torch.Tensor]:
        """Integers as int64 tensors on the device, without waiting for it."""
        return {name: torch.tensor(values, dtype=torch.int64) for name, values in numbers.items()}

    def send(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        """An array on the device, without waiting for it."""
        return torch.from_numpy(array)

    def launched(self) -> None:
        """One more launch is out."""

    def drained(self) -> None:
        """Nothing more can be launched before the oldest launch is collected."""


class _PinnedCopy(HostCopy):
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__({name: self._pin(tensor) for name, tensor in tensors.items()})
        self._event = torch.cuda.Event()
        self._event.record()

    @staticmethod
    def _pin(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def read(self) -> dict[str, torch.Tensor]:
        self._event.synchronize()
        return super().read()


class CudaDevice(Device):
    """A CUDA device: launch k+1 is enqueued before the host has seen the results of launch k."""

    depth = 2

    def copy_to_host(self, tensors: dict[str, torch.Tensor]) -> HostCopy:
        return _PinnedCopy(tensors)

    def upload(self, numbers: Mapping[str, list[int] | np.ndarray]) -> dict[str, torch.Tensor]:
        # one pinned buffer and one copy: a copy from pageable memory would wait for the stream
        flat = np.concatenate([np.asarray(values, dtype=np.int64) for values in numbers.values()])
        pinned = torch.empty(flat.size, dtype=torch.int64, pin_memory=True)
        pinned.numpy()[:] = flat
        sent = pinned.to(self.torch, non_blocking=True)
        return dict(zip(numbers, sent.split([len(values) for values in numbers.values()])))

    def send(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return send(array, self.torch)


def touch_libraries(device: torch.device) -> None:
    """Have a CUDA device's libraries loaded that every model needs, a second in all: on a thread, while others import.

    What is wrong with them is told by whoever needs them.
    """
    with contextlib.suppress(Exception), torch.inference_mode():
        x = torch.ones(64, 64, dtype=torch.bfloat16, device=device)
        y = torch.nn.functional.linear(x, torch.cat([x, x]))
        y = torch.nn.functional.silu(y.float()).to(x.dtype) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1)
        heads = y.view(1, 64, 2, 64).transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        torch.nn.functional.embedding(torch.arange(8, device=device), x).sort(dim=-1)
        torch.cuda.current_stream(device).synchronize()


class _LateCopy(HostCopy):
    def __init__(self, tensors: dict[str, torch.Tensor], device: LaggedCpu) -> None:
        super().__init__({name: tensor.clone() for name, tensor in tensors.items()})
        self._device = device
        self._launch = device.launches

    def read(self) -> dict[str, torch.Tensor]:
        if self._device.launches <= self._launch + 1 and not self._device.idle:
            raise InternalError("the results of a launch were read before the next launch was out")
        return super().read()


class LaggedCpu(Device):
    """A CPU whose results arrive one launch late."""

    depth = 2

    def __init__(self) -> None:
        super().__init__("cpu")
        self.launches = 0
        self.idle = False

    def copy_to_host(self, tensors: dict[str, torch.Tensor]) -> HostCopy:
        return _LateCopy(tensors, self)

    def launched(self) -> None:
        self.launches += 1
        self.idle = False

    def drained(self) -> None:
        self.idle = True


def open_device(name: str) -> Device:
    """ "cpu", "cuda", "cuda:1", or "auto": the first CUDA device if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return Device()
    if name.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device", param="device")
        return CudaDevice(name)
    raise ConfigError(f"unknown device {name!r}: use auto, cpu, cuda or cuda:N", param="device")
