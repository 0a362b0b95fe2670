"""From bytes to what an encoder was trained on, on the device: (x * factor - mean) / deviation, per channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymux.core.compute.device import Device


class PixelScale:
    """`config` is a preprocessor_config.json; what it does not say is left as it is."""

    def __init__(self, config: Mapping[str, Any], device: Device, dtype: torch.dtype) -> None:
        factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
        normalised = config.get("do_normalize", True)
        mean = torch.tensor(config.get("image_mean", (0.0,)) if normalised else (0.0,), dtype=torch.float64)
        deviation = torch.tensor(config.get("image_std", (1.0,)) if normalised else (1.0,), dtype=torch.float64)
        self._device = device
        self._dtype = dtype
        self._scale = (factor / deviation).to(device.torch, torch.float32)
        self._shift = (-mean / deviation).to(device.torch, torch.float32)

    def apply(self, pixels: np.ndarray) -> Tensor:
        """(frames, height, width, 3) uint8 on the host to the same on the device, in the encoder's dtype."""
        sent = self._device.send(np.ascontiguousarray(pixels))
        return torch.addcmul(self._shift, sent.float(), self._scale).to(self._dtype)
