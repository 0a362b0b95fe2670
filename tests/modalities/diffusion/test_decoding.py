"""The decoder of latents: large pictures tile by tile, small ones whole, and what overflows once more in float32."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

from polymux.core.errors import InternalError
from polymux.modalities.diffusion import pixels
from polymux.modalities.diffusion.pixels import LatentDecoder


def make_vae() -> Any:
    torch.manual_seed(2)
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=16,
    ).eval()


def decode(decoder: LatentDecoder, latent: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        [picture] = decoder.forward([latent], [])
    return picture


def test_a_large_picture_is_decoded_tile_by_tile_and_the_next_small_one_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "TILED", 64 * 12 * 12)
    latent = torch.randn(4, 20, 28, generator=torch.Generator().manual_seed(1))
    tiling, whole = make_vae(), make_vae()
    tiling.enable_tiling()
    with torch.inference_mode():
        scaled = latent[None] / whole.config.scaling_factor
        tiled, plain = (vae.decode(scaled, return_dict=False)[0][0] for vae in (tiling, whole))
        small = whole.decode(scaled[..., :8, :8], return_dict=False)[0][0]
    decoder = LatentDecoder(make_vae())
    as_bytes = [((each / 2 + 0.5).clamp(0, 1) * 255).round().movedim(0, -1) for each in (tiled, plain, small)]
    ours = decode(decoder, latent)
    assert ours.shape == (40, 56, 3)
    torch.testing.assert_close(ours.float(), as_bytes[0], atol=1, rtol=0)
    assert (ours.float() - as_bytes[1]).abs().max() > 0, "tiles differ a little from the whole"
    torch.testing.assert_close(decode(decoder, latent[:, :8, :8]).float(), as_bytes[2], atol=1, rtol=0)


def test_what_overflows_in_half_precision_is_decoded_in_float32() -> None:
    decoder = LatentDecoder(make_vae().half())
    exact = LatentDecoder(make_vae().half().float())
    latent = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for own in (decoder, exact):  # in half precision this is infinite
            own.vae.decoder.conv_in.weight.mul_(1e3)
            own.vae.decoder.conv_norm_out.eps = 1e-5
    poisoned = decoder.vae.decoder.conv_in.register_forward_hook(
        lambda module, _, output: output * 1e6 if output.dtype == torch.float16 else output
    )
    picture = decode(decoder, latent)
    poisoned.remove()
    assert picture.dtype == torch.uint8
    torch.testing.assert_close(picture.float(), decode(exact, latent).float(), atol=1, rtol=0)


def test_what_is_finite_in_no_precision_is_an_error_and_no_picture() -> None:
    answer = decode(LatentDecoder(make_vae()), torch.full((4, 8, 8), float("nan")))
    assert isinstance(answer, InternalError)
