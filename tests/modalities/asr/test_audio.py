"""Whatever carries sound is read, told by its content; whatever does not is the sender's mistake."""

from __future__ import annotations

import struct
import threading
import time
import tracemalloc

import numpy as np
import pytest

from polymux.core.arrival import ArrivingFile
from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.testing.media import RECIPES, Recipe, write_media, write_video, write_wav
from polymux.modalities.asr.audio import read_audio

RATE = 16_000


def sing(seconds: float = 3.0, rate: int = 24_000) -> np.ndarray:
    """Gliding tones below 3 kHz whose loudness changes: every format keeps them, and no shift of them fits but one."""
    time = np.arange(int(seconds * rate)) / rate
    glide = sum(np.sin(2 * np.pi * (base * time + 60 * time**2)) for base in (220, 520, 1310))
    return (0.2 * glide * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * time))).astype(np.float32)


def read(source: bytes | str) -> np.ndarray:
    return np.concatenate(list(read_audio(source)))


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """The correlation at the shift that fits best: encoders put some milliseconds in front."""
    size = 2 * max(len(left), len(right))
    both = np.fft.irfft(np.fft.rfft(left, size) * np.conj(np.fft.rfft(right, size)))
    return float(both.max() / (np.linalg.norm(left) * np.linalg.norm(right)))


def wav_header(channels: int, rate: int, size: int) -> bytes:
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, (rate * channels * 2) % 2**32, channels * 2, 16)
    return b"RIFF" + struct.pack("<I", (36 + size) % 2**32) + b"WAVEfmt " + form + b"data" + struct.pack("<I", size)


@pytest.mark.parametrize("name", RECIPES)
def test_every_container_and_sample_format(name):
    """reflector 87, whisper.cpp 847: u8, s24, float, mu-law, stereo, 5.1 and odd rates decoded wrongly."""
    sound = sing()
    expected = read(write_wav(sound, 24_000))
    found = read(write_media(sound, 24_000, RECIPES[name]))
    assert found.dtype == np.float32
    assert abs(len(found) - len(expected)) < RATE / 10
    assert likeness(found, expected) > 0.97
    assert 0.9 < np.linalg.norm(found) / np.linalg.norm(expected) < 1.1


def test_both_channels_are_heard():
    left, right = sing(), sing()[::-1]
    data = (np.stack([left, right], axis=1) * 32767).astype("<i2").tobytes()
    found = read(wav_header(2, 24_000, len(data)) + data)
    assert likeness(found, read(write_wav((left + right) / 2, 24_000))) > 0.99


@pytest.mark.parametrize("channels", [3, 5])
def test_channels_without_a_known_layout(channels):
    sound = sing()
    data = np.repeat((sound * 32767).astype("<i2")[:, None], channels, axis=1).tobytes()
    assert likeness(read(wav_header(channels, 24_000, len(data)) + data), read(write_wav(sound, 24_000))) > 0.95


def test_a_streamed_wav_whose_sizes_were_never_filled_in(tmp_path):
    """And half a sample at its end. From bytes and from a file alike, whatever the file is called."""
    data = (sing() * 32767).astype("<i2").tobytes()
    whole = wav_header(1, 24_000, 0xFFFFFFFF) + data + b"\x01"
    (tmp_path / "song.mp3").write_bytes(whole)
    assert np.array_equal(read(whole), read(str(tmp_path / "song.mp3")))
    assert len(read(whole)) == 3 * RATE


def test_a_damaged_stretch_costs_only_itself():
    data = bytearray(write_media(sing(8.0), 24_000, RECIPES["mp3"]))
    data[20_000:21_000] = bytes(1_000)
    assert len(read(bytes(data))) > 7.5 * RATE


SOUNDLESS = {
    "empty": b"",
    "text": b"hello, this is no sound\n" * 500,
    "zeros": bytes(1 << 16),
    "noise": np.random.default_rng(0).integers(0, 256, 1 << 18, dtype=np.uint8).tobytes(),
    "no samples": write_wav(sing(), 24_000)[:44],
    "half a header": write_wav(sing(), 24_000)[:20],
    "cut m4a": write_media(sing(), 24_000, RECIPES["m4a"])[:9_000],
    "silent video": write_video(),
    "rate 0": wav_header(1, 0, 48_000) + bytes(48_000),
    "one sample a second": wav_header(1, 1, 48_000) + bytes(48_000),
    "rate 4e9": wav_header(1, 4_000_000_000, 48_000) + bytes(48_000),
}


@pytest.mark.parametrize("data", SOUNDLESS.values(), ids=SOUNDLESS.keys())
def test_what_has_no_sound_is_refused(data):
    """speaches 171: corrupt, empty or audio-less files gave 500."""
    with pytest.raises(InvalidRequest) as caught:
        read(data)
    assert caught.value.param == "file"
    assert "polymux-" not in caught.value.message


@pytest.mark.parametrize(
    "playlist",
    [
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n%b\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile %b\n",
    ],
    ids=["hls", "concat"],
)
def test_a_playlist_opens_nothing(playlist, tmp_path):
    """A file must not make the server read another one."""
    other = tmp_path / "other.wav"
    other.write_bytes(write_wav(sing(), 24_000))
    with pytest.raises(InvalidRequest):
        read(playlist % str(other).encode())
    listed = tmp_path / "list"
    listed.write_bytes(playlist % str(other).encode())
    with pytest.raises(InvalidRequest):
        read(str(listed))


def test_memory_does_not_grow_with_length():
    """Twenty minutes of FLAC are decoded in pieces."""
    data = write_media(np.zeros(1_200 * 8_000, np.float32), 8_000, Recipe("flac", "flac", 8_000))
    tracemalloc.start()
    begin = time.monotonic()
    seconds = sum(map(len, read_audio(data))) / RATE
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds == 1_200
    assert peak < 4 << 20, f"{peak} bytes after {time.monotonic() - begin:.1f} s"


@pytest.mark.parametrize("name", RECIPES)
def test_a_file_that_arrives_says_the_same(name):
    """Also where its container cannot be read without a way back: then it is waited for."""
    data = write_media(sing(), 24_000, RECIPES[name])
    file = ArrivingFile()

    def write() -> None:
        for start in range(0, len(data), 5_000):
            file.write(data[start : start + 5_000])
        file.finish()

    writer = threading.Thread(target=write)
    writer.start()
    found, whole = np.concatenate(list(read_audio(file))), read(data)
    writer.join(30)
    file.close()
    # the padding behind an MP3's last frame is cut only where its end is known
    padding = RATE // 50 if "mp3" in name else 0
    assert 0 <= len(found) - len(whole) <= padding
    np.testing.assert_array_equal(found[: len(whole) - padding], whole[: len(whole) - padding])


def test_sound_comes_out_before_the_file_is_there():
    file = ArrivingFile()
    data = write_wav(np.tile(sing(), 40), 24_000)
    file.write(data[: len(data) // 2])
    pieces = read_audio(file)
    assert len(next(pieces))
    file.write(data[len(data) // 2 :])
    file.finish()
    assert sum(map(len, pieces)) > 0
    file.close()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("share", [0.01, 0.5])
def test_whoever_leaves_ends_the_reading_and_nothing_is_printed(name, share, capfd):
    """PyAV writes a traceback for every error that comes while it has one already."""
    data = write_media(sing(), 24_000, RECIPES[name])
    file = ArrivingFile()
    file.write(data[: int(len(data) * share)])
    leaving = threading.Timer(0.05, file.close)
    leaving.start()
    with pytest.raises(PolymuxError):
        list(read_audio(file))
    leaving.join()
    assert capfd.readouterr().err == ""
