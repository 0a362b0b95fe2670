"""SNAC (Siuzdak et al. 2024), the codec of Orpheus: a few codebooks, each at twice the rate of the one before.

Its network is the package `snac`'s (an extra, since transformers has none). A frame is what one code of the slowest
codebook lasts; its codes stand in the order of a walk through the tree of codes, each before the two it is refined by.
The published decoders add noise: here it depends on the place in the sound alone, so that windows are the whole.
"""

from __future__ import annotations

import itertools
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from polymux.core.compute.device import send
from polymux.core.compute.sampling import draw_uniform
from polymux.core.errors import ModelError
from polymux.modalities.tts.codecs import Codec, CodeWindow
from polymux.modalities.tts.field import find_halo, read_stack


class SteadyNoise(nn.Module):
    """Takes the place of a `NoiseBlock`: x + noise * linear(x), the noise a function of the place in the sound."""

    def __init__(self, linear: nn.Module, number: int, step: int) -> None:
        """`number` tells layers apart; `step`: positions of this layer for one frame."""
        super().__init__()
        self.linear = linear
        self.begins = torch.zeros(1, dtype=torch.int64)
        """(B,) the number of each window's first frame."""
        self._number = number
        self._step = step

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, T)."""
        places = self.begins[:, None] * self._step + torch.arange(x.shape[-1], device=x.device)
        return x + draw_normal(self._number, places)[:, None].to(x.dtype) * self.linear(x)


def draw_normal(seed: int, places: Tensor) -> Tensor:
    """Standard normal numbers, float32, each a function of the seed and its place (Box and Muller 1958)."""
    seeds = torch.full_like(places, seed)
    radius = (-2 * torch.log1p(-draw_uniform(seeds, 2 * places))).sqrt()
    return radius * torch.cos(2 * math.pi * draw_uniform(seeds, 2 * places + 1))


class SnacCodec(Codec):
    """Convolutions that look both ways: windows of one length share a pass."""

    def __init__(self, model: Any) -> None:
        """`model`: a `snac.SNAC`; only what decodes is kept. Raises `ModelError` for one with attention."""
        if model.attn_window_size is not None:
            raise ModelError("a SNAC with local attention (those of 32 and 44 kHz) cannot be cut into windows")
        strides: list[int] = list(model.vq_strides)
        if any(one != 2 * two for one, two in itertools.pairwise(strides)) or strides[-1] != 1:
            raise ModelError(f"a SNAC whose codebooks have strides {strides} is not supported")
        self.quantizer: Any = model.quantizer
        self.decoder: Any = model.decoder
        self.rate = model.sampling_rate
        self.lanes = order_lanes(len(strides))
        codes = 2 ** len(strides) - 1
        self.codebooks = range(codes, codes + 1)
        self.size = model.codebook_size
        self.stride = strides[0]
        """Latent positions of one frame."""
        step = int(model.hop_length)
        self.hop = self.stride * step
        before, after = find_halo(list(read_stack(self.decoder)), step)
        self.left, self.right = -(-before // self.stride), -(-after // self.stride)
        self._noises = list(steady_noise(self.decoder, self.stride))
        self._device = next(self.decoder.parameters()).device

    def compatible(self, first: CodeWindow, item: CodeWindow) -> bool:
        return len(first.codes) == len(item.codes)

    def forward(self, items: list[CodeWindow], slabs: list[Tensor]) -> list[Tensor]:
        frames = send(np.stack([item.codes for item in items]), self._device)
        begins = torch.tensor([item.begin for item in items], device=self._device)
        for noise in self._noises:
            noise.begins = begins
        states = self.quantizer.from_codes([frames[:, :, lanes].flatten(1) for lanes in self.lanes])
        sounds = self.decoder(states)[:, 0].float()
        return [
            sound[item.first * self.hop : (item.first + item.count) * self.hop] for sound, item in zip(sounds, items)
        ]


def order_lanes(levels: int) -> list[list[int]]:
    """For each codebook, the places of its codes in a frame: [0], [1, 4], [2, 3, 5, 6] for three."""
    lanes: list[list[int]] = [[] for _ in range(levels)]
    place = 0

    def walk(level: int) -> None:
        nonlocal place
        lanes[level].append(place)
        place += 1
        if level + 1 < levels:
            walk(level + 1)
            walk(level + 1)

    walk(0)
    return lanes


def steady_noise(decoder: Any, step: int) -> list[SteadyNoise]:
    """Replace every noise block of the decoder."""
    found = []
    for block in decoder.model:
        layers = getattr(block, "block", None)
        for place, layer in enumerate(layers if isinstance(layers, nn.Sequential) else ()):
            if isinstance(layer, nn.ConvTranspose1d):
                step *= layer.stride[0]
            if type(layer).__name__ == "NoiseBlock":
                layers[place] = SteadyNoise(layer.linear, len(found), step)
                found.append(layers[place])
    return found


def is_snac(config: dict[str, Any] | None) -> bool:
    return bool(config) and "vq_strides" in config


def load_snac(folder: Path, device: torch.device) -> SnacCodec:
    """From config.json and model.safetensors. Raises `ModelError`."""
    if find_spec("snac") is None:
        raise ModelError("this model speaks through SNAC, which needs a package: pip install 'polymux[snac]'")
    from snac import SNAC

    model = SNAC(**json.loads((folder / "config.json").read_text()))
    weights = folder / "model.safetensors"
    if not weights.exists():
        raise ModelError(
            f"{weights} is missing; published SNAC weights are pickled (pytorch_model.bin), and unpickling runs code: "
            "save them as safetensors once, where you trust them"
        )
    model.load_state_dict(load_file(weights))
    return make_snac(model.to(device))


def make_snac(model: Any) -> SnacCodec:
    """The codec of a `snac.SNAC`, which belongs to it from now on."""
    return SnacCodec(model.eval().requires_grad_(False))
