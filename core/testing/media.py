"""Media files made in a moment, in every container and sample format that PyAV writes, for tests of what reads them."""

from __future__ import annotations

import io
import math
import wave
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
from PIL import Image


@dataclass(frozen=True)
class Recipe:
    """How to write a sound. `picture` adds a video stream of that codec, or a cover when it is a still one."""

    container: str
    codec: str
    rate: int
    layout: str = "mono"
    picture: str | None = None


RECIPES = {
    "wav u8": Recipe("wav", "pcm_u8", 16_000),
    "wav s16 stereo": Recipe("wav", "pcm_s16le", 44_100, "stereo"),
    "wav s24": Recipe("wav", "pcm_s24le", 44_100),
    "wav s32 96 kHz": Recipe("wav", "pcm_s32le", 96_000),
    "wav float": Recipe("wav", "pcm_f32le", 48_000),
    "wav double": Recipe("wav", "pcm_f64le", 22_050),
    "wav 5.1": Recipe("wav", "pcm_s16le", 48_000, "5.1"),
    "wav 8 kHz": Recipe("wav", "pcm_s16le", 8_000),
    "wav mu-law": Recipe("wav", "pcm_mulaw", 8_000),
    "wav A-law": Recipe("wav", "pcm_alaw", 8_000),
    "aiff": Recipe("aiff", "pcm_s16be", 24_000),
    "au mu-law": Recipe("au", "pcm_mulaw", 8_000),
    "flac": Recipe("flac", "flac", 24_000),
    "mp3": Recipe("mp3", "libmp3lame", 44_100, "stereo"),
    "m4a": Recipe("mp4", "aac", 44_100),
    "aac": Recipe("adts", "aac", 24_000),
    "ogg opus": Recipe("ogg", "libopus", 48_000),
    "webm": Recipe("webm", "libopus", 48_000),
    "mp4 with pictures": Recipe("mp4", "aac", 44_100, "stereo", "mpeg4"),
    "matroska": Recipe("matroska", "pcm_s16le", 24_000, "stereo"),
    "mp3 with cover": Recipe("mp3", "libmp3lame", 44_100, "mono", "png"),
}


def write_media(samples: np.ndarray, rate: int, recipe: Recipe) -> bytes:
    """A file that holds mono float32 `samples`, resampled to what the recipe says."""
    file = io.BytesIO()
    with av.open(file, "w", format=recipe.container) as container:
        sound: Any = container.add_stream(recipe.codec, rate=recipe.rate)
        sound.layout = recipe.layout
        picture = _add_pictures(container, recipe.picture) if recipe.picture else None
        if picture is not None:
            _write_pictures(container, picture, 1 if recipe.picture == "png" else 20)
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="flt", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(
            format=sound.format.name, layout=recipe.layout, rate=recipe.rate, frame_size=sound.frame_size or 0
        )
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(sound.encode(piece))
    return file.getvalue()


def write_video(frames: int = 10) -> bytes:
    """A video without sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        _write_pictures(container, _add_pictures(container, "mpeg4"), frames)
    return file.getvalue()


def write_wav(samples: np.ndarray, rate: int) -> bytes:
    """16 bits, one channel, by the standard library."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())
    return file.getvalue()


def _add_pictures(container: av.container.OutputContainer, codec: str) -> av.VideoStream:
    stream: Any = container.add_stream(codec, rate=10)
    stream.width = stream.height = 64
    stream.pix_fmt = "rgb24" if codec == "png" else "yuv420p"
    return stream


def _write_pictures(container: av.container.OutputContainer, stream: av.VideoStream, frames: int) -> None:
    for number in range(frames):
        picture = av.VideoFrame.from_ndarray(np.full((64, 64, 3), number * 10, np.uint8))
        container.mux(stream.encode(picture))
    container.mux(stream.encode(None))


def write_speech(seconds: float = 1.0, rate: int = 16_000, seed: int = 0) -> bytes:
    """A WAV that sounds like somebody mumbling: a buzz whose pitch and loudness wander, syllable by syllable."""
    random = np.random.default_rng(seed)
    count = int(seconds * rate)
    syllables = max(1, int(seconds * 5))
    places = np.linspace(0, count, syllables + 1)
    pitch = np.interp(np.arange(count), places, random.uniform(90, 180, syllables + 1))
    loudness = np.abs(np.sin(np.pi * np.arange(count) / (rate / 5))) * 0.4
    phase = np.cumsum(pitch / rate)
    return write_wav((loudness * (2 * (phase % 1.0) - 1)).astype(np.float32), rate)


def write_picture(width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    """A PNG of a gradient with a few squares on it."""
    random = np.random.default_rng(seed)
    across, down = np.linspace(0, 255, width), np.linspace(0, 255, height)
    pixels = np.stack(np.broadcast_arrays(across[None, :], down[:, None], 128.0), -1).astype(np.uint8)
    for _ in range(3):
        x, y = random.integers(0, width), random.integers(0, height)
        pixels[y : y + height // 4, x : x + width // 4] = random.integers(0, 256, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def compare_spectra(found: np.ndarray, expected: np.ndarray, joints: Iterable[int], size: int = 32) -> float:
    """How far the spectra of two sounds are apart around their joints, in dB below the sound itself: the worst of them.
    A click is heard in all frequencies: one that is far below the sound's own spectrum is none."""
    window = np.hanning(size)
    distances = [-math.inf]
    for joint in joints:
        start = min(max(joint - size // 2, 0), len(expected) - size)
        one, two = (np.fft.rfft(sound[start : start + size] * window) for sound in (found, expected))
        apart, whole = np.linalg.norm(one - two), np.linalg.norm(two)
        distances.append(20 * math.log10(max(apart / whole, 1e-9)))
    return max(distances)
