"""The pieces a fast decoder is put together from: merged projections, gated MLP, routed experts, rotary tables."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, softmax

from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.fast.operations import Operations
from polymux.core.compute.fast.structure import LayerParts, Unfamiliar

MakeLinear = Callable[[Tensor, Tensor | None], nn.Module]
"""(weight (out, in), bias (out,) or None) -> a module that multiplies by it; where quantization comes in."""


def merge(make: MakeLinear, *parts: nn.Linear) -> nn.Module:
    """One layer whose output is the outputs of `parts`, which read the same input, side by side."""
    weight = torch.cat([part.weight.detach() for part in parts])
    if all(part.bias is None for part in parts):
        return make(weight, None)
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in parts]
    return make(weight, torch.cat(biases))


class GatedMlp(nn.Module):
    """down(act(gate x) * up x), gate and up in one product."""

    def __init__(self, mlp: nn.Module, make: MakeLinear) -> None:
        super().__init__()
        gate, up, down = (getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down"))
        act = getattr(mlp, "act_fn", None)
        if not all(isinstance(part, nn.Linear) for part in (gate, up, down)) or act is None:
            raise Unfamiliar(f"{type(mlp).__name__} is no gated MLP")
        self.gate_up = merge(make, gate, up)
        self.down = merge(make, down)
        self.act = act

    def adapt(self, adapters: AdapterSet, mlp: Any) -> None:
        """Add the adapters' share; `mlp` is the module that this one was made from."""
        self.gate_up = adapters.wrap(self.gate_up, mlp.gate_proj, mlp.up_proj)
        self.down = adapters.wrap(self.down, mlp.down_proj)

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        return self.down(operations.gate(self.act, self.gate_up(x)))


class RoutedExperts(nn.Module):
    """A mixture of gated MLPs (top-k routing), every expert's weights in one tensor."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        gate, experts = getattr(mlp, "gate", None), getattr(mlp, "experts", None)
        gate_up = getattr(experts, "gate_up_proj", None)
        if not isinstance(getattr(gate, "weight", None), Tensor) or not isinstance(gate_up, Tensor):
            raise Unfamiliar(f"{type(mlp).__name__} is no mixture of gated experts")
        if getattr(mlp, "shared_expert", None) is not None or getattr(mlp, "shared_experts", None) is not None:
            raise Unfamiliar(f"{type(mlp).__name__} has shared experts")
        self.router = gate.weight.detach()
        self.gate_up = gate_up.detach()
        self.down = experts.down_proj.detach()
        self.top_k: int = gate.top_k
        self.renormalise = bool(getattr(gate, "norm_topk_prob", True))
        self.act = experts.act_fn
        # only the grouped product leaves the number of rows per expert on the device
        self.recordable = self.gate_up.is_cuda and self.gate_up.dtype == torch.bfloat16

    def forward(self, x: Tensor, operations: Operations) -> Tensor:
        weights, chosen = softmax(linear(x, self.router), dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        numbers = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        mixed = self._run_experts(x[order // self.top_k], ends, operations) * weights.to(x.dtype).flatten()[order, None]
        # back to the order of tokens, and the sum over a token's experts in a fixed order
        return torch.empty_like(mixed).index_copy_(0, order, mixed).view(-1, self.top_k, x.shape[1]).sum(dim=1)

    def _run_experts(self, x: Tensor, ends: Tensor, operations: Operations) -> Tensor:
        """Rows sorted by expert; `ends[e]` is where expert e's rows end. No step waits for the device."""
        if self.recordable:
            hidden = torch._grouped_mm(x, self.gate_up.transpose(1, 2), offs=ends)
            return torch._grouped_mm(operations.gate(self.act, hidden), self.down.transpose(1, 2), offs=ends)
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            if end > start:
                hidden = linear(x[start:end], self.gate_up[expert])
                parts.append(linear(operations.gate(self.act, hidden), self.down[expert]))
                start = end
        return torch.cat(parts)


def build_mlp(parts: LayerParts, make: MakeLinear) -> nn.Module:
    return RoutedExperts(parts.mlp) if hasattr(parts.mlp, "experts") else GatedMlp(parts.mlp, make)


def rotary_tables(rotary: nn.Module, kinds: set[str | None], length: int, like: Tensor) -> dict[str | None, Tensor]:
    """Per layer kind, (2, length, dim): cosines and sines of every position. Raises `Unfamiliar` when they depend on
    more than the position."""
    rope_type: Any = getattr(rotary, "rope_type", "default")
    types = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
    if types & {"dynamic", "longrope"}:
        raise Unfamiliar("its rotary embedding depends on the sequence's length")
    positions = torch.arange(length, device=like.device)[None]
    if hasattr(rotary, "mrope_section"):  # positions of several axes, here all the same
        positions = positions.expand(3, 1, length)
    takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    tables = {}
    for kind in kinds:
        cos, sin = rotary(like, positions, kind) if takes_kind else rotary(like, positions)
        tables[kind] = torch.stack([cos[0], sin[0]])
    return tables


def rotary_axes(rotary: nn.Module, axes: int, like: Tensor) -> Tensor:
    """(dim,) int64: which of the `axes` positions of a token turns each dimension, found by moving one at a time.

    Raises `Unfamiliar` when the positions do not share the dimensions among themselves.
    """
    still = torch.zeros(axes, 1, 1, dtype=torch.int64, device=like.device)
    moved = []
    for axis in range(axes):
        positions = still.clone()
        positions[axis] = 1
        moved.append(rotary(like, positions)[1].flatten() != 0)
    turns = torch.stack(moved)
    if not bool((turns.sum(dim=0) == 1).all()):
        raise Unfamiliar("its rotary embedding mixes the positions of a token")
    return turns.to(torch.int64).argmax(dim=0)
