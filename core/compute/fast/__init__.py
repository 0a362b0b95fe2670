"""The fast tier: a decoder rebuilt from its structure, with merged projections and fused steps.

Nothing here knows a model's name. What is recognised is a shape (norm, merged projections, rotary, attention, gated
MLP), and every model is checked against the reference when it loads.
"""

from polymux.core.compute.fast.build import accelerate
from polymux.core.compute.fast.decoder import FastDecoder

__all__ = ["FastDecoder", "accelerate"]
