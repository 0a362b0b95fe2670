"""A tiny Whisper with random weights, and what to ask it, for `polymux plugin check`."""

from __future__ import annotations

import wave
from io import BytesIO

import numpy as np

from polymux.core.plugins import Example
from polymux.core.tasks import Commit, Hear, Leave, Listen, Transcribe
from polymux.core.testing.hearing import write_whisper
from polymux.core.testing.media import write_speech


def read_samples(recording: bytes) -> np.ndarray:
    """A recording as float32 samples."""
    with wave.open(BytesIO(recording)) as sound:
        return np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(np.float32) / 32768


def make_examples() -> list[Example]:
    short, long = write_speech(0.8, seed=1), write_speech(2.3, seed=2)
    asks = [
        Transcribe(audio=short, language="en", seek=True),
        Transcribe(audio=long, words=True, threshold=0.0),
        Transcribe(audio=long, language="de", temperature=0.7, prompt="the end", seek=True, remembers=True),
    ]
    return [
        Example(
            pipeline="transcription",
            make=write_whisper,
            options={"dtype": "float32"},
            asks={"transcribe": asks, "translate": [Transcribe(audio=short, seek=True)], "listen": [Listen()]},
            messages={"listen": [Hear(read_samples(long)), Commit(), Leave()]},
            refused={
                "transcribe": [Transcribe(audio=b"no sound"), Transcribe(audio=short, language="klingon")],
                "translate": [Transcribe(audio=short, temperature=3.0)],
                "listen": [Listen(language="klingon")],
            },
        )
    ]
