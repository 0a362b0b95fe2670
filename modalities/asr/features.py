"""Log-mel spectrograms as Whisper was trained on, computed on the device in the encoder's own pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples from one frame to the next: 10 ms."""
WINDOW = 400
HIGHEST = 8000.0
"""Hertz."""
RANGE = 8.0
"""Powers of ten below a window's loudest value that are told apart."""


class LogMel(torch.nn.Module):
    """(B, samples) float32 at 16 kHz to (B, mels, samples / 160) float32."""

    filters: Tensor
    window: Tensor

    def __init__(self, mels: int) -> None:
        super().__init__()
        self.register_buffer("filters", make_filters(mels), persistent=False)
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)

    def forward(self, samples: Tensor) -> Tensor:
        spectrum = torch.stft(samples, WINDOW, HOP, window=self.window, return_complex=True)[..., :-1]
        mel = self.filters @ spectrum.abs().square()
        log = mel.clamp(min=1e-10).log10()
        log = torch.maximum(log, log.amax(dim=(1, 2), keepdim=True) - RANGE)
        return (log + 4.0) / 4.0


def make_filters(mels: int) -> Tensor:
    """Slaney's mel filter bank, area-normalised: (mels, WINDOW // 2 + 1) float32."""
    bins = torch.linspace(0.0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    points = mel_to_hertz(torch.linspace(0.0, hertz_to_mel(HIGHEST), mels + 2, dtype=torch.float64))
    widths = points.diff()
    slopes = points[:, None] - bins[None]
    rising = -slopes[:-2] / widths[:-1, None]
    falling = slopes[2:] / widths[1:, None]
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    areas = 2.0 / (points[2:] - points[:-2])
    return (triangles * areas[:, None]).to(torch.float32)


# Slaney's Auditory Toolbox: linear up to 1000 Hz (mel 15), logarithmic above.
STEP = 200.0 / 3.0
KNEE = 1000.0
GROWTH = math.log(6.4) / 27.0


def hertz_to_mel(hertz: float) -> float:
    return hertz / STEP if hertz < KNEE else KNEE / STEP + math.log(hertz / KNEE) / GROWTH


def mel_to_hertz(mel: Tensor) -> Tensor:
    knee = KNEE / STEP
    return torch.where(mel < knee, mel * STEP, KNEE * torch.exp(GROWTH * (mel - knee)))
