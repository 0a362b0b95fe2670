"""A decoder put together for speed from a transformers model's parts: the token family's fast tier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.attention import AttentionContext, AttentionOptions
from polymux.core.compute.fast.layers import GatedMlp
from polymux.core.compute.fast.operations import Operations, RotaryTable
from polymux.core.compute.fast.structure import LayerParts, Norm, Unfamiliar


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
    rotary: RotaryTable
    options: AttentionOptions


class FastBackbone:
    """Runs packed rows through merged projections; the residual stream is added inside the norms that follow it."""

    def __init__(
        self,
        shape: TokenShape,
        heads: int,
        embed: nn.Module,
        layers: list[FastLayer],
        norm: Norm,
        operations: Operations,
    ) -> None:
        self.shape = shape
        self.heads = heads
        self.embed = embed
        self.layers = layers
        self.norm = norm
        self.operations = operations

    def run(
        self,
        x: Tensor,
        positions: Tensor,
        context: AttentionContext,
        places: Tensor | None = None,
        later: tuple[Tensor, ...] = (),
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Embeddings (T, d) to normalised hidden states (T, d). `later`: what is added at `places` behind each of the
        first layers. `wanted`, (S,): only these tokens' states are asked for, (S, d); of the others the last layer
        leaves no more than keys and values."""
        operations = self.operations
        heads, kv_heads, dim = self.heads, self.shape.kv_heads, self.shape.head_dim
        residual = x.contiguous()
        x = operations.norm(residual, self.layers[0].input_norm)
        for index, layer in enumerate(self.layers):
            merged = layer.qkv(x).view(-1, heads + 2 * kv_heads, dim)
            attended = operations.attend(index, layer, merged, heads, kv_heads, positions, context).flatten(1)
            if wanted is not None and index == len(self.layers) - 1:
                if not len(wanted):
                    return residual[:0]
                attended, residual = attended[wanted], residual[wanted]
            x = layer.o(attended)
            if layer.attention_out_norm is not None:
                x = operations.norm(x, layer.attention_out_norm)
            x, residual = operations.add_norm(x, residual, layer.mlp_norm)
            x = layer.mlp(x, operations)
            if layer.mlp_out_norm is not None:
                x = operations.norm(x, layer.mlp_out_norm)
            if index < len(later) and places is not None:
                x = x.index_add(0, places, later[index].to(x.dtype))
            following = self.layers[index + 1].input_norm if index + 1 < len(self.layers) else self.norm
            x, residual = operations.add_norm(x, residual, following)
        return x


class FastDecoder(FastBackbone, TokenModel):
    """A backbone with the head that gives logits."""

    def __init__(
        self,
        shape: TokenShape,
        heads: int,
        embed: nn.Module,
        layers: list[FastLayer],
        norm: Norm,
        head: nn.Module,
        final_softcap: float | None,
        operations: Operations,
    ) -> None:
        super().__init__(shape, heads, embed, layers, norm, operations)
        self.recordable = all(getattr(layer.mlp, "recordable", True) for layer in layers)
        self.head = head
        self.final_softcap = final_softcap

    def adapt(self, adapters: AdapterSet, layers: list[LayerParts]) -> None:
        """Serve these adapters of the model; `layers` are its parts, from which this decoder's were merged.

        Raises `Unfamiliar` when an adapter changes a layer that is not among them.
        """
        for layer, parts in zip(self.layers, layers, strict=True):
            layer.qkv = adapters.wrap(layer.qkv, parts.q, parts.k, parts.v)
            layer.o = adapters.wrap(layer.o, parts.o)
            if isinstance(layer.mlp, GatedMlp):
                layer.mlp.adapt(adapters, parts.mlp)
        if adapters.unwrapped:
            raise Unfamiliar(f"an adapter changes {min(adapters.unwrapped)}")
        self.adapters = adapters

    def forward(self, batch: TokenBatch) -> Tensor:
        if self.adapters is not None:
            self.adapters.launch.tokens = batch.adapted
        embedded = batch.embed(self.embed)
        later = batch.split_layers(embedded.shape[1])
        # an adapter's tokens are counted in the whole batch, and so are what an encoder adds behind the last layer
        whole = batch.wants_hidden or bool(batch.adapted) or len(later) == len(self.layers)
        wanted = None if whole or len(batch.sampled) >= len(batch.ids) else batch.sampled
        hidden = self.run(embedded, batch.positions, batch.context, batch.places, later, wanted)
        if batch.wants_hidden:
            batch.hidden = hidden
        logits = self.head(hidden if wanted is not None else hidden[batch.sampled])
        if self.final_softcap is not None:
            logits = self.final_softcap * torch.tanh(logits / self.final_softcap)
        return logits
