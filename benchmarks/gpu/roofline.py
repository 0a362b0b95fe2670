"""What a card cannot do without: bytes to read and products to compute, over the rates measured on it.

Ceilings of an H200, measured: device-to-device copies move 4.26 TB/s, 8192^3 products in bfloat16 run at 779 TFLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BYTES_A_SECOND = 4.26e12
OPERATIONS_A_SECOND = 779e12


@dataclass(frozen=True)
class Sizes:
    """Of one decoder."""

    dense: int
    """Bytes of weights that every step reads: all but the experts, and but for an embedding that is only looked up."""
    expert: int
    """Bytes of all experts."""
    active: float
    """Share of the experts that one token uses."""
    kv: int
    """Bytes of keys and values of one token."""
    head: int
    """Bytes of the product that makes logits, which prompts do without."""


@dataclass(frozen=True)
class Work:
    """Requests at once: their prompts' and answers' tokens, and the leading tokens that all have in common."""

    prompts: list[int]
    outs: list[int]
    shared: int = 0


def read_sizes(model: torch.nn.Module) -> Sizes:
    config = model.config
    width = next(model.parameters()).element_size()
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    every = sum(weight.numel() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    tied = config.tie_word_embeddings
    count = getattr(config, "num_experts", 0) or 1
    active = (getattr(config, "num_experts_per_tok", 0) or 0) / count if experts else 0.0
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dense = every - experts - (0 if tied else embedding)
    return Sizes(
        dense * width, experts * width, active, 2 * config.num_hidden_layers * heads * dim * width, embedding * width
    )


def floor_seconds(sizes: Sizes, work: Work) -> float:
    """A lower bound: prompts at the rate of products, then every step reads its weights, and every row its keys and
    values once; what all have in common is computed once, and read once a step."""
    own = sum(prompt - work.shared for prompt in work.prompts) + work.shared
    products = sizes.dense - sizes.head + sizes.expert * sizes.active
    seconds = own * products / OPERATIONS_A_SECOND  # two bytes and two operations a weight
    steps = max(work.outs)
    read = 0.0
    for step in range(1, steps):
        rows = [prompt for prompt, out in zip(work.prompts, work.outs) if out > step]
        touched = 1 - (1 - sizes.active) ** len(rows) if sizes.expert else 0.0
        tokens = sum(prompt - work.shared + step for prompt in rows) + work.shared
        read += sizes.dense + sizes.expert * touched + tokens * sizes.kv
    return seconds + read / BYTES_A_SECOND
