"""Sound on its way out: samples become the bytes of a file, as a stream or whole.

    PcmEncoder     little-endian int16 at 24 kHz, nothing else
    WavEncoder     the same samples behind one header
    CodecEncoder   mp3, opus, aac, flac

An encoder that `is_slow` takes milliseconds for each second of sound: it belongs on a thread.
"""

from __future__ import annotations

import io
import math
import struct
from abc import ABC, abstractmethod
from typing import ClassVar, Literal, cast

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream

from polymux.core.tasks import Sound

RATE = 24_000
"""Of everything but WAV, which keeps the voice's own."""

UNKNOWN = 0xFFFFFFFF
"""A size in the header of a WAV file that is still being spoken."""

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class Encoder(ABC):
    """One file's encoder: the bytes of `encode` and, at last, of `finish`, one behind the other."""

    media: bytes
    is_slow: ClassVar[bool] = False

    @abstractmethod
    def encode(self, sound: Sound) -> bytes:
        """What is ready once `sound` is in; may be empty."""

    def finish(self) -> bytes:
        """What was held back."""
        return b""


class Resampler:
    """Sound at 24 kHz, however it came: as long as it was, to the sample."""

    def __init__(self) -> None:
        self._resampler: AudioResampler | None = None
        self._due = 0.0
        """Samples at 24 kHz that the sound so far lasts."""
        self._given = 0

    def feed(self, sound: Sound) -> np.ndarray:
        """int16; what is ready."""
        samples = np.frombuffer(sound.data, "<i2")
        self._due += len(samples) * RATE / sound.rate
        if sound.rate == RATE:
            self._given += len(samples)
            return samples
        if self._resampler is None:
            self._resampler = AudioResampler(format="s16", layout="mono", rate=RATE)
        return self._give(self._resampler.resample(make_frame(sound)))

    def finish(self) -> np.ndarray:
        """What was held back."""
        rest = self._give(self._resampler.resample(None)) if self._resampler is not None else np.zeros(0, "<i2")
        missing = round(self._due) - self._given
        return np.pad(rest, (0, missing)) if missing > 0 else rest

    def _give(self, frames: list[AudioFrame]) -> np.ndarray:
        """No more than is due: a filter rings on."""
        joined = np.concatenate([np.zeros(0, "<i2"), *(frame.to_ndarray()[0] for frame in frames)])
        joined = joined[: max(round(self._due) - self._given, 0)]
        self._given += len(joined)
        return joined


class PcmEncoder(Encoder):
    media = b"audio/pcm"

    def __init__(self) -> None:
        self._resampler = Resampler()

    def encode(self, sound: Sound) -> bytes:
        return self._resampler.feed(sound).tobytes()

    def finish(self) -> bytes:
        return self._resampler.finish().tobytes()


class WavEncoder(Encoder):
    """With `whole`, everything is held back and the header's sizes are exact."""

    media = b"audio/wav"

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._held = bytearray()
        self._rate = 0

    def encode(self, sound: Sound) -> bytes:
        if self._whole:
            self._rate = sound.rate
            self._held += sound.data
            return b""
        header = b"" if self._rate else write_header(sound.rate, None)
        self._rate = sound.rate
        return header + sound.data

    def finish(self) -> bytes:
        return write_header(self._rate, len(self._held)) + self._held if self._whole else b""


def write_header(rate: int, size: int | None) -> bytes:
    """The 44 bytes before `size` bytes of int16 mono; None: nobody knows yet how many."""
    riff, data = (UNKNOWN, UNKNOWN) if size is None else (size + 36, size)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI", b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", data
    )


MEDIA = {"mp3": b"audio/mpeg", "opus": b"audio/ogg", "aac": b"audio/aac", "flac": b"audio/flac"}
CONTAINERS = {"mp3": "mp3", "opus": "ogg", "aac": "adts", "flac": "flac"}
CODECS = {"mp3": "libmp3lame", "opus": "libopus", "aac": "aac", "flac": "flac"}
BITS = {"mp3": 96_000, "opus": 48_000, "aac": 96_000}
"""Bits a second."""
STREAMED = {"mp3": {"write_xing": "0", "id3v2_version": "0"}, "opus": {"page_duration": "100000"}}
"""Options of a container that nobody will come back to: no index that would stay empty, short pages."""
PRIMING = {"aac": 1}
"""Packets at the start that hold nothing but the codec's own delay, in a file that cannot say so: they are left out.
The sound's first packet then begins as if nothing had been before it, and is faded in by the codec itself."""

LEAST = {"aac": 2049}
"""Samples of the shortest file: players do not know fewer than three packets for what they are."""


class CodecEncoder(Encoder):
    """A file is as long as its sound, or longer by less than one packet (mp3 24 ms, aac 43 ms).

    With `whole`, the file's own index is complete: length, seek points, and what a player skips at the ends. Streamed,
    an mp3 still says what to skip at its start.
    """

    is_slow = True

    def __init__(self, format: Literal["mp3", "opus", "aac", "flac"], *, whole: bool) -> None:
        self.media = MEDIA[format]
        self._sink: io.BytesIO | _Pipe = io.BytesIO() if whole else _Pipe()
        options = {} if whole else STREAMED.get(format, {})
        self._container = av.open(self._sink, "w", format=CONTAINERS[format], options=options)
        self._stream = cast(AudioStream, self._container.add_stream(CODECS[format], rate=RATE))
        self._stream.codec_context.layout = "mono"
        self._stream.codec_context.thread_count = 1
        if format in BITS:
            self._stream.codec_context.bit_rate = BITS[format]
        self._unheard = PRIMING.get(format, 0)
        self._streamed_mp3 = format == "mp3" and not whole
        self._head = write_mp3_head() if self._streamed_mp3 else b""
        self._least = LEAST.get(format, 0)
        self._resampler = Resampler()
        self._samples = 0
        """At 24 kHz."""
        self._packets = 0

    def encode(self, sound: Sound) -> bytes:
        self._add(self._resampler.feed(sound))
        return self._take()

    def finish(self) -> bytes:
        self._add(self._resampler.finish())
        self._add(np.zeros(max(self._least - self._samples, 0), "<i2"))
        self._mux(None, most=self._count_needed())
        self._container.close()
        return self._sink.getvalue() if isinstance(self._sink, io.BytesIO) else self._take()

    def _add(self, samples: np.ndarray) -> None:
        if len(samples):
            frame = make_frame(Sound(samples.tobytes(), RATE))
            frame.pts = self._samples
            self._samples += len(samples)
            self._mux(frame)

    def _mux(self, frame: AudioFrame | None, most: int | None = None) -> None:
        for packet in self._stream.encode(frame):
            if self._unheard:
                self._unheard -= 1
            elif most is None or self._packets < most:
                self._packets += 1
                self._container.mux(packet)

    def _count_needed(self) -> int | None:
        """Packets that hold the sound, where the encoder may add one of silence and the file cannot say so."""
        if not self._streamed_mp3:
            return None
        return math.ceil((self._samples + MP3_DELAY + DECODER_DELAY) / MP3_PACKET)

    def _take(self) -> bytes:
        head, self._head = self._head, b""
        return head + self._sink.take() if isinstance(self._sink, _Pipe) else b""


MP3_PACKET = 576
MP3_DELAY = 576
"""Samples that libmp3lame puts before the sound; players skip them, and those of their own decoder."""
DECODER_DELAY = 529


def write_mp3_head() -> bytes:
    """A silent frame of 24 kHz mono whose LAME tag says how much a player skips at the start.

    How many frames follow, it leaves open, as nobody knows yet; of the bytes it says as many as can be, since FFmpeg
    plays a tag that says neither as if it were sound.
    """
    header = b"\xff\xf3\xa4\xc4"  # MPEG-2 layer III, no checksum, 96 kbit/s, 24 kHz, mono
    tag = (
        b"Info"
        + struct.pack(">II", 2, 0x7FFFFFFF)
        + b"Lavc"
        + bytes(17)
        + struct.pack(">I", MP3_DELAY << 12)[1:]
        + bytes(12)
    )
    frame = header + bytes(9) + tag  # nine bytes of side information: no sound
    return frame + bytes(72 * BITS["mp3"] // RATE - len(frame))


class _Pipe:
    """A file that can only be written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


def open_encoder(format: Format, *, whole: bool) -> Encoder:
    """`whole`: the file is sent when it is complete, and says how long it is."""
    if format == "pcm":
        return PcmEncoder()
    if format == "wav":
        return WavEncoder(whole=whole)
    return CodecEncoder(format, whole=whole)


def make_frame(sound: Sound) -> AudioFrame:
    frame = AudioFrame.from_ndarray(np.frombuffer(sound.data, "<i2")[None], format="s16", layout="mono")
    frame.sample_rate = sound.rate
    return frame
