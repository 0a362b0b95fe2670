"""A CUDA card that is not there: what runs on it has shapes and devices, and no values.

    with imagine_card() as card:
        site = Site(card.device, settings, (TritonAttention(),))
        ...                      whole programs run: loops, stages, recorded steps

Tensors on the host are real, those on the card are torch's fake ones. What would fail on a card fails here: tensors
of two devices in one operation, and, while a step is recorded, whatever waits for the card, reads its values or copies
from memory that is not pinned. What comes back to the host is 0 for integers, 1 for other numbers and True. Our own
kernels are not run; torch's own check their shapes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from polymux.core.compute.device import CudaDevice, HostCopy
from polymux.core.compute.packed.table import Table
from polymux.core.errors import InternalError

READING = ("_local_scalar_dense", "is_nonzero", "equal", "allclose")
"""Operations that give a number to the host."""

SHAPING = ("nonzero", "masked_select", "unique", "_unique2", "bincount", "repeat_interleave")
"""Operations whose output has as many elements as the values say."""


class _Fakes(FakeTensorMode):
    """Host tensors stay as they are; whatever touches the card is faked."""

    recording = False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.split(".")[0]
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        faked = any(isinstance(each, FakeTensor) for each in leaves)
        target = kwargs.get("device")
        to_card = target is not None and torch.device(target).type == "cuda"
        if name == "_pin_memory":
            return args[0].clone()
        if name == "is_pinned":
            return True
        if not faked and not to_card:
            return func(*args, **{**kwargs, "pin_memory": None} if "pin_memory" in kwargs else kwargs)
        if name in READING:
            return self._read(name, args)
        if name == "nonzero" and not self.recording:  # as many as there may be
            self._wait(name)
            sizes = [args[0].numel(), args[0].dim()]
            options = {"dtype": torch.int64, "device": args[0].device}
            return super().__torch_dispatch__(torch.ops.aten.empty.memory_format, (), (sizes,), options)
        if name == "_to_copy" and to_card and not faked:
            if self.recording or not kwargs.get("non_blocking"):
                self._wait("a copy from the host")
            options = {"dtype": kwargs.get("dtype") or args[0].dtype, "device": target}
            sizes = [list(args[0].shape)]
            found = super().__torch_dispatch__(torch.ops.aten.empty.memory_format, (), sizes, options)
            if args[0].numel() == 1:  # a module's own number
                found.known = args[0].item()
            return found
        if name == "copy_" and args[0].device.type == "cpu":
            self._wait("a copy to the host")
            return args[0].copy_(_stand_in(args[0]))
        if target is not None and torch.device(target).type == "cpu":
            self._wait("a copy to the host")
            return _stand_in(args[0], kwargs.get("dtype"))
        if self.recording:
            if name in SHAPING or (name == "index" and any(_masks(each) for each in leaves[1:])):
                raise InternalError(f"{name} in a recorded step: its output depends on values")
            if any(each.device.type == "cpu" and each.dim() for each in leaves):
                raise InternalError(f"{name} in a recorded step reads memory of the host")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _read(self, name: str, args: Any) -> Any:
        self._wait(name)
        if name != "_local_scalar_dense":
            return True
        return getattr(args[0], "known", args[0].dtype == torch.bool)

    def _wait(self, what: str) -> None:
        """The host does not go on before the card has done all that it was told."""
        if self.recording:
            raise InternalError(f"{what} in a recorded step")
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename
        ):
            frame = frame.f_back
        self.waits[f"{what}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1


def _masks(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8)


def _stand_in(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What a tensor on the card is to the host."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    with unset_fake_temporarily():
        found = torch.zeros(tensor.shape, dtype=dtype or tensor.dtype)
    integer = found.dtype in (torch.int32, torch.int64)
    return found.fill_(getattr(tensor, "known", 0 if integer else 1))


def _apply(module: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
    """A module's conversion, whose own way refuses fakes."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(change(weight.detach()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = change(buffer)
    return module


def _decomposed(mode: bool = True) -> AbstractContextManager[None]:
    return torch.no_grad() if mode else nullcontext()


class _Copy(HostCopy):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__({name: _stand_in(tensor) for name, tensor in tensors.items()})


class _Device(CudaDevice):
    def copy_to_host(self, tensors: dict[str, Tensor]) -> HostCopy:
        return _Copy(tensors)

    def upload(self, numbers: Mapping[str, Sequence[int] | np.ndarray]) -> dict[str, Tensor]:
        return {
            name: torch.empty(len(values), dtype=torch.int64, device=self.torch) for name, values in numbers.items()
        }

    def send(self, array: np.ndarray[Any, Any]) -> Tensor:
        with unset_fake_temporarily():
            found = torch.from_numpy(np.array(array))
        return torch.empty(found.shape, dtype=found.dtype, device=self.torch)


class _Generator(torch.Generator):
    """One of the host, in the place of a device's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls)


class Card:
    """What was seen of the card."""

    def __init__(self, mode: _Fakes) -> None:
        self.device = _Device("cuda:0")
        self.kernels: set[str] = set()
        """Names of our own kernels that were launched."""
        self.recorded = 0
        """Steps that were recorded."""
        self.waits = mode.waits
        """What the host waited for the card with, and where."""
        self._mode = mode

    @contextmanager
    def record(self, graph: Any, **options: Any) -> Iterator[None]:
        """In the place of `torch.cuda.graph`."""
        if self._mode.recording:
            raise InternalError("a step is recorded inside another")
        self._mode.recording = True
        try:
            yield
        finally:
            self._mode.recording = False
        self.recorded += 1

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In the place of a launch of our own kernels: all of their tensors are on the card."""
        name = kernel.fn.__qualname__
        for each in args:
            if isinstance(each, Tensor) and not isinstance(each, FakeTensor):
                raise InternalError(f"kernel {name} is given a tensor of the host")
        self.kernels.add(name)


@contextmanager
def imagine_card() -> Iterator[Card]:
    """Everything inside sees the card; models are built inside, or brought over with `tiny.bring`."""
    mode = _Fakes()
    card = Card(mode)
    with ExitStack() as stack:
        for name in ("Stream", "Event", "CUDAGraph", "graph_pool_handle", "current_stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        # in inference mode a device's operations come undecomposed, which fakes do not expect
        stack.enter_context(mock.patch.object(torch, "inference_mode", _decomposed))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "graph", card.record))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_name", lambda *device: "imagined"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda *device: (9, 0)))
        properties = SimpleNamespace(shared_memory_per_block_optin=227 << 10)
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda *device: properties))
        stack.enter_context(mock.patch.object(Table, "choose", lambda table, case, able: able[0]))
        stack.enter_context(mock.patch.object(torch.nn.Module, "_apply", _apply))
        stack.enter_context(mock.patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(
            mock.patch.object(
                JITFunction, "run", lambda kernel, *args, **options: card.launch(kernel, *args, **options)
            )
        )
        stack.enter_context(mode)
        yield card
