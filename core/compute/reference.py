"""The reference tier: untouched transformers modules, with our attention through `AttentionInterface`.

The step's context travels as a private keyword from the model's forward to its attention. It is not transformers'
cache keyword, which has been renamed between releases; and no mask is registered for the attention's name, since the
context says all there is to say about who sees whom.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from polymux.core.compute.attention import AttentionContext, AttentionOptions
from polymux.core.errors import InternalError

ATTENTION = "polymux"
KEYWORD = "polymux"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature over a packed batch of one: (1, heads, T, dim) -> (1, T, heads, dim)."""
    context: AttentionContext | None = keywords.get(KEYWORD)
    if context is None:
        raise InternalError(f"attention {ATTENTION!r} was reached without its context: pass {KEYWORD}= to the model")
    causal = keywords.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        causal=bool(causal),
        window=keywords.get("sliding_window"),
        softcap=keywords.get("softcap"),
        sinks=keywords.get("s_aux"),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return context.attend(getattr(module, "layer_idx", 0), q, k, v, options)[None], None


AttentionInterface.register(ATTENTION, attend)


def prepare_reference(model: torch.nn.Module) -> torch.nn.Module:
    """Switch a transformers model to our attention, for inference. Raises `ModelError` if it will not have it."""
    from polymux.core.errors import ModelError

    try:
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{type(model).__name__} does not take another attention: {error}") from error
    return model.eval().requires_grad_(False)
