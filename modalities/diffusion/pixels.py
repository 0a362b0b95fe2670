"""Between latents and pixels: the decoder, the encoder, and a cheap look at a latent that is not ready yet."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.errors import InternalError
from polymux.modalities.diffusion.wan import FIRST_FRAME, SEEN

TILED = 2048 * 2048
"""Pixels of one frame from which on a VAE works tile by tile: its memory grows with the area."""

FITTED = 6
"""Latents that the preview is fitted to."""

COARSE = 4
"""Latent pixels of an even patch in those."""


class Scale:
    """How a model's latents relate to its VAE's own: shifted and scaled as a whole, or channel by channel."""

    def __init__(self, vae: Any) -> None:
        config = vae.config
        mean, deviation = config.get("latents_mean"), config.get("latents_std")
        # AutoencoderKL names its means and does not use them
        self._by_channel = mean is not None and "z_dim" in config
        self._mean = torch.tensor(mean, device=vae.device) if self._by_channel else None
        self._deviation = torch.tensor(deviation, device=vae.device) if self._by_channel else None
        self._shift = config.get("shift_factor") or 0.0
        self._factor = config.get("scaling_factor") or 1.0

    def leave(self, latent: Tensor) -> Tensor:
        """(1, channels, ...) of the model to the VAE's."""
        if self._mean is None or self._deviation is None:
            return latent / self._factor + self._shift
        return latent * _spread(self._deviation, latent) + _spread(self._mean, latent)

    def enter(self, latent: Tensor) -> Tensor:
        """(1, channels, ...) of the VAE to the model's."""
        if self._mean is None or self._deviation is None:
            return (latent - self._shift) * self._factor
        return (latent - _spread(self._mean, latent)) / _spread(self._deviation, latent)

    def enter_deviation(self, deviation: Tensor) -> Tensor:
        """The same for a standard deviation."""
        if self._deviation is None:
            return deviation * self._factor
        return deviation / _spread(self._deviation, deviation)


def _spread(values: Tensor, latent: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (latent.dim() - 2)).to(latent.dtype)


class LatentDecoder(OneShotModel):
    """A latent to pixels, (height, width, 3) uint8, or (frames, height, width, 3) of a latent with a time axis.

    `timed`: the VAE takes a time axis although the latents have none (Qwen-Image).
    """

    def __init__(self, vae: Any, *, timed: bool = False) -> None:
        self.vae: Any = vae
        self.scale = Scale(vae)
        self._timed = timed
        self._exact: Any = None

    def forward(self, items: list[Tensor], slabs: list[Tensor]) -> list[Any]:
        return [self._decode(item) for item in items]

    def _decode(self, latent: Tensor) -> Tensor | InternalError:
        """A VAE in half precision may overflow: what is not finite is decoded again in float32, and never shown."""
        picture = self.run(self.vae, latent)
        if not picture.isfinite().all() and self.vae.dtype != torch.float32:
            if self._exact is None:
                self._exact = copy.deepcopy(self.vae).float()
            picture = self.run(self._exact, latent)
        if not picture.isfinite().all():
            return InternalError("the picture's decoder gave values that are not finite")
        return (picture * 255).round().to(torch.uint8).movedim(0, -1).contiguous()

    def run(self, vae: Any, latent: Tensor) -> Tensor:
        """(3, [frames,] height, width) float32, from 0 to 1."""
        latent = latent[:, None] if self._timed else latent
        scaled = self.scale.leave(latent[None].float()).to(vae.dtype)
        if hasattr(vae, "use_tiling"):
            vae.use_tiling = scaled.shape[-1] * scaled.shape[-2] * 64 > TILED
        picture: Tensor = vae.decode(scaled, return_dict=False)[0][0].float()
        if self._timed:
            picture = picture[:, 0]
        return (picture / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True)
class Encoded:
    """A picture's latent as the VAE sees it: a distribution, (channels, height, width) each, in the model's scale."""

    mean: Tensor
    deviation: Tensor


class LatentEncoder(OneShotModel):
    """Pixels, (height, width, 3) uint8, to `Encoded`."""

    def __init__(self, decoder: LatentDecoder) -> None:
        self.vae: Any = decoder.vae
        self._scale = decoder.scale
        self._timed = decoder._timed

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]:
        return [self.encode(item) for item in items]

    def encode(self, pixels: Any) -> Encoded:
        picture = self.read(pixels)
        if self._timed:
            picture = picture[:, :, None]
        spread = self.vae.encode(picture).latent_dist
        mean = self._scale.enter(spread.mean.float())[0]
        deviation = self._scale.enter_deviation(spread.std.float())[0]
        return Encoded(mean[:, 0], deviation[:, 0]) if self._timed else Encoded(mean, deviation)

    def read(self, pixels: Any) -> Tensor:
        """(1, 3, height, width) in the VAE's dtype, from -1 to 1."""
        picture = torch.as_tensor(pixels).to(self.vae.device).movedim(-1, 0)[None]
        return (picture.float() / 255 * 2 - 1).to(self.vae.dtype)


class StartEncoder(LatentEncoder):
    """A clip's first frame (pixels) and its number of frames, to what its model reads beside text and latents."""

    def __init__(self, decoder: LatentDecoder, eye: Any, processor: Any) -> None:
        """`eye`: an image encoder whose view the transformer also reads, with its processor; None: it reads none."""
        super().__init__(decoder)
        self._eye = eye
        self._processor = processor

    def encode(self, item: Any) -> Any:
        """`FIRST_FRAME`: (temporal factor + channels, latent frames, height, width), which frames are given, then
        their latents; `SEEN`: (patches, dim)."""
        pixels, frames = item
        picture = self.read(pixels)[:, :, None]
        clip = torch.cat([picture, picture.new_zeros(1, 3, frames - 1, *picture.shape[-2:])], 2)
        latent = self._scale.enter(self.vae.encode(clip).latent_dist.mode().float())[0]
        given = latent.new_zeros(self.vae.config.scale_factor_temporal, *latent.shape[1:])
        given[:, 0] = 1
        conditions = {FIRST_FRAME: torch.cat([given, latent])}
        if self._eye is not None:
            seen = self._processor(images=Image.fromarray(pixels), return_tensors="pt").pixel_values
            output = self._eye(seen.to(self._eye.device, self._eye.dtype), output_hidden_states=True)
            conditions[SEEN] = output.hidden_states[-2][0]
        return conditions


class LatentSketch:
    """A preview without the decoder: a linear map from a latent pixel's channels to a colour.

    Fitted once, when the first preview is asked for, to what the decoder makes of a few random latents of even
    patches. So it needs no table of known models, and knows any VAE.
    """

    def __init__(self, decoder: LatentDecoder, channels: int) -> None:
        self._decoder = decoder
        self._channels = channels
        self._map: Tensor | None = None

    def __call__(self, latent: Tensor) -> Tensor:
        """(1, channels, [frames,] height, width) to (height, width, 3) uint8: of a clip, its first frame."""
        if self._map is None:
            self._map = self._fit(latent)
        flat = latent[0, :, 0] if latent.dim() == 5 else latent[0]
        ones = flat.new_ones(1, *flat.shape[1:])
        colours = torch.einsum("chw,cd->hwd", torch.cat([flat, ones]), self._map)
        return (colours.clamp(0, 1) * 255).round().to(torch.uint8)

    def _fit(self, like: Tensor) -> Tensor:
        """(channels + 1, 3): least squares over patches."""
        generator = torch.Generator().manual_seed(0)
        inputs, colours = [], []
        for _ in range(FITTED):
            coarse = torch.randn(self._channels, 4, 4, generator=generator).to(like.device, like.dtype)
            latent = coarse.repeat_interleave(COARSE, 1).repeat_interleave(COARSE, 2)
            picture = self._decoder.run(self._decoder.vae, latent[:, None] if like.dim() == 5 else latent)
            picture = picture[:, 0] if like.dim() == 5 else picture
            colours.append(torch.nn.functional.adaptive_avg_pool2d(picture, 4).flatten(1).T)
            inputs.append(coarse.flatten(1).T)
        known = torch.cat([torch.cat(inputs), like.new_ones(len(inputs) * 16, 1)], 1)
        eye = 1e-3 * torch.eye(known.shape[1], device=known.device)
        return torch.linalg.solve(known.T @ known + eye, known.T @ torch.cat(colours))
