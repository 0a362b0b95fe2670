"""Recordings as 16 kHz samples, cut where it is quiet."""

from __future__ import annotations

import io
from collections.abc import Iterator

import av
import numpy as np

from polymux.core.errors import InvalidRequest
from polymux_ctc.work import RATE

LONGEST = 20 * RATE
"""Samples of one stretch: what such models were trained on."""
SEARCH = 4 * RATE
"""Where in its end the quietest moment is looked for."""
MOMENT = RATE // 20


def read_stretches(audio: bytes | str) -> Iterator[np.ndarray]:
    """The recording in stretches of at most 20 s, float32. Raises `InvalidRequest` for what holds no sound."""
    waiting = np.zeros(0, np.float32)
    for samples in read_samples(audio):
        waiting = np.concatenate([waiting, samples])
        while len(waiting) > LONGEST:
            cut = find_cut(waiting[:LONGEST])
            yield waiting[:cut]
            waiting = waiting[cut:]
    if len(waiting):
        yield waiting


def find_cut(samples: np.ndarray) -> int:
    """The middle of the quietest moment near the end."""
    tail = samples[-SEARCH:]
    moments = tail[: len(tail) // MOMENT * MOMENT].reshape(-1, MOMENT)
    quietest = int(np.square(moments).mean(1).argmin())
    return len(samples) - len(tail) + quietest * MOMENT + MOMENT // 2


def read_samples(audio: bytes | str) -> Iterator[np.ndarray]:
    try:
        with av.open(io.BytesIO(audio) if isinstance(audio, bytes) else audio) as container:
            if not container.streams.audio:
                raise InvalidRequest("the file holds no sound", param="file")
            resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            for frame in container.decode(audio=0):
                for piece in resampler.resample(frame):
                    yield piece.to_ndarray().reshape(-1)
            for piece in resampler.resample(None):
                yield piece.to_ndarray().reshape(-1)
    except (av.FFmpegError, ValueError, OSError) as error:
        raise InvalidRequest(f"the file cannot be read as sound: {error}", param="file") from None
