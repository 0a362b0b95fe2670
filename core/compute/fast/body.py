"""The fast tier of a transformers model without a head: an encoder's form, then a decoder's, else the reference."""

from __future__ import annotations

import logging

from torch import Tensor

from polymux.core.compute.attention import PackedContext
from polymux.core.compute.body import Body, TransformersBody
from polymux.core.compute.fast.build import accelerate_backbone
from polymux.core.compute.fast.decoder import FastBackbone
from polymux.core.compute.fast.encoder import accelerate_encoder
from polymux.core.compute.fast.layers import MakeLinear
from polymux.core.compute.fast.structure import Unfamiliar
from polymux.core.errors import ModelError

log = logging.getLogger("polymux.engine")


class FastBody(Body):
    """A decoder's backbone as a body."""

    def __init__(self, reference: TransformersBody, backbone: FastBackbone) -> None:
        self.config = reference.config
        self.dtype = reference.dtype
        self.backbone = backbone

    def run(self, ids: Tensor, places: Tensor, segments: Tensor | None, context: PackedContext) -> Tensor:
        return self.backbone.run(self.backbone.embed(ids), places, context)


def accelerate_body(reference: TransformersBody, make: MakeLinear | None = None) -> Body:
    """The fast tier, proven against the reference; where its structure is unfamiliar, the reference itself.

    `make` builds the linear layers (a quantized kind), after the proof.
    """
    reasons = []
    try:
        return accelerate_encoder(reference, make)
    except Unfamiliar as reason:
        reasons.append(f"as an encoder, {reason}")
    try:
        return FastBody(reference, accelerate_backbone(reference, make))
    except (Unfamiliar, ModelError) as reason:
        reasons.append(f"as a decoder, {reason}")
    log.warning("%s runs on the reference tier: %s", type(reference.model).__name__, "; ".join(reasons))
    return reference
