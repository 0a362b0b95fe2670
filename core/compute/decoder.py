"""A transformers causal language model as the token family's model, on the reference tier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.core.errors import ModelError

AXES = 3
"""Time, height and width (multimodal rotary embedding, Qwen2-VL, Wang et al. 2024, section 2.1)."""

LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
"""What paged attention can serve; other kinds are refused by name until they are supported."""


class LanguageHalf(torch.nn.Module):
    """The decoder and the head of a larger model, as a causal language model of their own."""

    base_model_prefix = "model"

    def __init__(self, backbone: Any, head: torch.nn.Module) -> None:
        super().__init__()
        self.model = backbone
        self.lm_head = head
        self.config = backbone.config

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> CausalLMOutput:
        hidden = self.model(**inputs).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden[:, logits_to_keep]))


class TransformersDecoder(TokenModel):
    """Runs an untouched `...ForCausalLM`, or a `LanguageHalf`, over packed rows.

    `inlay` is what an encoder leaves for its prompts.
    """

    def __init__(self, model: torch.nn.Module, inlay: CacheSpec | None = None) -> None:
        self.model = prepare_reference(model)
        self.shape = read_shape(model.config, next(model.parameters()).dtype)
        self.inlay = inlay

    def adapt(self, adapters: AdapterSet) -> None:
        """Serve these adapters of the model."""
        adapters.replace(self.model)
        self.adapters = adapters

    def forward(self, batch: TokenBatch) -> Tensor:
        if self.adapters is not None:
            self.adapters.launch.tokens = batch.adapted
        inputs: dict[str, Any] = {"input_ids": batch.ids[None]}
        if batch.places is not None or batch.further is not None:
            embedded = batch.embed(self.model.get_input_embeddings())
            inputs = {"inputs_embeds": embedded[None]}
            if layers := batch.split_layers(embedded.shape[1]):
                masks = torch.zeros_like(batch.ids, dtype=torch.bool).index_fill_(0, batch.places, True)
                inputs |= {"visual_pos_masks": masks[None], "deepstack_visual_embeds": list(layers)}
        output = self.model(
            **inputs,
            position_ids=batch.positions.unsqueeze(-2),
            use_cache=False,
            logits_to_keep=batch.sampled,
            output_hidden_states=batch.wants_hidden,
            **{KEYWORD: batch.context},
        )
        if batch.wants_hidden:
            batch.hidden = output.hidden_states[-1][0]
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
        axes=AXES if "mrope_section" in (getattr(config, "rope_parameters", None) or {}) else 1,
    )
