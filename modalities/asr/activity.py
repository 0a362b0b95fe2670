"""Where somebody speaks: Silero's detector, for many recordings and sockets in one pass.

A `Listener` follows one recording: it is given samples as they come and tells how likely each 32 ms hold speech. What
the detector remembers between two passes (the end of the last frame, and its recurrent state) stays with the listener
on the host, so rows of any listeners share a batch and none needs a place on the device.
"""

from __future__ import annotations

import importlib.util
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.compute.device import send
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import ModelError
from polymux.modalities.asr.utterances import FRAME

CONTEXT = 64
"""Samples before a frame that are seen with it."""
WIDTH = 128
WEIGHTS = "data/silero_vad.jit"
"""The package's default detector; the safetensors file beside it holds other weights."""
NAMES = {
    "stft.forward_basis_buffer": "stft_conv.weight",
    "decoder.rnn.": "lstm.",
    "decoder.decoder.2.": "final_conv.",
    **{f"encoder.{index}.reparam_conv.": f"conv{index + 1}." for index in range(4)},
}
"""How weights are called there, and here."""


@dataclass(frozen=True)
class Passage:
    """Whole frames of one recording: `samples` (CONTEXT + n * FRAME,) float32, of which the first are those before
    the frames, and the detector's `state` (2, WIDTH) after them."""

    samples: np.ndarray
    state: np.ndarray

    @property
    def frames(self) -> int:
        return len(self.samples) // FRAME


class Network(nn.Module):
    """Silero's sixth detector at 16 kHz."""

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, WIDTH, 3, padding=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.final_conv = nn.Conv1d(WIDTH, 1, 1)

    def encode(self, frames: Tensor) -> Tensor:
        """(N, CONTEXT + FRAME) to (N, WIDTH)."""
        frames = nn.functional.pad(frames, (0, CONTEXT), mode="reflect")
        real, imaginary = self.stft_conv(frames[:, None]).split(129, dim=1)
        hidden = (real.square() + imaginary.square()).sqrt()
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            hidden = layer(hidden).relu()
        return hidden[..., 0]

    def judge(self, hidden: Tensor) -> Tensor:
        """(N, WIDTH) to (N,): how likely each frame holds speech."""
        return self.final_conv(hidden.relu()[..., None])[:, 0, 0].sigmoid()


class SpeechDetector(OneShotModel):
    """`Passage`s in; for each one tensor out: a probability per frame, and the state, flat, behind them."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.network = network.eval().requires_grad_(False).to(device)
        self._device = device

    @classmethod
    def load(cls, device: torch.device) -> SpeechDetector:
        """With the weights in the package silero-vad, which is not imported: it would bring an audio stack with it.

        Raises `ModelError` when they are missing.
        """
        found = importlib.util.find_spec("silero_vad")
        places = list(found.submodule_search_locations or ()) if found is not None else []
        if not places or not (path := Path(places[0], WEIGHTS)).is_file():
            raise ModelError("the package silero-vad is missing or has no weights: install silero-vad>=6.2")
        network = Network()
        network.load_state_dict(read_weights(path))
        return cls(network, device)

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Tensor]:
        counts = [item.frames for item in items]
        frames = send(lay_frames(items, counts), self._device)
        states = send(np.stack([item.state for item in items], axis=1), self._device)
        heard, after = self._remember(self.network.encode(frames), states, counts)
        # one tensor, of which each item has a piece: what is done item by item costs more than the pass
        sizes = [count + states[:, 0].numel() for count in counts]
        judged = np.repeat(states[:, 0].numel() * np.arange(len(items)), counts) + np.arange(sum(counts))
        flat = heard.new_empty(sum(sizes))
        flat[send(judged, self._device)] = self.network.judge(heard)
        kept = np.cumsum(sizes)[:, None] - states[:, 0].numel() + np.arange(states[:, 0].numel())
        flat[send(kept, self._device)] = after
        return list(flat.split(sizes))

    def _remember(self, hidden: Tensor, states: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """(frames, WIDTH) of all items, end to end, through the recurrent layer from `states` (2, items, WIDTH): the
        same again, and each item's state after it, flat."""
        begins = (states[:1], states[1:])
        if min(counts) == max(counts):
            outputs, (last, cell) = self.network.lstm(hidden.unflatten(0, (len(counts), -1)), begins)
            return outputs.flatten(0, 1), torch.cat([last[0], cell[0]], dim=1)
        longest = max(counts)
        starts = np.cumsum(counts) - counts
        places = np.arange(sum(counts)) + np.repeat(longest * np.arange(len(counts)) - starts, counts)
        there = send(places, self._device)
        padded = hidden.new_zeros(len(counts) * longest, WIDTH).index_copy(0, there, hidden)
        padded = padded.unflatten(0, (len(counts), longest))
        packed = pack_padded_sequence(padded, torch.tensor(counts), batch_first=True, enforce_sorted=False)
        outputs, (last, cell) = self.network.lstm(packed, begins)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True)
        return outputs.flatten(0, 1)[there], torch.cat([last[0], cell[0]], dim=1)


def lay_frames(items: list[Passage], counts: list[int]) -> np.ndarray:
    """(frames, CONTEXT + FRAME) float32: each frame with the samples before it, of all passages, in order."""
    frames = np.empty((sum(counts), CONTEXT + FRAME), np.float32)
    end = 0
    for item, count in zip(items, counts):
        start, end = end, end + count
        frames[start:end, :CONTEXT] = item.samples[:-CONTEXT].reshape(count, FRAME)[:, :CONTEXT]
        frames[start:end, CONTEXT:] = item.samples[CONTEXT:].reshape(count, FRAME)
    return frames


def read_weights(path: Path) -> dict[str, Tensor]:
    """Those of the 16 kHz half of the package's scripted model, by our names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have such files exported anew
        scripted = torch.jit.load(path, map_location="cpu")
    weights = {}
    for name, value in scripted._model.state_dict().items():
        known = next(known for known in NAMES if name.startswith(known))
        weights[name.replace(known, NAMES[known]) + ("_l0" if known == "decoder.rnn." else "")] = value
    return weights


class Listener:
    """One recording, or one socket, from its first sample on. Samples may come in pieces of any length."""

    def __init__(self, stage: OneShotStage) -> None:
        """`stage` is one that `open_activity` made."""
        self.position = 0
        """Samples that are judged already: a whole number of frames."""
        self._stage = stage
        self._held = np.empty(0, np.float32)
        self._context = np.zeros(CONTEXT, np.float32)
        self._state = np.zeros((2, WIDTH), np.float32)

    async def hear(self, job: Job, samples: np.ndarray, *, last: bool = False) -> np.ndarray:
        """The probabilities of speech, (frames,) float32, of the frames that are complete now, in order.

        With `last` what is left counts as a frame, filled up with silence. One call at a time.
        """
        held, length = self._held, len(self._held) + len(samples)
        frames = -(-length // FRAME) if last else length // FRAME
        if not frames:
            self._held = np.concatenate([held, samples])
            return np.empty(0, np.float32)
        # one copy, with silence behind the last sample: recordings are large
        joined = np.zeros(CONTEXT + frames * FRAME, np.float32)
        joined[:CONTEXT] = self._context
        place = CONTEXT + len(held)
        joined[CONTEXT:place] = held
        taken = min(len(samples), len(joined) - place)
        joined[place : place + taken] = samples[:taken]
        self._held = samples[taken:].copy()
        passage = Passage(joined, self._state)
        row = await job.start(self._stage, OneShotRow(job, passage, frames))
        result = row.result.numpy()
        self._context = joined[-CONTEXT:].copy()
        self._state = result[frames:].reshape(2, WIDTH)
        self.position += frames * FRAME
        return result[:frames]


def open_activity(model: OneShotModel, site: Site) -> OneShotStage:
    """The stage that all listeners of a program share."""
    frames = 2_048 if site.device.torch.type == "cpu" else 1 << 16
    return OneShotStage("activity", model, site, max_units=frames, to_host=True)
