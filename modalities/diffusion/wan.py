"""Transformers of the Wan kind (diffusers' `WanTransformer3DModel`) as denoisers: clips, from texts and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, Streams, Wrap, keep_layer
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.modalities.diffusion.encoders import PROMPT
from polymux.modalities.diffusion.merged import MergedWan, halve_rotary, modulate

if TYPE_CHECKING:
    from polymux.modalities.diffusion.flux_kernels import KernelSteps

FIRST_FRAME = "first frame"
"""Condition of models that start from a picture: which latent frames are given, and their latents,
(mask and latent channels, frames, height, width)."""

SEEN = "seen"
"""Condition of such models that also look at the picture: its patches' embeddings, (patches, image dim)."""


GRIDS = 16
"""Resolutions whose rotary tables are kept on the device."""


@dataclass(frozen=True)
class Layout:
    """What the rows of a pass share."""

    expert: int
    grid: tuple[int, ...]
    rotary: tuple[Tensor, Tensor]
    """As the model's own blocks read them, or as merged ones do."""


class WanDenoiser(BlockModel):
    """Predicts velocities. With two transformers, the second takes the steps below `boundary` (of 1: all noise)."""

    def __init__(self, experts: Sequence[WanTransformer3DModel], boundary: float | None = None) -> None:
        self.experts: list[Any] = list(experts)
        for model in self.experts:
            model.eval().requires_grad_(False)
        first = self.experts[0]
        self.boundary = boundary
        self.dtype = first.dtype
        self.dim = first.config.num_attention_heads * first.config.attention_head_dim
        self._patch: tuple[int, int, int] = tuple(first.config.patch_size)
        self._blocks: list[list[Any]] = [list(model.blocks) for model in self.experts]
        self._merged = False
        self._rotary = lru_cache(GRIDS)(self._make_rotary)

    @property
    def fits_kernels(self) -> bool:
        """Whether our kernels can run its blocks: of a model that makes clips of a text alone, with all its norms."""
        config = self.experts[0].config
        return self._reads_text_alone and config.cross_attn_norm and config.qk_norm == "rms_norm_across_heads"

    @property
    def _reads_text_alone(self) -> bool:
        config = self.experts[0].config
        return config.image_dim is None and config.added_kv_proj_dim is None

    def merge(self, wrap: Wrap = keep_layer, steps: KernelSteps | None = None) -> list[torch.nn.Module]:
        """Take the blocks' weights into merged ones, and give those; with `steps`, into ones of our own kernels.
        Only of models that make clips of a text alone."""
        if not self._reads_text_alone:
            return []
        make: Callable[[Any], MergedWan] = lambda block: MergedWan(block, wrap)  # noqa: E731
        if steps is not None:
            from polymux.modalities.diffusion.wan_kernels import KernelWan  # needs triton

            make = lambda block: KernelWan(block, steps, wrap)  # noqa: E731
        for place, model in enumerate(self.experts):
            self._blocks[place] = [make(block) for block in self._blocks[place]]
            model.blocks = torch.nn.ModuleList()
        self._merged = True
        self._rotary.cache_clear()
        return [block for blocks in self._blocks for block in blocks]

    def expert(self, request: DenoiseRequest, step: int) -> int:
        if self.boundary is None or len(self.experts) == 1:
            return 0
        scheduler: Any = request.scheduler
        last = len(scheduler.timesteps) - 1
        time = float(scheduler.timesteps[min(request.start + step, last)])
        return 0 if time >= self.boundary * scheduler.config.num_train_timesteps else 1

    def tokens(self, request: DenoiseRequest) -> int:
        _, frames, height, width = request.shape
        return (frames // self._patch[0]) * (height // self._patch[1]) * (width // self._patch[2])

    def size(self, request: DenoiseRequest) -> int:
        return self.tokens(request)

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.experts[batch.expert]
        latents = batch.latents
        if FIRST_FRAME in batch.conditions[0]:
            latents = torch.cat([latents, batch.gather(FIRST_FRAME)], 1)
        latents = latents.to(self.dtype)
        seen = batch.gather(SEEN).to(self.dtype) if SEEN in batch.conditions[0] else None
        hidden = model.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
        time, modulation, text, picture = model.condition_embedder(
            batch.timesteps, batch.gather(PROMPT).to(self.dtype), seen
        )
        if picture is not None:
            text = torch.cat([picture, text], 1)
        grid = tuple(side // patch for side, patch in zip(latents.shape[2:], self._patch))
        beside = {"text": text, "time": time, "modulation": modulation.unflatten(1, (6, -1))}
        return Streams(hidden, beside, Layout(batch.expert, grid, self._rotary(tuple(latents.shape[1:]))))

    def _make_rotary(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        cos, sin = self.experts[0].rope(torch.empty(1, *shape, device="meta"))
        return halve_rotary(cos[0, :, 0], sin[0, :, 0]) if self._merged else (cos, sin)

    def head(self, streams: Streams) -> Streams:
        return self._run(self._blocks[streams.shared.expert][:1], streams)

    def body(self, streams: Streams) -> Streams:
        return self._run(self._blocks[streams.shared.expert][1:], streams)

    def _run(self, blocks: list[Any], streams: Streams) -> Streams:
        hidden, rotary = streams.hidden, streams.shared.rotary
        for block in blocks:
            more = rotary if self._merged else (rotary,)
            hidden = block(hidden, streams.beside["text"], streams.beside["modulation"], *more)
        return replace(streams, hidden=hidden)

    def finish(self, streams: Streams) -> Tensor:
        model = self.experts[streams.shared.expert]
        shift, scale = (model.scale_shift_table + streams.beside["time"][:, None]).chunk(2, dim=1)
        hidden = model.norm_out(streams.hidden.float()) * (1 + scale) + shift
        tokens = model.proj_out(hidden.type_as(streams.hidden)).float()
        split = tokens.unflatten(2, (*self._patch, -1)).unflatten(1, streams.shared.grid)
        return split.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def modulate(self, streams: Streams) -> Tensor:
        block = self._blocks[streams.shared.expert][0]
        table = block.table if self._merged else block.scale_shift_table
        shift, scale = (table + streams.beside["modulation"].float())[:, :2].unbind(1)
        return modulate(streams.hidden.float(), shift, scale, self.experts[0].config.eps).type_as(streams.hidden)
