"""Building a fast decoder from a reference one, and proving that it computes the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.ahead import compile_ahead
from polymux.core.compute.attention import AttentionOptions, PackedContext
from polymux.core.compute.body import TransformersBody
from polymux.core.compute.decoder import TransformersDecoder, read_shape
from polymux.core.compute.fast.decoder import FastBackbone, FastDecoder, FastLayer
from polymux.core.compute.fast.layers import MakeLinear, build_mlp, merge, rotary_axes, rotary_tables
from polymux.core.compute.fast.operations import RotaryTable, choose_operations
from polymux.core.compute.fast.proof import prove
from polymux.core.compute.fast.structure import LayerParts, Norm, Unfamiliar, find_backbone, read_layers, read_norm
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.stopwatch import part

log = logging.getLogger("polymux.engine")

CHECK_ROWS = (5, 12)
"""Lengths of the rows that a fast decoder is checked with."""


def accelerate(
    reference: TransformersDecoder,
    make: MakeLinear | None = None,
    positions: int | None = None,
    adapters: AdapterSet | None = None,
) -> TokenModel:
    """The fast tier of a decoder, or the reference itself where its structure is unfamiliar.

    `make` builds the linear layers (a quantized kind); `positions` bounds the rotary tables and with them the context;
    `adapters` are served beside the model. The check runs before any quantization and any adapter, with the same
    attention on both sides, and takes one small forward pass of each.
    """
    model, shape = reference.model, reference.shape
    if positions is not None:  # no row may be longer than the tables
        shape = replace(shape, context=min(shape.context, positions))
    try:
        with part("reference run"):
            sketch = _read(model, reference.forward, shape, reference.inlay)
        with part("rebuild"):
            fast = _assemble(model, shape, sketch, None)
        with part("proof"):
            _prove(model, reference.forward, sketch, fast.forward)
        if make is not None:
            del fast  # its merged weights are a second copy of the model, and the quantized ones are a third
            fast = _assemble(model, shape, sketch, make)
        if adapters is not None:
            fast.adapt(adapters, sketch.layers)
        fast.inlay = reference.inlay
        return fast
    except Unfamiliar as reason:
        log.warning("%s runs on the reference tier: %s", type(model).__name__, reason)
        if adapters is not None:
            reference.adapt(adapters)
        return reference


def accelerate_backbone(reference: TransformersBody, make: MakeLinear | None = None) -> FastBackbone:
    """The same for a decoder without a head. Raises `Unfamiliar`."""
    model, shape = reference.model, read_shape(reference.config, reference.dtype)

    def run(batch: TokenBatch) -> Tensor:
        return reference.run(batch.ids, batch.positions, None, batch.context)  # type: ignore[arg-type]

    def rerun(batch: TokenBatch) -> Tensor:
        return fast.run(batch.embed(fast.embed), batch.positions, batch.context)

    sketch = _read(model, run, shape)
    fast = _assemble_backbone(model, shape, sketch, None)
    _prove(model, run, sketch, rerun)
    return fast if make is None else _assemble_backbone(model, shape, sketch, make)


Run = Callable[[TokenBatch], Tensor]


def _prove(model: nn.Module, run: Run, sketch: _Sketch, rebuilt: Run) -> None:
    with torch.inference_mode():
        compile_ahead(lambda: rebuilt(sketch.batch), device_of(model))
        found = rebuilt(sketch.batch).float()
    prove(model, lambda: run(sketch.batch), sketch.expected, found)


@dataclass
class _Sketch:
    """What was read of a reference: its parts, and what it said to the batch it is checked with."""

    layers: list[LayerParts]
    options: dict[int, AttentionOptions]
    rotary: dict[str | None, RotaryTable]
    norm: Norm
    batch: TokenBatch
    expected: Tensor
    """What the reference makes of the batch, float32: logits, or hidden states of a model without a head."""


class Recorder(PackedContext):
    """Notes the options that each attention layer of a reference really uses, in the order of their calls."""

    def __init__(self, starts: list[int]) -> None:
        super().__init__(SdpaAttention(), starts)
        self.options: dict[int, AttentionOptions] = {}
        self.calls: list[AttentionOptions] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.options[layer] = options
        self.calls.append(options)
        return super().attend(layer, query, key, value, options)


def check_batch(
    model: nn.Module, vocabulary: int, context: int, axes: int = 1, inlay: CacheSpec | None = None
) -> TokenBatch:
    """Two rows of random tokens; what it is run with is a `Recorder`. Where pictures may stand, also the places of
    some vectors, and positions of its own on each axis. No position is beyond `context`."""
    device = device_of(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (sum(CHECK_ROWS),), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in CHECK_ROWS]).clamp(max=context - 1).to(device)
    if axes > 1:
        positions = torch.stack([positions, *(positions // (2 + axis) + axis for axis in range(1, axes))])
    starts = [0, CHECK_ROWS[0], sum(CHECK_ROWS)]
    everything = torch.arange(len(ids), device=device)
    batch = TokenBatch(ids, positions, everything, everything, Recorder(starts))
    if inlay is not None:
        batch.places = torch.arange(CHECK_ROWS[0] + 1, CHECK_ROWS[0] + 4, device=device)
        scale = model.get_input_embeddings().weight[ids].float().std().item()
        vectors = torch.randn(3, inlay.shape[-1], generator=generator) * scale
        batch.vectors = vectors.to(device, inlay.dtype)
    return batch


def _read(model: nn.Module, run: Run, shape: TokenShape, inlay: CacheSpec | None = None) -> _Sketch:
    backbone = find_backbone(model)
    layers = read_layers(model)
    batch = check_batch(model, shape.vocabulary, shape.context, shape.axes, inlay)
    with torch.inference_mode():
        expected = run(batch).float()
    recorder = batch.context
    if not isinstance(recorder, Recorder) or set(recorder.options) != set(range(len(layers))):
        raise Unfamiliar("its layers do not attend once each")
    example = layers[0].q.weight.detach()[:1, :1]
    tables = rotary_tables(backbone.rotary_emb, {layer.kind for layer in layers}, shape.context, example)
    if any(table.shape[-1] != shape.head_dim for table in tables.values()):
        raise Unfamiliar("only a part of each head is rotated")
    axes = rotary_axes(backbone.rotary_emb, shape.axes, example) if shape.axes > 1 else None
    rotary = {kind: RotaryTable(table, axes) for kind, table in tables.items()}
    return _Sketch(layers, dict(recorder.options), rotary, read_norm(backbone.norm), batch, expected)


def _assemble(model: nn.Module, shape: TokenShape, sketch: _Sketch, make: MakeLinear | None) -> FastDecoder:
    head = _find_head(model)
    backbone = _assemble_backbone(model, shape, sketch, make)
    return FastDecoder(
        shape,
        backbone.heads,
        backbone.embed,
        backbone.layers,
        backbone.norm,
        (make or backbone.operations.linear)(head.weight.detach(), None if head.bias is None else head.bias.detach()),
        getattr(model.config, "final_logit_softcapping", None),
        backbone.operations,
    )


def _assemble_backbone(model: nn.Module, shape: TokenShape, sketch: _Sketch, make: MakeLinear | None) -> FastBackbone:
    operations = choose_operations(device_of(model), shape.dtype)
    make = make or operations.linear
    layers = [
        FastLayer(
            input_norm=parts.input_norm,
            qkv=merge(make, parts.q, parts.k, parts.v),
            o=merge(make, parts.o),
            q_norm=parts.q_norm,
            k_norm=parts.k_norm,
            attention_out_norm=parts.attention_out_norm,
            mlp_norm=parts.mlp_norm,
            mlp=build_mlp(parts, make),
            mlp_out_norm=parts.mlp_out_norm,
            rotary=sketch.rotary[parts.kind],
            options=sketch.options[index],
        )
        for index, parts in enumerate(sketch.layers)
    ]
    embed = find_backbone(model).embed_tokens
    return FastBackbone(shape, model.config.num_attention_heads, embed, layers, sketch.norm, operations)


def _find_head(model: nn.Module) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise Unfamiliar("its head is no linear layer")
    return head


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
