"""UNets of the Stable Diffusion 1.5, 2 and XL kind (diffusers' `UNet2DConditionModel`) as denoisers.

A UNet has no row of equal blocks, but its last layer joins what the picture just passed (one convolution) with what
came up from the depths, and the depths change little from step to step. So the parts are: the convolution; nothing;
all that lies deeper; the last layer. A row that skips the third reuses the feature that it left (DeepCache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, Streams, Wrap, keep_layer
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.errors import ModelError
from polymux.modalities.diffusion.encoders import POOLED, PROMPT

if TYPE_CHECKING:
    from polymux.modalities.diffusion.flux_kernels import KernelSteps

SIZES = "sizes"
"""Condition of the XL kind: original size, crop and target size, (6,)."""


@dataclass(frozen=True)
class Layout:
    """Of the latent, in pixels."""

    height: int
    width: int


class UNetDenoiser(BlockModel):
    """Predicts what its scheduler is configured for (noise, or velocity). Every row has a timestep of its own."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        """Raises `ModelError` for a UNet of another kind."""
        self.unet: Any = unet
        self.unet.eval().requires_grad_(False)
        self.dtype = self.unet.dtype
        self._extended = self.unet.config.addition_embed_type == "text_time"
        if self.unet.config.addition_embed_type not in (None, "text_time") or self.unet.config.class_embed_type:
            raise ModelError("this UNet reads conditions that no served pipeline has")
        resnet = self.unet.up_blocks[-1].resnets[-1]
        self.dim = resnet.in_channels - self.unet.config.block_out_channels[0]
        self._halvings: int = 2**self.unet.num_upsamplers

    @property
    def fits_kernels(self) -> bool:
        """Whether our kernels can run its blocks: none changes a picture's size or scales what it adds."""
        return all(map(_fits_kernels, self.unet.modules()))

    def merge(self, wrap: Wrap = keep_layer, steps: KernelSteps | None = None) -> list[torch.nn.Module]:
        """Convolutions read all channels of a pixel together; each attention's projections become one. With
        `steps`, what stands between products and convolutions is in kernels of our own; adapters cannot be bound."""
        self.unet.to(memory_format=torch.channels_last)
        self.unet.fuse_qkv_projections()
        for module in self.unet.modules():
            if not isinstance(module, Attention):
                continue
            if hasattr(module, "to_qkv"):
                module.to_qkv = wrap(module.to_qkv, module.to_q, module.to_k, module.to_v)
            if hasattr(module, "to_kv"):
                module.to_kv = wrap(module.to_kv, module.to_k, module.to_v)
        if steps is not None:
            return self._take_kernels(steps)
        kinds = (BasicTransformerBlock, ResnetBlock2D)
        return [module for module in self.unet.modules() if isinstance(module, kinds)]

    def _take_kernels(self, steps: KernelSteps) -> list[torch.nn.Module]:
        from polymux.modalities.diffusion.unet_kernels import (
            KernelNorm,
            KernelResnet,
            KernelTransformer,
        )  # needs triton

        taken: list[torch.nn.Module] = []
        for parent in list(self.unet.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, ResnetBlock2D):
                    taken.append(KernelResnet(module))
                elif isinstance(module, BasicTransformerBlock):
                    taken.append(KernelTransformer(module, steps))
                elif isinstance(module, torch.nn.GroupNorm) and isinstance(parent, Transformer2DModel):
                    taken.append(KernelNorm(module, activate=False))
                else:
                    continue
                setattr(parent, name, taken[-1])
        if self.unet.conv_norm_out:
            self.unet.conv_norm_out = KernelNorm(self.unet.conv_norm_out, activate=True)
            self.unet.conv_act = torch.nn.Identity()
        return taken

    def tokens(self, request: DenoiseRequest) -> int:
        _, height, width = request.shape
        return height * width

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.unet
        latents = batch.latents.to(self.dtype)
        text = batch.gather(PROMPT).to(self.dtype)
        added = self._added(batch)
        time = model.time_embedding(model.get_time_embed(sample=latents, timestep=batch.timesteps))
        extra = model.get_aug_embed(emb=time, encoder_hidden_states=text, added_cond_kwargs=added)
        time = time if extra is None else time + extra
        if model.time_embed_act is not None:
            time = model.time_embed_act(time)
        rows, _, height, width = latents.shape
        first = model.conv_in(2 * latents - 1 if model.config.center_input_sample else latents)
        hidden = first.new_zeros(()).expand(rows, height * width, self.dim)  # the depths add all there is
        return Streams(hidden, {"first": first, "time": time, "text": text}, Layout(height, width))

    def _added(self, batch: DenoiseBatch) -> Mapping[str, Tensor] | None:
        if not self._extended:
            return None
        return {"text_embeds": batch.gather(POOLED).to(self.dtype), "time_ids": batch.gather(SIZES).to(self.dtype)}

    def head(self, streams: Streams) -> Streams:
        return streams

    def body(self, streams: Streams) -> Streams:
        model, beside = self.unet, streams.beside
        passed = [beside["first"]]
        sample = beside["first"]
        for block in model.down_blocks:
            sample, left = block(hidden_states=sample, temb=beside["time"], **_read(block, beside))
            passed += left
        if model.mid_block is not None:
            sample = model.mid_block(sample, beside["time"], **_read(model.mid_block, beside))
        layout = streams.shared
        odd = any(side % self._halvings for side in (layout.height, layout.width))
        for place, block in enumerate(model.up_blocks):
            count = len(block.resnets)
            left, passed = tuple(passed[-count:]), passed[:-count]
            if place == len(model.up_blocks) - 1:
                sample = _run_layers(block, sample, left[1:], beside)
                break
            size = passed[-1].shape[2:] if odd else None
            sample = block(
                hidden_states=sample,
                temb=beside["time"],
                res_hidden_states_tuple=left,
                upsample_size=size,
                **_read(block, beside),
            )
        return replace(streams, hidden=sample.flatten(2).transpose(1, 2))

    def finish(self, streams: Streams) -> Tensor:
        model, beside, layout = self.unet, streams.beside, streams.shared
        deep = streams.hidden.transpose(1, 2).unflatten(2, (layout.height, layout.width))
        block = model.up_blocks[-1]
        place = len(block.resnets) - 1
        sample = _run_layers(block, deep, (beside["first"],), beside, place)
        if model.conv_norm_out:
            sample = model.conv_act(model.conv_norm_out(sample))
        prediction: Tensor = model.conv_out(sample)
        return prediction.float()

    def modulate(self, streams: Streams) -> Tensor:
        raise ModelError("a UNet has no modulated input to measure")


def _fits_kernels(module: torch.nn.Module) -> bool:
    """Of one that our kernels would stand in for, or whose like they know nothing of."""
    if isinstance(module, ResnetBlock2D):
        plain = module.time_embedding_norm == "default" and not (module.up or module.down or module.skip_time_act)
        return plain and module.output_scale_factor == 1 and isinstance(module.nonlinearity, torch.nn.SiLU)
    if isinstance(module, BasicTransformerBlock):
        known = module.norm_type == "layer_norm" and module.pos_embed is None and module.attn2 is not None
        return known and not module.only_cross_attention and isinstance(module.ff.net[0], GEGLU)
    return True


def _read(block: Any, beside: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"encoder_hidden_states": beside["text"]} if getattr(block, "has_cross_attention", False) else {}


def _run_layers(
    block: Any, sample: Tensor, left: tuple[Tensor, ...], beside: Mapping[str, Tensor], first: int = 0
) -> Tensor:
    """Layers of a last block, from number `first` on: as many as there are features `left` from the way down."""
    for place, skip in enumerate(reversed(left), first):
        sample = block.resnets[place](torch.cat([sample, skip], 1), beside["time"])
        if getattr(block, "has_cross_attention", False):
            sample = block.attentions[place](sample, encoder_hidden_states=beside["text"], return_dict=False)[0]
    return sample
