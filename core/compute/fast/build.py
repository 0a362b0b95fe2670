"""Building a fast decoder from a reference one, and proving that it computes the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polymux.core.batch.tokens import TokenBatch, TokenModel
from polymux.core.compute.attention import AttentionOptions, PackedContext
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.fast.decoder import FastDecoder, FastLayer
from polymux.core.compute.fast.layers import MakeLinear, build_mlp, merge, rotary_tables
from polymux.core.compute.fast.operations import RotaryTable, choose_operations
from polymux.core.compute.fast.proof import prove
from polymux.core.compute.fast.structure import LayerParts, Norm, Unfamiliar, find_backbone, read_layers, read_norm
from polymux.core.compute.sdpa import SdpaAttention

log = logging.getLogger("polymux.engine")

CHECK_ROWS = (5, 12)
"""Lengths of the rows that a fast decoder is checked with."""


def accelerate(
    reference: TransformersDecoder, make: MakeLinear | None = None, positions: int | None = None
) -> TokenModel:
    """The fast tier of a decoder, or the reference itself where its structure is unfamiliar.

    `make` builds the linear layers (a quantized kind); `positions` bounds the rotary tables. The check runs before
    any quantization, with the same attention on both sides, and takes one small forward pass of each.
    """
    try:
        sketch = _read(reference, positions)
        fast = _assemble(reference, sketch, None)
        _prove(reference, sketch, fast)
        if make is None:
            return fast
        del fast  # its merged weights are a second copy of the model, and the quantized ones are a third
        return _assemble(reference, sketch, make)
    except Unfamiliar as reason:
        log.warning("%s runs on the reference tier: %s", type(reference.model).__name__, reason)
        return reference


@dataclass
class _Sketch:
    """What was read of a reference: its parts, and what it said to the batch it is checked with."""

    layers: list[LayerParts]
    options: dict[int, AttentionOptions]
    rotary: dict[str | None, RotaryTable]
    norm: Norm
    head: nn.Linear
    batch: TokenBatch
    expected: Tensor
    """(T, vocabulary) float32."""


class _Recorder(PackedContext):
    """Notes the options that each attention layer of the reference really uses."""

    def __init__(self, starts: list[int]) -> None:
        super().__init__(SdpaAttention(), starts)
        self.options: dict[int, AttentionOptions] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.options[layer] = options
        return super().attend(layer, query, key, value, options)


def _check_batch(vocabulary: int, device: torch.device) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (sum(CHECK_ROWS),), generator=generator).to(device)
    places = torch.cat([torch.arange(length) for length in CHECK_ROWS]).to(device)
    starts = [0, CHECK_ROWS[0], sum(CHECK_ROWS)]
    everything = torch.arange(len(ids), device=device)
    return TokenBatch(ids, places, everything, everything, _Recorder(starts))


def _read(reference: TransformersDecoder, positions: int | None) -> _Sketch:
    model, shape = reference.model, reference.shape
    backbone = find_backbone(model)
    layers = read_layers(model)
    batch = _check_batch(shape.vocabulary, _device_of(model))
    with torch.inference_mode():
        expected = reference.forward(batch).float()
    recorder = batch.context
    if not isinstance(recorder, _Recorder) or set(recorder.options) != set(range(len(layers))):
        raise Unfamiliar("its layers do not attend once each")
    length = min(shape.context, positions or shape.context)
    example = layers[0].q.weight.detach()[:1, :1]
    tables = rotary_tables(backbone.rotary_emb, {layer.kind for layer in layers}, length, example)
    if any(table.shape[-1] != shape.head_dim for table in tables.values()):
        raise Unfamiliar("only a part of each head is rotated")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise Unfamiliar("its head is no linear layer")
    rotary = {kind: RotaryTable(table) for kind, table in tables.items()}
    return _Sketch(layers, dict(recorder.options), rotary, read_norm(backbone.norm), head, batch, expected)


def _assemble(reference: TransformersDecoder, sketch: _Sketch, make: MakeLinear | None) -> FastDecoder:
    model, head = reference.model, sketch.head
    operations = choose_operations(_device_of(model), reference.shape.dtype)
    make = make or operations.linear
    return FastDecoder(
        reference.shape,
        model.config.num_attention_heads,
        find_backbone(model).embed_tokens,
        [
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
        ],
        sketch.norm,
        make(head.weight.detach(), None if head.bias is None else head.bias.detach()),
        getattr(model.config, "final_logit_softcapping", None),
        operations,
    )


def _prove(reference: TransformersDecoder, sketch: _Sketch, fast: FastDecoder) -> None:
    with torch.inference_mode():
        found = fast.forward(sketch.batch).float()
    prove(reference.model, lambda: reference.forward(sketch.batch), sketch.expected, found)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
