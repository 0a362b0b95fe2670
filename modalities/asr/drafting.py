"""A distilled recogniser guesses for the one that it was distilled from: it hears with the same encoder.

Its cross-attention keys and values lie in the window's slab, behind the model's own; what it has said lies in the
blocks of the model's cache (`core.batch.drafting`). A draft with an encoder of its own runs that in the same pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import WhisperConfig

from polymux.core.batch.drafting import Drafting, DraftModel, read_folder
from polymux.core.batch.speculation import Drafter
from polymux.core.batch.tokens import TokenModel
from polymux.core.compute.fast.layers import MakeLinear
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError
from polymux.modalities.asr.decoder import WhisperDecoder
from polymux.modalities.asr.whisper import WhisperEncoder, load_whisper

FITTING = {
    "vocab_size": "tokens",
    "num_mel_bins": "mel bins",
    "max_source_positions": "positions in a window",
    "d_model": "numbers in a state",
    "decoder_attention_heads": "heads",
}
"""What a draft model must have as many of as the model it guesses for."""


class SmallWhisper(Drafting):
    """`speculation = {drafter = "model", model = "folder", tokens = 5}`, for recognisers."""

    name = "model"

    def __init__(self, encoder: WhisperEncoder, make: MakeLinear | None = None) -> None:
        """`encoder` is that of the model to guess for; `make` builds linear layers as that has them."""
        self._encoder = encoder
        self._make = make

    def open(self, model: TokenModel, tokens: int, options: Mapping[str, Any], site: Site) -> Drafter:
        draft = load_whisper(read_folder(options), site.device.torch, model.shape.dtype)
        check_fit(self._encoder.config, draft.config)
        above = self._encoder.attach(draft)
        model.slab = self._encoder.slab
        return DraftModel(WhisperDecoder(draft, self._encoder.slab, self._make, above), site, tokens)


def check_fit(config: WhisperConfig, draft: WhisperConfig) -> None:
    """Raises `ConfigError` unless a draft model of this shape can guess for a model of that one."""
    for name, what in FITTING.items():
        ours, theirs = getattr(config, name), getattr(draft, name)
        if ours != theirs:
            raise ConfigError(
                f"speculation: the draft model has {theirs} {what}, the model it guesses for {ours}: they must be "
                "the same",
                param="speculation",
            )
