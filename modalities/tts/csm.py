"""CSM on the token family: a backbone that draws a frame's first code, and a depth decoder that draws the others.

Both are decoders of one familiar structure without being language models by name. `Language` gives each that outward
form, so that the fast tier takes them as it takes any other decoder. Text and sound share one sequence: an id below the
codebook's size is a frame's first code, one above is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding
from transformers import CsmForConditionalGeneration

from polymux.core.batch.decoder import TokenModel
from polymux.core.batch.depth import DepthModel, Draw
from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.errors import InternalError, ModelError


@dataclass
class Spoken:
    """What `Language` says: logits (1, S, vocabulary), and the states (1, T, dim) they were made of."""

    logits: Tensor
    hidden_states: tuple[Tensor]


class Language(nn.Module):
    """A decoder's body with an embedding and a head, outwardly a causal language model."""

    base_model_prefix = "model"

    def __init__(self, body: Any, embedding: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        body.embed_tokens = embedding
        self.model = body
        self.config = body.config
        self.lm_head = head

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_attn_implementation(self, name: str) -> None:
        self.model.set_attn_implementation(name)

    def forward(
        self,
        *,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
        **context: Any,
    ) -> Spoken:
        """(1, T) ids or (1, T, dim) embeddings."""
        hidden = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rotary = self.model.rotary_emb(hidden, position_ids)
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, use_cache=use_cache, **context)
        hidden = self.model.norm(hidden)
        return Spoken(self.lm_head(hidden[:, logits_to_keep]), (hidden,))


class FrameEmbedding(nn.Module):
    """Ids and, for frames, their further codes, to vectors: a frame is the sum of its codes."""

    def __init__(self, text: nn.Embedding, codes: nn.Embedding, codebooks: int, size: int) -> None:
        """`codes` holds `codebooks` tables of `size` vectors, one behind the other."""
        super().__init__()
        self.text = text
        self.codes = codes
        self.size = size
        self.offsets = nn.Buffer(torch.arange(1, codebooks, device=codes.weight.device) * size, persistent=False)

    def forward(self, ids: Tensor, further: Tensor | None = None) -> Tensor:
        """(..., dim) for ids (...) and further codes (..., codebooks - 1); without those, of the first codes alone."""
        spoken = (ids < self.size)[..., None]
        frames = self.codes(ids.clamp(max=self.size - 1))
        if further is not None:
            frames = frames + self.codes(further + self.offsets).sum(dim=-2)
        return torch.where(spoken, frames, self.text((ids - self.size).clamp(min=0)))


class CodeEmbedding(nn.Module):
    """First codes as the depth decoder reads them."""

    def __init__(self, codes: nn.Embedding, projector: nn.Linear) -> None:
        super().__init__()
        self.codes = codes
        self.projector = projector

    def forward(self, ids: Tensor) -> Tensor:
        return self.projector(self.codes(ids))


class DepthDecoder(DepthModel):
    """A frame's further codes, one pass for each, over keys and values of this frame alone."""

    def __init__(self, original: Any, ending: int) -> None:
        """`original`: transformers' `CsmDepthDecoderForCausalLM`, which belongs to this from now on. `ending`: the code
        that a frame is full of when it ends the sound."""
        config = original.config
        body = original.model
        self.ids = config.num_codebooks - 1
        self.width = config.backbone_hidden_size
        self.ending = ending
        self.projector = body.inputs_embeds_projector
        self.heads = original.codebooks_head.weight.detach()
        """(ids, dim, codebook size): every code has a head of its own."""
        self.dtype = self.heads.dtype
        first = nn.Linear(*self.heads[0].shape, bias=False, device="meta")
        first.weight = nn.Parameter(self.heads[0].T.contiguous(), requires_grad=False)
        codes = body.embed_tokens
        language = Language(body, CodeEmbedding(codes, self.projector), first)
        layers = accelerate(TransformersDecoder(language))
        if not isinstance(layers, FastDecoder):
            raise ModelError("the depth decoder's structure is unfamiliar")
        self.layers = layers
        projected = self.projector(codes.weight).detach()
        self.read = projected.view(config.num_codebooks, config.vocab_size, -1)
        """(codebooks, codebook size, dim): every code as the layers read it, so that a step looks it up."""

    def forward(self, hidden: Tensor, tokens: Tensor, draw: Draw) -> Tensor:
        """(S, ids) for hidden states (S, width) and first codes (S,)."""
        context = FrameContext(self.layers, len(tokens), self.ids + 1)
        context.run(self.projector(hidden))
        found: list[Tensor] = []
        code = tokens
        for number in range(self.ids):
            states = context.run(embedding(code, self.read[number]))
            code = draw(number, states @ self.heads[number])
            found.append(code)
        return torch.stack(found, dim=1)

    def ends(self, token: int, further: Sequence[int]) -> bool:
        """The last code does not count: transformers' own `generate` does not look at it either."""
        return token == self.ending and all(code == self.ending for code in further[:-1])


class FrameContext:
    """Keys and values of the frames that S rows are in the middle of; every run adds one place to all of them."""

    def __init__(self, decoder: FastDecoder, rows: int, places: int) -> None:
        shape = decoder.shape
        device = decoder.norm.weight.device
        size = (shape.layers, 2, rows, shape.kv_heads, places, shape.head_dim)
        self._decoder = decoder
        self._cache = torch.empty(size, dtype=shape.dtype, device=device)
        self._positions = torch.arange(places, device=device)[:, None].repeat(1, rows)
        self._place = 0
        self._attend = attend_place
        if device.type == "cuda":
            from polymux.core.compute.triton import frames

            self._attend = frames.attend_place

    def run(self, x: Tensor) -> Tensor:
        """The next place of every row: (S, dim) to normalised states (S, dim)."""
        states = self._decoder.run(x, self._positions[self._place], self)  # type: ignore[arg-type]
        self._place += 1
        return states

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """(S, heads, dim)."""
        if options.softcap is not None or options.sinks is not None:
            raise InternalError("a depth decoder with capped or sunk attention")
        return self._attend(query, key, value, self._cache[layer], self._place, options.scale)


def attend_place(query: Tensor, key: Tensor, value: Tensor, cache: Tensor, place: int, scale: float) -> Tensor:
    """One more place of S short sequences: its key and value (S, kv heads, dim) go to `place` of `cache`, (2, S, kv
    heads, places, dim), and its query (S, heads, dim) sees all places up to it. Written out: libraries prepare a plan
    for every length of so short a sequence."""
    rows, heads, dim = query.shape
    cache[0, :, :, place] = key
    cache[1, :, :, place] = value
    keys, values = cache[:, :, :, : place + 1]
    grouped = query.reshape(rows, keys.shape[1], -1, dim) * scale
    weights = (grouped @ keys.transpose(-1, -2)).softmax(dim=-1, dtype=torch.float32)
    return (weights.to(values.dtype) @ values).reshape(rows, heads, dim)


def split_csm(model: CsmForConditionalGeneration, *, tier: str = "fast", top_k: int = 0) -> TokenModel:
    """The decoder of a CSM model, on the fast tier or the reference; the model belongs to it from now on.

    Raises `ModelError`.
    """
    config = model.config
    size = config.vocab_size
    codes = model.backbone_model.embed_tokens.embed_audio_tokens
    inputs = FrameEmbedding(model.embed_text_tokens, codes, config.num_codebooks, size)
    depth = DepthDecoder(model.depth_decoder, config.codebook_eos_token_id)
    depth.top_k = top_k
    decoder: TokenModel = TransformersDecoder(Language(model.backbone_model, inputs, model.lm_head))
    if tier == "fast":
        decoder = accelerate(decoder)  # type: ignore[arg-type]
    decoder.depth = depth
    return decoder
