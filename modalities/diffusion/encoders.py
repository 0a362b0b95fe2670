"""Text encoders, one prompt a pass: a prompt's conditions are the same bits in any company."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polymux.core.batch.denoiser import Adapters
from polymux.core.batch.oneshot import OneShotModel
from polymux.modalities.diffusion.recipes import QWEN_PREFIX
from polymux.modalities.diffusion.work import Prompt, Text

PROMPT = "prompt"
"""Condition: the text's token embeddings, (text tokens, dim)."""

POOLED = "pooled"
"""Condition: the pooled text embedding, (pooled dim,)."""

MASK = "mask"
"""Condition: 1 for the text's own tokens, 0 for padding, (text tokens,)."""

Conditions = dict[str, Tensor]


class TextEncoders(OneShotModel):
    """`Text` to the conditions of one branch. `encoders` in the order of the recipe's readings."""

    adapters: Adapters | None = None

    def __init__(self, encoders: Sequence[Any]) -> None:
        self.encoders = list(encoders)

    def forward(self, items: list[Text], slabs: list[Tensor]) -> list[Conditions]:
        conditions = []
        for item in items:
            if self.adapters is not None:
                self.adapters.bind(item.adapter)
            conditions.append(self.encode(item.prompt))
        return conditions

    @abstractmethod
    def encode(self, prompt: Prompt) -> Conditions: ...

    def ids(self, prompt: Prompt, place: int) -> Tensor:
        """(1, tokens) int64 on the encoder's device."""
        return torch.tensor([prompt.ids[place]], device=self.encoders[place].device)

    def mask(self, prompt: Prompt, place: int) -> Tensor:
        """(1, tokens) int64: 1 before the padding."""
        ids = prompt.ids[place]
        return (torch.arange(len(ids), device=self.encoders[place].device) < prompt.lengths[place]).long()[None]


class FluxTexts(TextEncoders):
    """CLIP's pooled output and T5's tokens."""

    def encode(self, prompt: Prompt) -> Conditions:
        pooled = self.encoders[0](self.ids(prompt, 0)).pooler_output
        tokens = self.encoders[1](self.ids(prompt, 1))[0]
        return {PROMPT: tokens[0], POOLED: pooled[0]}


def read_clip(encoder: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The last layer but one, (tokens, dim), and the first output (pooled where there is a projection)."""
    output = encoder(ids, output_hidden_states=True)
    return output.hidden_states[-2][0], output[0][0]


class StableDiffusion3Texts(TextEncoders):
    """Two CLIPs side by side, filled up to T5's width, then T5's tokens; zeros where T5 is left out."""

    def __init__(self, encoders: Sequence[Any], width: int) -> None:
        super().__init__(encoders)
        self.width = width

    def encode(self, prompt: Prompt) -> Conditions:
        read = [read_clip(self.encoders[place], self.ids(prompt, place)) for place in (0, 1)]
        clip = torch.cat([tokens for tokens, _ in read], -1)
        if len(self.encoders) == 3:
            tokens = self.encoders[2](self.ids(prompt, 2))[0][0]
        else:
            tokens = clip.new_zeros(256, self.width)
        clip = torch.nn.functional.pad(clip, (0, tokens.shape[-1] - clip.shape[-1]))
        return {PROMPT: torch.cat([clip, tokens]), POOLED: torch.cat([pooled for _, pooled in read])}


class StableDiffusionTexts(TextEncoders):
    """CLIP's last layer."""

    def encode(self, prompt: Prompt) -> Conditions:
        return {PROMPT: self.encoders[0](self.ids(prompt, 0))[0][0]}


class StableDiffusionXLTexts(TextEncoders):
    """Two CLIPs side by side. `zeros`: a negative prompt that is not given is zeros, not an empty text."""

    def __init__(self, encoders: Sequence[Any], zeros: bool) -> None:
        super().__init__(encoders)
        self.zeros = zeros

    def encode(self, prompt: Prompt) -> Conditions:
        first, _ = read_clip(self.encoders[0], self.ids(prompt, 0))
        second, pooled = read_clip(self.encoders[1], self.ids(prompt, 1))
        conditions = {PROMPT: torch.cat([first, second], -1), POOLED: pooled}
        if prompt.empty and self.zeros:
            return {name: torch.zeros_like(value) for name, value in conditions.items()}
        return conditions


class MaskedTexts(TextEncoders):
    """T5's tokens, with a mask for the transformer's attention (PixArt)."""

    def encode(self, prompt: Prompt) -> Conditions:
        mask = self.mask(prompt, 0)
        return {PROMPT: self.encoders[0](self.ids(prompt, 0), attention_mask=mask)[0][0], MASK: mask[0]}


class QwenTexts(TextEncoders):
    """The last layer of a language model, without the template's first tokens."""

    def encode(self, prompt: Prompt) -> Conditions:
        ids = self.ids(prompt, 0)
        output = self.encoders[0](input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
        return {PROMPT: output.hidden_states[-1][0, QWEN_PREFIX:]}


class WanTexts(TextEncoders):
    """UMT5's tokens, zeros behind them."""

    def encode(self, prompt: Prompt) -> Conditions:
        mask = self.mask(prompt, 0)
        tokens = self.encoders[0](self.ids(prompt, 0), mask).last_hidden_state
        return {PROMPT: (tokens * mask[..., None])[0]}
