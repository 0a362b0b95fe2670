"""A transformers causal language model as the token family's model, on the reference tier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.core.errors import ModelError

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
"""What paged attention can serve; other kinds are refused by name until they are supported."""


class TransformersDecoder(TokenModel):
    """Runs an untouched `...ForCausalLM` over packed rows."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = prepare_reference(model)
        self.shape = read_shape(model.config, next(model.parameters()).dtype)

    def adapt(self, adapters: AdapterSet) -> None:
        """Serve these adapters of the model."""
        adapters.replace(self.model)
        self.adapters = adapters

    def forward(self, batch: TokenBatch) -> Tensor:
        if self.adapters is not None:
            self.adapters.launch.tokens = batch.adapted
        inputs = {"input_ids": batch.ids[None]}
        if batch.places is not None:
            inputs = {"inputs_embeds": batch.embed(self.model.get_input_embeddings())[None]}
        output = self.model(
            **inputs,
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.sampled,
            **{KEYWORD: batch.context},
        )
        return output.logits[0]


def read_shape(config: Any, dtype: torch.dtype) -> TokenShape:
    """The cache's shape from a transformers configuration. Raises `ModelError` for what is not supported yet."""
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - LAYER_KINDS:
        raise ModelError(f"{config.model_type} has layers of kind {', '.join(sorted(unknown))}: not supported yet")
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{config.model_type} uses multi-head latent attention: not supported yet")
    heads = config.num_attention_heads
    return TokenShape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        dtype=dtype,
    )
