"""Trains a VAE of diffusers on drawn pictures or clips, and fits the scale of its latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pace import Pace
from recording import Recorded, set_rate
from torch import Tensor

RATE = 1.5e-3
SPREAD_WEIGHT = 1e-4
"""Of the divergence from a standard normal: latents stay smooth, which flows need more than sharp edges."""
OUTSTANDING = 8.0
"""Weight of a pixel as far from its picture's mean as colours go."""
STATISTICS = 16
"""Batches that the latents' scale is fitted to."""


def train_autoencoder(
    vae: Any, draw: Callable[[int, float], Tensor], *, batch: int, pace: Pace, recorded: bool = True
) -> float:
    """`draw(batch, done)`: (batch, 3, [frames,] side, side) from 0 to 1, on the VAE's device; `done` of the run, of 1.

    Leaves the VAE in eval mode; returns the last losses' mean. `recorded`: as in `train_flow`.
    """
    vae.train().requires_grad_(True)
    device = vae.device
    fused = device.type == "cuda"
    recorded = recorded and fused
    rate = torch.tensor(RATE, device=device) if recorded else RATE
    optimizer = torch.optim.AdamW(
        vae.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4, fused=fused, capturable=recorded
    )

    def learn(clips: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            spread = vae.encode(clips).latent_dist
            made = decode_freely(vae, spread.sample())
        made = made.float()
        apart = (weigh(clips) * ((made - clips).abs() + 2 * (made - clips).square())).mean()
        loss = apart + SPREAD_WEIGHT * spread.kl().float().mean() / spread.mean[0].numel()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        return apart.detach()

    take = Recorded(learn) if recorded else learn
    running = torch.zeros((), device=device)
    while True:
        set_rate(optimizer, RATE * pace.rate)
        apart = take(draw(batch, pace.done) * 2 - 1)
        running.lerp_(apart, 0.05 if pace.step else 1.0)
        going = pace.advance()
        pace.tell(loss=lambda: float(running))
        if not going:
            break
    vae.eval().requires_grad_(False)
    return float(running)


def weigh(clips: Tensor) -> Tensor:
    """(batch, 1, ...): more for pixels unlike their picture's mean, since nine of ten show nothing but the ground."""
    places = tuple(range(2, clips.dim()))
    return 1 + OUTSTANDING * (clips - clips.mean(places, keepdim=True)).abs().mean(1, keepdim=True)


def decode_freely(vae: Any, latents: Tensor) -> Tensor:
    """What the decoder makes before it is cut to what a picture can hold: a cut lets no gradient through."""
    pieces: list[Tensor] = []
    hook = vae.decoder.register_forward_hook(lambda module, given, made: pieces.append(made))
    try:
        vae.decode(latents)
    finally:
        hook.remove()
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)  # Wan's makes one latent frame after another


@torch.no_grad()
def encode(vae: Any, clips: Tensor) -> Tensor:
    """The latents' means, (batch, channels, ...), in the VAE's own scale."""
    with torch.autocast(clips.device.type, torch.bfloat16, enabled=clips.device.type == "cuda"):
        return vae.encode(clips * 2 - 1).latent_dist.mean.float()


def fit_scale(vae: Any, draw: Callable[[int], Tensor], batch: int) -> None:
    """Writes into the VAE's configuration what makes its latents standard: as a whole, or by channel (Wan's)."""
    latents = torch.cat([encode(vae, draw(batch)) for _ in range(STATISTICS)])
    if "z_dim" in vae.config:
        rest = [0, *range(2, latents.dim())]
        mean, deviation = latents.mean(rest), latents.std(rest)
        vae.register_to_config(latents_mean=mean.tolist(), latents_std=deviation.tolist())
    else:
        even_out(vae, latents.std((0, 2, 3)))
        latents = latents / latents.std((0, 2, 3), keepdim=True)
        vae.register_to_config(shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std()))


@torch.no_grad()
def even_out(vae: Any, deviation: Tensor) -> None:
    """Divides each channel of an AutoencoderKL's latents by its own deviation, (channels,), inside of its weights: its
    configuration has one factor for all, and a flow would hardly learn the quiet ones. Pictures stay the same."""
    out, channels = vae.encoder.conv_out, len(deviation)
    out.weight[:channels] /= deviation[:, None, None, None]
    out.bias[:channels] /= deviation
    out.bias[channels:] -= 2 * deviation.log()
    vae.decoder.conv_in.weight *= deviation[:, None, None]


def scale(vae: Any, latents: Tensor) -> Tensor:
    """From the VAE's scale to the standard one, which the flow sees."""
    if "z_dim" not in vae.config:
        return (latents - vae.config.shift_factor) * vae.config.scaling_factor
    return (latents - spread(vae.config.latents_mean, latents)) / spread(vae.config.latents_std, latents)


def unscale(vae: Any, latents: Tensor) -> Tensor:
    """The inverse of `scale`."""
    if "z_dim" not in vae.config:
        return latents / vae.config.scaling_factor + vae.config.shift_factor
    return latents * spread(vae.config.latents_std, latents) + spread(vae.config.latents_mean, latents)


def spread(values: list[float], latents: Tensor) -> Tensor:
    """Per channel of (batch, channels, ...)."""
    return torch.tensor(values, device=latents.device).view(1, -1, *[1] * (latents.dim() - 2))
