"""Every format holds the sound that went in, whatever the pieces were: length, pitch and place, streamed or whole."""

from __future__ import annotations

import io
import wave
from random import Random

import av
import numpy as np
import pytest

from polymux.core.tasks import Sound
from polymux.gateway.encoding import RATE, open_encoder

FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
PACKET = {"mp3": 576, "aac": 1024}
"""Samples of one packet at 24 kHz."""


def make_tone(seconds: float, rate: int = RATE, pitch: float = 440.0) -> np.ndarray:
    return (np.sin(np.arange(int(seconds * rate)) * 2 * np.pi * pitch / rate) * 12000).astype("<i2")


def encode(format: str, samples: np.ndarray, *, whole: bool = False, rate: int = RATE, seed: int = 0) -> bytes:
    """In pieces of random lengths."""
    encoder = open_encoder(format, whole=whole)  # type: ignore[arg-type]
    random, data, start = Random(seed), b"", 0
    while start < len(samples):
        count = random.randrange(1, 9000)
        data += encoder.encode(Sound(samples[start : start + count].tobytes(), rate))
        start += count
    return data + encoder.finish()


def decode(format: str, data: bytes) -> np.ndarray:
    """Samples at 24 kHz from -1 to 1, as a player gets them."""
    if format == "pcm":
        return np.frombuffer(data, "<i2") / 32768
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    parts = []
    with av.open(io.BytesIO(data)) as container:
        for frame in [*container.decode(audio=0), None]:
            parts += [piece.to_ndarray()[0] for piece in resampler.resample(frame)]
    return np.concatenate(parts)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seconds", [0.01, 0.4, 3.0])
def test_length_and_pitch(format: str, seconds: float, whole: bool) -> None:
    samples = make_tone(seconds)
    found = decode(format, encode(format, samples, whole=whole))
    shortest = max(len(samples), 2049 if format == "aac" else 0)  # players take fewer than three packets for nothing
    exact = whole and format != "aac"
    assert 0 <= len(found) - shortest < (1 if exact else PACKET.get(format, 1))
    if seconds > 0.1:
        spectrum = np.abs(np.fft.rfft(found * np.hanning(len(found))))
        assert np.argmax(spectrum) * RATE / len(found) == pytest.approx(440, abs=5)


@pytest.mark.parametrize("format", FORMATS)
def test_pieces_leave_no_trace(format: str) -> None:
    """However the sound is cut, the sound is the same: no click, no gap, nothing lost at the end."""
    samples = make_tone(2.0)
    one, two = (decode(format, encode(format, samples, seed=seed)) for seed in (1, 2))
    assert np.array_equal(one, two)
    steady = slice(2000, 2 * RATE - 2000)
    assert np.abs(one[steady] - (samples / 32768)[steady]).max() < 0.02


@pytest.mark.parametrize("format", ["mp3", "opus", "aac", "flac"])
def test_sound_comes_out_while_more_goes_in(format: str) -> None:
    encoder = open_encoder(format, whole=False)  # type: ignore[arg-type]
    samples = make_tone(1.0).tobytes()
    sizes = [len(encoder.encode(Sound(samples, RATE))) for _ in range(4)]
    assert all(sizes), sizes


def test_wav_has_one_header() -> None:
    samples = make_tone(1.0)
    streamed, whole = encode("wav", samples), encode("wav", samples, whole=True)
    assert streamed[44:] == whole[44:] == samples.tobytes()
    assert streamed[4:8] == streamed[40:44] == b"\xff\xff\xff\xff"
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, RATE, 1, 2)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100])
def test_voices_of_other_rates(format: str, rate: int) -> None:
    """All formats but WAV are 24 kHz, and as long as at the voice's own rate, to one sample or one packet."""
    samples = make_tone(1.23, rate)
    data = encode(format, samples, rate=rate)
    if format == "wav":
        assert data[44:] == samples.tobytes()
    found = decode(format, data)
    room = PACKET.get(format, 1) + (32 if format == "wav" else 0)  # a player's own filter
    assert -room < len(found) - round(len(samples) * RATE / rate) < room
    spectrum = np.abs(np.fft.rfft(found))
    assert np.argmax(spectrum) * RATE / len(found) == pytest.approx(440, abs=5)


@pytest.mark.parametrize("format", ["flac", "mp3"])
def test_a_whole_file_says_how_long_it_is(format: str) -> None:
    with av.open(io.BytesIO(encode(format, make_tone(3.0), whole=True))) as container:
        assert container.duration / 1e6 == pytest.approx(3.0, abs=0.001)


@pytest.mark.parametrize("format", FORMATS)
def test_joints_do_not_click(format: str) -> None:
    """Pieces of a low tone: whatever a joint adds would be heard far above it."""
    samples = make_tone(2.0, pitch=200.0)
    found = decode(format, encode(format, samples, seed=4))[2400 : 2 * RATE - 2400]
    power = np.abs(np.fft.rfft(found * np.hanning(len(found)))) ** 2
    high = power[int(3000 * len(found) / RATE) :].sum() / power.sum()
    assert high < 1e-5
