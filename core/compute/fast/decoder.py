"""A decoder put together for speed from a transformers model's parts: the token family's fast tier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.compute.attention import AttentionContext, AttentionOptions
from polymux.core.compute.fast.structure import Norm


@dataclass
class FastLayer:
    """One layer, ready to run. `heads` and `kv_heads` share the merged projection's output in that order."""

    input_norm: Norm
    qkv: nn.Module
    o: nn.Module
    q_norm: Norm | None
    k_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm
    mlp: nn.Module
    mlp_out_norm: Norm | None
    rotary: Tensor
    """(2, positions, dim): cosines and sines."""
    options: AttentionOptions


class FastDecoder(TokenModel):
    """Runs packed rows through merged projections; the residual stream is added inside the norms that follow it."""

    def __init__(
        self,
        shape: TokenShape,
        heads: int,
        embed: nn.Module,
        layers: list[FastLayer],
        norm: Norm,
        head: nn.Module,
        final_softcap: float | None,
    ) -> None:
        self.shape = shape
        self.heads = heads
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.head = head
        self.final_softcap = final_softcap

    def forward(self, batch: TokenBatch) -> Tensor:
        hidden = self.run(self.embed(batch.ids), batch.positions, batch.context)
        logits = self.head(hidden[batch.sampled])
        if self.final_softcap is not None:
            logits = self.final_softcap * torch.tanh(logits / self.final_softcap)
        return logits

    def run(self, x: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Embeddings (T, d) to normalised hidden states (T, d)."""
        residual = x
        tables: dict[int, tuple[Tensor, Tensor]] = {}
        for index, layer in enumerate(self.layers):
            key = id(layer.rotary)
            if key not in tables:
                cos, sin = layer.rotary[:, positions]
                tables[key] = (cos[:, None], sin[:, None])
            x = self._attend(index, layer, _norm(residual, layer.input_norm), tables[key], context)
            residual = residual + (x if layer.attention_out_norm is None else _norm(x, layer.attention_out_norm))
            x = layer.mlp(_norm(residual, layer.mlp_norm))
            residual = residual + (x if layer.mlp_out_norm is None else _norm(x, layer.mlp_out_norm))
        return _norm(residual, self.norm)

    def _attend(
        self, index: int, layer: FastLayer, x: Tensor, table: tuple[Tensor, Tensor], context: AttentionContext
    ) -> Tensor:
        heads, kv_heads, dim = self.heads, self.shape.kv_heads, self.shape.head_dim
        merged = layer.qkv(x).view(-1, heads + 2 * kv_heads, dim)
        rotated, value = merged[:, : heads + kv_heads], merged[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts = rotated.split([heads, kv_heads], dim=1)
            rotated = torch.cat([_norm(parts[0], layer.q_norm), _norm(parts[1], layer.k_norm)], dim=1)
        query, key = rotate(rotated, *table).split([heads, kv_heads], dim=1)
        return layer.o(context.attend(index, query, key, value, layer.options).flatten(1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021, section 3.4.2) in the half-split layout: (T, heads, dim)."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos + turned * sin


def _norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.weight.dtype == x.dtype:
        return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return rms_norm(x.float(), norm.weight.shape, norm.weight, norm.eps).to(x.dtype)
