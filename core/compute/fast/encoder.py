"""An encoder put together for speed from a transformers model's parts: BERT's layer, whoever has it.

A layer is (attention, add and norm, MLP of two products, add and norm), as Vaswani et al. (2017) have it. Packed rows
see only themselves; queries, keys and values are views of one product.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polymux.core.compute.attention import AttentionOptions, PackedContext
from polymux.core.compute.body import Body, TransformersBody, read_kinds
from polymux.core.compute.fast.build import Recorder, check_batch, device_of
from polymux.core.compute.fast.layers import MakeLinear, merge
from polymux.core.compute.fast.operations import Operations, choose_operations
from polymux.core.compute.fast.proof import prove
from polymux.core.compute.fast.structure import Unfamiliar

PARTS = {
    "q": ("attention.self.query", "attention.q_lin"),
    "k": ("attention.self.key", "attention.k_lin"),
    "v": ("attention.self.value", "attention.v_lin"),
    "o": ("attention.output.dense", "attention.out_lin"),
    "attention_norm": ("attention.output.LayerNorm", "sa_layer_norm"),
    "up": ("intermediate.dense", "ffn.lin1"),
    "act": ("intermediate.intermediate_act_fn", "ffn.activation"),
    "down": ("output.dense", "ffn.lin2"),
    "mlp_norm": ("output.LayerNorm", "output_layer_norm"),
}
"""Where a layer's parts are found, under any of the spellings that transformers uses for this structure."""


@dataclass
class EncoderLayer:
    """One layer, ready to run."""

    qkv: nn.Module
    o: nn.Module
    attention_norm: nn.LayerNorm
    up: nn.Module
    act: nn.Module
    down: nn.Module
    mlp_norm: nn.LayerNorm
    options: AttentionOptions


class FastEncoder(Body):
    """Runs packed rows through merged projections. The embeddings are the reference's own."""

    def __init__(
        self, reference: TransformersBody, layers: list[EncoderLayer], heads: int, operations: Operations
    ) -> None:
        self.config = reference.config
        self.dtype = reference.dtype
        self.layers = layers
        self.heads = heads
        self.operations = operations
        self._embeddings = reference.model.embeddings
        self._first = reference.first
        self._kinds = reference.kinds
        self._takes_kinds = "token_type_ids" in inspect.signature(self._embeddings.forward).parameters

    def run(self, ids: Tensor, places: Tensor, segments: Tensor | None, context: PackedContext) -> Tensor:
        x = self._embed(ids, places, segments)
        operations, heads = self.operations, self.heads
        for index, layer in enumerate(self.layers):
            query, key, value = layer.qkv(x).view(len(ids), 3 * heads, -1).split(heads, dim=1)
            mixed = context.attend(index, query, key, value, layer.options).reshape(len(ids), -1)
            x = operations.add_layer_norm(layer.o(mixed), x, layer.attention_norm)
            x = operations.add_layer_norm(layer.down(layer.act(layer.up(x))), x, layer.mlp_norm)
        return x

    def _embed(self, ids: Tensor, places: Tensor, segments: Tensor | None) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": places[None] + self._first}
        if self._takes_kinds and self._kinds:
            inputs["token_type_ids"] = read_kinds(ids, segments, self._kinds)[None]
        return self._embeddings(**inputs)[0]


def accelerate_encoder(reference: TransformersBody, make: MakeLinear | None = None) -> FastEncoder:
    """The fast tier of an encoder, proven against the reference. Raises `Unfamiliar`."""
    model = reference.model
    if not isinstance(getattr(model, "embeddings", None), nn.Module):
        raise Unfamiliar("it has no embeddings that stand alone")
    found = [_read_layer(layer) for layer in _find_layers(model)]
    config = reference.config
    batch = check_batch(model, config.vocab_size, config.max_position_embeddings - reference.first)
    recorder = batch.context
    if not isinstance(recorder, Recorder):
        raise Unfamiliar("its attention cannot be watched")

    def run() -> Tensor:
        return reference.run(batch.ids, batch.positions, None, recorder)

    with torch.inference_mode():
        expected = run().float()
    if len(recorder.calls) != len(found):
        raise Unfamiliar("its layers do not attend once each")
    calls = list(recorder.calls)
    fast = _assemble(reference, found, calls, None)
    try:
        with torch.inference_mode():
            hidden = fast.run(batch.ids, batch.positions, None, recorder).float()
    except RuntimeError as error:
        raise Unfamiliar(f"its parts do not fit together: {error}") from error
    prove(model, run, expected, hidden)
    return fast if make is None else _assemble(reference, found, calls, make)


def _find_layers(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise Unfamiliar("it has no list of layers")
    return max(lists, key=len)


def _read_layer(layer: nn.Module) -> dict[str, nn.Module]:
    parts: dict[str, nn.Module] = {}
    modules = dict(layer.named_modules())
    for part, spellings in PARTS.items():
        module = next((modules[name] for name in spellings if name in modules), None)
        kind = nn.LayerNorm if part.endswith("norm") else nn.Module if part == "act" else nn.Linear
        if not isinstance(module, kind):
            raise Unfamiliar(f"a layer has no {part} of an encoder's kind")
        parts[part] = module
    known = {weight for module in parts.values() for weight in module.parameters()}
    if any(weight not in known for weight in layer.parameters()):
        raise Unfamiliar("a layer has weights besides attention and MLP")
    if len({parts[name].weight.shape for name in "qkv"}) != 1:
        raise Unfamiliar("its queries and keys are not of one size")
    return parts


def _assemble(
    reference: TransformersBody,
    found: list[dict[str, Any]],
    options: list[AttentionOptions],
    make: MakeLinear | None,
) -> FastEncoder:
    operations = choose_operations(device_of(reference.model), reference.dtype)
    make = make or operations.linear
    layers = [
        EncoderLayer(
            qkv=merge(make, parts["q"], parts["k"], parts["v"]),
            o=merge(make, parts["o"]),
            attention_norm=parts["attention_norm"],
            up=merge(make, parts["up"]),
            act=parts["act"],
            down=merge(make, parts["down"]),
            mlp_norm=parts["mlp_norm"],
            options=each,
        )
        for parts, each in zip(found, options)
    ]
    return FastEncoder(reference, layers, reference.config.num_attention_heads, operations)
