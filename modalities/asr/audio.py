"""Any file with sound in it becomes samples, piece by piece: the container is told by its content, never by a name.

Only the first good audio stream is decoded; cover art and pictures are not looked at, tags that are broken do not
matter. Only demuxers that read nothing but the file itself are allowed: a playlist would make the server open
addresses of the sender's choice.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from polymux.core.arrival import ArrivingFile
from polymux.core.errors import InternalError, InvalidRequest

RATE = 16_000
CONTAINERS = (
    "aac,ac3,aiff,amr,amrnb,amrwb,ape,asf,au,avi,caf,eac3,flac,flv,matroska,mov,mp3,mpeg,mpegts,ogg,tta,w64,wav,wv"
)
SLOWEST, FASTEST = 1_000, 768_000
"""Samples a second. Below, a small file would become hours of samples; above, there is no such device."""
FORBEARANCE = 8
"""Packets that may be damaged beyond as many as are good, before a file counts as no sound at all."""


class Arriving:
    """What FFmpeg reads of a file that still arrives: from its beginning on, without a way back. A container whose
    index lies at its end cannot be read so."""

    def __init__(self, file: ArrivingFile) -> None:
        self._file = file
        self._place = 0
        self._gone = False

    def read(self, count: int) -> bytes:
        """Raises `InternalError` once when the sender has left: PyAV hands on the first error, and prints others."""
        if self._gone:
            return b""
        try:
            data = self._file.read(self._place, count)
        except InternalError:
            self._gone = True
            raise
        self._place += len(data)
        return data


def read_audio(source: bytes | str | ArrivingFile) -> Iterator[np.ndarray]:
    """Pieces of mono float32 at 16 kHz, from a file's bytes, its path, or one that arrives, which is waited for.

    Raises `InvalidRequest` for what is no media file, is damaged, or has no sound.
    """
    if isinstance(source, ArrivingFile):
        return _read_arriving(source)
    return _read(io.BytesIO(source) if isinstance(source, bytes) else f"file:{source}")


def _read_arriving(file: ArrivingFile) -> Iterator[np.ndarray]:
    """While it arrives, if its container can be read so; else once it is there."""
    if not file.complete:
        heard = False
        try:
            for piece in _read(Arriving(file)):
                heard = True
                yield piece
            return
        except InvalidRequest:
            if heard:
                raise
        file.wait()
    yield from _read(f"file:{file.path}")


def _read(file: io.BytesIO | Arriving | str) -> Iterator[np.ndarray]:
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    heard = False
    try:
        with av.open(file, "r", options=options, metadata_errors="ignore") as container:  # type: ignore[arg-type]
            for piece in resample(decode_frames(container, choose_stream(container))):
                heard = heard or bool(len(piece))
                yield piece
    except (av.error.FFmpegError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"the file cannot be read as audio: {explain(error)}", param="file", code="invalid_audio"
        ) from error
    if not heard:
        raise InvalidRequest("the file holds no sound: its audio is empty", param="file", code="invalid_audio")


def choose_stream(container: InputContainer) -> AudioStream:
    """The audio stream that players would pick."""
    stream = container.streams.best("audio")
    if not isinstance(stream, AudioStream):
        raise InvalidRequest("the file has no audio stream", param="file", code="invalid_audio")
    stream.codec_context.thread_count = 1  # many files are read at once, each on a thread of its own
    return stream


def decode_frames(container: InputContainer, stream: AudioStream) -> Iterator[AudioFrame]:
    """The stream's frames. A damaged packet is left out, as players do, unless most of them are."""
    good = bad = 0
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            bad += 1
            if bad > good + FORBEARANCE:
                raise
            continue
        good += 1
        for frame in frames:
            if isinstance(frame, AudioFrame):
                yield frame
    if bad > good:
        raise InvalidRequest("the file's audio is damaged", param="file", code="invalid_audio")


def resample(frames: Iterator[AudioFrame]) -> Iterator[np.ndarray]:
    """One channel at 16 kHz. Files whose rate or layout changes on the way (chained ones) are resampled anew."""
    resampler: AudioResampler | None = None
    shape: tuple[str, str, int] | None = None
    for frame in frames:
        frame.pts = None  # gaps and jumps in a file's clock are no silence
        found = (frame.format.name, frame.layout.name, frame.sample_rate)
        if resampler is None or found != shape:
            check_rate(frame.sample_rate)
            if resampler is not None:
                yield from read_samples(resampler.resample(None))
            resampler, shape = AudioResampler(format="flt", layout="mono", rate=RATE), found
        yield from read_samples(resampler.resample(frame))
    if resampler is not None:
        yield from read_samples(resampler.resample(None))


def check_rate(rate: int) -> None:
    if not SLOWEST <= rate <= FASTEST:
        raise InvalidRequest(
            f"the file's audio has {rate} samples a second; {SLOWEST} to {FASTEST} can be read",
            param="file",
            code="invalid_audio",
        )


def read_samples(frames: list[AudioFrame]) -> Iterator[np.ndarray]:
    for frame in frames:
        yield np.nan_to_num(frame.to_ndarray()[0], posinf=1.0, neginf=-1.0)


def explain(error: Exception) -> str:
    """What went wrong, without the name of our own temporary file."""
    return error.strerror if isinstance(error, av.error.FFmpegError) and error.strerror else str(error)
