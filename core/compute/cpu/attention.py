"""Attention for CPUs in float32: queries read their blocks in place, and a query's bits depend on nothing but what it
sees: not on neighbours, nor on how a prompt was cut."""

from __future__ import annotations

import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions, PagedBatch
from polymux.core.compute.cpu.kernels import LARGEST_HEAD, CpuKernels, load_cpu_kernels
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.errors import InternalError


class NativeAttention(SdpaAttention):
    name = "native"

    @property
    def kernels(self) -> CpuKernels:
        kernels = load_cpu_kernels()
        if kernels is None:
            raise InternalError("native attention was chosen although its kernels cannot run here")
        return kernels

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        if device.type != "cpu":
            return "it runs on a CPU"
        if dtype != torch.float32:
            return f"it does not compute in {dtype}"
        if dim > LARGEST_HEAD or dim % 2:
            return f"heads of {dim} are odd or larger than {LARGEST_HEAD}"
        return "its kernels cannot be built here" if load_cpu_kernels() is None else None

    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        if self.name not in batch.memo:
            batch.memo[self.name] = batch.positions + 1
        lengths = batch.memo[self.name]
        return self.kernels.attend(query.contiguous(), cache, batch.tables, batch.token_slots, lengths, options)
