"""The three sound formats of the protocol, on their way in and out: one channel, in pieces of any length.

audio/pcm    little-endian int16 at 24 kHz
audio/pcmu   G.711 mu-law at 8 kHz
audio/pcma   G.711 A-law at 8 kHz
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

import av
import numpy as np
from av.audio.codeccontext import AudioCodecContext
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from polymux.core.tasks import LISTEN_RATE, Sound
from polymux.gateway.encoding import make_frame

Format = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]

CODECS = {"audio/pcm": "pcm_s16le", "audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
RATES = {"audio/pcm": 24_000, "audio/pcmu": 8_000, "audio/pcma": 8_000}
WIDTHS = {"audio/pcm": 2, "audio/pcmu": 1, "audio/pcma": 1}
"""Bytes of one sample."""


class Ear:
    """Bytes as they come become samples for the listener. Half a sample waits for its other half."""

    def __init__(self, format: Format, rate: int | None = None) -> None:
        """`rate` of the samples where it is not the format's own."""
        self.format = format
        self.rate = rate or RATES[format]
        self._width = WIDTHS[format]
        self._half = b""
        self._codec = _open_codec(format, self.rate, "r")
        self._resampler = AudioResampler(format="flt", layout="mono", rate=LISTEN_RATE)

    def hear(self, data: bytes) -> np.ndarray:
        """The samples that are complete now: float32 at `LISTEN_RATE`."""
        data = self._half + data
        whole = len(data) // self._width * self._width
        self._half = data[whole:]
        if not whole:
            return np.empty(0, np.float32)
        frames = self._codec.decode(av.Packet(data[:whole]))
        pieces = [piece.to_ndarray()[0] for frame in frames for piece in self._resample(frame)]
        return np.concatenate([np.empty(0, np.float32), *pieces])

    def _resample(self, frame: AudioFrame) -> Iterable[AudioFrame]:
        frame.pts = None
        return self._resampler.resample(frame)


class Mouth:
    """A voice's sounds become bytes for the client."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self.rate = RATES[format]
        self._width = WIDTHS[format]
        self._codec = _open_codec(format, self.rate, "w")
        self._resampler: AudioResampler | None = None
        self._from = 0

    def say(self, sound: Sound) -> bytes:
        """What is ready of all sounds so far. Each answer of a voice ends with `finish`."""
        frame = make_frame(sound)
        if sound.rate == self.rate:
            return self._encode([frame])
        if self._resampler is None or self._from != sound.rate:
            self._resampler, self._from = AudioResampler(format="s16", layout="mono", rate=self.rate), sound.rate
        return self._encode(self._resampler.resample(frame))

    def finish(self) -> bytes:
        resampler, self._resampler = self._resampler, None
        return self._encode(resampler.resample(None)) if resampler is not None else b""

    def measure(self, data: bytes) -> float:
        """Milliseconds that the client will hear of so many bytes."""
        return len(data) / self._width * 1000 / self.rate

    def _encode(self, frames: Iterable[AudioFrame]) -> bytes:
        packets: list[Any] = []
        for frame in frames:
            frame.pts = None
            packets += self._codec.encode(frame)
        return b"".join(map(bytes, packets))


def _open_codec(format: Format, rate: int, mode: Literal["r", "w"]) -> AudioCodecContext:
    codec = cast(AudioCodecContext, av.CodecContext.create(CODECS[format], mode))
    codec.sample_rate = rate
    codec.layout = "mono"
    if mode == "w":
        codec.format = "s16"
    return codec
