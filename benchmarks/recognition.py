"""starter/transcribe beside faster-whisper with the same weights, on sentences whose words and times are known.

wer         100 sentences by hibari and four espeak-ng voices, as they are and in noise at 20, 10 and 5 dB
words       the times of words that were stitched together at known samples
throughput  eight files at once: ours together, faster-whisper's batched pipeline file by file

Both with weights in 8 bits, as the starter is served.

pip install polymux[peers]; apt install espeak-ng
python benchmarks/recognition.py wer words throughput --record
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import re
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polymux_starter
import torch
from hibari import Hibari
from ledger import record

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.service import Served, Service
from polymux.core.tasks import HeardWord, Segment, TextDelta, Transcribe
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.media import write_wav
from polymux.modalities.asr.audio import read_audio
from polymux.modalities.asr.plugin import Transcription

T = TypeVar("T")

RATE = 16_000
BEGINNINGS = [
    "The morning train was late",
    "A gardener planted seven apple trees",
    "Nobody remembered the captain's name",
    "Rain fell on the quiet harbor",
    "The teacher asked a simple question",
    "We bought fresh bread and cheese",
    "Her brother plays the violin",
    "After dinner they sat by the fire",
    "The museum opens at nine",
    "The tired travelers reached the mountain",
]
ENDINGS = [
    "so the students walked to school together.",
    "behind the old stone house.",
    "while the fishermen repaired their nets.",
    "and every hand went up at once.",
    "before the winter came.",
    "because the bridge was closed.",
    "near the river in the valley.",
    "and listened to the wind.",
    "but the door was still open.",
    "until the evening was over.",
]
SENTENCES = [f"{beginning} {ending}" for beginning in BEGINNINGS for ending in ENDINGS]
RUNS = 1
"""More where the machine is quiet: the median counts."""
VOICES = ["hibari", "en-us", "en-gb", "en-us+f3", "en-gb-scotland"]
NOISES: list[float | None] = [None, 20.0, 10.0, 5.0]
"""Decibels between speech and noise."""


def say(voice: Hibari, name: str, text: str) -> np.ndarray:
    """float32 at 16 kHz."""
    if name == "hibari":
        file = write_wav(np.concatenate(list(voice.stream(text))), 24_000)
    else:
        command = ["espeak-ng", "-v", name, "--stdout", text]
        file = subprocess.run(command, capture_output=True, check=True).stdout
    return np.concatenate(list(read_audio(file)))


def add_noise(sound: np.ndarray, decibels: float | None, seed: int) -> np.ndarray:
    if decibels is None:
        return sound
    noise = np.random.default_rng(seed).normal(0, 1, len(sound))
    power = np.square(sound[np.abs(sound) > 0.01]).mean()
    mixed = sound + noise * np.sqrt(power / 10 ** (decibels / 10))
    return (mixed / max(1.0, np.abs(mixed).max())).astype(np.float32)


def spell(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def count_errors(said: list[str], heard: list[str]) -> int:
    """Words to replace, insert and delete (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(said, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(heard, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1]


class Ours:
    """starter/transcribe in this process, as it is served: with weights in 8 bits."""

    def __init__(self) -> None:
        starter = polymux_starter.TRANSCRIBE
        self.files = resolve(starter.reference, sha256=starter.sha256)
        site = Site(settings=SiteSettings(deterministic=True))
        pipeline = Transcription()
        self._events = asyncio.new_event_loop()
        engine = LocalEngine({starter.name: pipeline.load(self.files, site, starter.options)}, site)
        self.service = Service(
            [Served(starter.name, pipeline.tasks, pipeline.front(self.files, starter.options), engine, starter.aliases)]
        )
        self.run(engine.start())
        self.run(engine.wait_ready())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._events.run_until_complete(coroutine)

    async def transcribe(self, sound: np.ndarray, **options: bool) -> tuple[str, list[HeardWord]]:
        texts, words = [], []
        ask = Transcribe(audio=write_wav(sound, RATE), language="en", **options)
        async with self.service.open("starter/transcribe", "transcribe", ask) as answers:
            async for answer in answers:
                if isinstance(answer, TextDelta):
                    texts.append(answer.text)
                elif isinstance(answer, Segment):
                    words += answer.words
        return "".join(texts), words

    async def transcribe_all(self, sounds: list[np.ndarray]) -> list[str]:
        limit = asyncio.Semaphore(8)

        async def one(sound: np.ndarray) -> str:
            async with limit:
                return (await self.transcribe(sound))[0]

        return await asyncio.gather(*map(one, sounds))


class Peer:
    """faster-whisper with the weights of our starter, converted for it."""

    def __init__(self, folder: Path, compute_type: str) -> None:
        import faster_whisper
        from ctranslate2.converters import TransformersConverter

        target = tempfile.mkdtemp(prefix="ctranslate2-")
        names = [name for name in ("tokenizer.json", "preprocessor_config.json") if (folder / name).is_file()]
        TransformersConverter(str(folder), copy_files=names).convert(target, force=True)
        self.model = faster_whisper.WhisperModel(
            target, device="cpu", compute_type=compute_type, cpu_threads=torch.get_num_threads()
        )
        self.batched = faster_whisper.BatchedInferencePipeline(self.model)
        self.name = f"faster-whisper {faster_whisper.__version__}, the same weights, {compute_type}"

    def transcribe(self, sound: np.ndarray) -> str:
        segments, _ = self.model.transcribe(
            sound, language="en", beam_size=1, vad_filter=True, condition_on_previous_text=False
        )
        return "".join(segment.text for segment in segments)

    def transcribe_batched(self, sound: np.ndarray) -> str:
        segments, _ = self.batched.transcribe(sound, language="en", beam_size=1, batch_size=8, without_timestamps=False)
        return "".join(segment.text for segment in segments)


def speak_all(voice: Hibari) -> Iterator[tuple[float | None, str, np.ndarray]]:
    for number, sentence in enumerate(SENTENCES):
        # each voice says a fifth of them; beginnings and endings, voices and noises meet in all combinations
        name = VOICES[(number + number // 10) % len(VOICES)]
        noise = NOISES[(number // len(VOICES)) % len(NOISES)]
        yield noise, sentence, add_noise(say(voice, name, sentence), noise, number)


def measure_wer(voice: Hibari) -> list[tuple[str, float, float, str]]:
    """Ours and the peer's share of wrong words, by noise."""
    clips = list(speak_all(voice))
    ours = Ours()
    heard = ours.run(ours.transcribe_all([sound for _, _, sound in clips]))
    peer = Peer(ours.files.folder, "int8")
    theirs = [peer.transcribe(sound) for _, _, sound in clips]
    results = []
    for wanted in [*NOISES, "all"]:
        counts = np.zeros(3)
        for (noise, sentence, _), mine, other in zip(clips, heard, theirs):
            if wanted in ("all", noise):
                said = spell(sentence)
                counts += (len(said), count_errors(said, spell(mine)), count_errors(said, spell(other)))
        name = {None: "no noise", "all": "all"}.get(wanted, f"noise at {wanted} dB")
        results.append((f"wrong words, {name}", 100 * counts[1] / counts[0], 100 * counts[2] / counts[0], peer.name))
    return results


def measure_words(voice: Hibari) -> float:
    """Mean absolute error in ms of where words begin and end."""
    ours = Ours()
    errors = []
    for sentence in SENTENCES[:: len(ENDINGS) + 1]:
        pieces, known, place = [np.zeros(RATE // 4, np.float32)], [], RATE // 4
        for word in sentence.rstrip(".").split():
            sound = say(voice, "hibari", word)
            loud = np.flatnonzero(np.abs(sound) > 0.02)
            sound = sound[loud[0] : loud[-1] + 1]
            known.append((spell(word)[0], place / RATE, (place + len(sound)) / RATE))
            pieces += [sound, np.zeros(RATE // 10, np.float32)]
            place += len(sound) + RATE // 10
        _, words = ours.run(ours.transcribe(np.concatenate(pieces), words=True))
        found = [("".join(spell(word.text)), word.start, word.end) for word in words]
        matcher = difflib.SequenceMatcher(None, [word for word, *_ in known], [word for word, *_ in found], False)
        for match in matcher.get_matching_blocks():
            for offset in range(match.size):
                said, heard = known[match.a + offset], found[match.b + offset]
                errors += [abs(said[1] - heard[1]), abs(said[2] - heard[2])]
    print(f"{len(errors) // 2} words were found")
    return 1000 * float(np.mean(errors))


def measure_throughput(voice: Hibari) -> tuple[float, float, str]:
    """Seconds of audio per second: ours and the peer's."""
    files = []
    for number in range(8):
        said = [
            say(voice, VOICES[(number + k) % len(VOICES)], SENTENCES[(13 * number + 7 * k) % 100]) for k in range(12)
        ]
        files.append(np.concatenate(said))
    seconds = sum(map(len, files)) / RATE
    ours = Ours()
    peer = Peer(ours.files.folder, "int8")
    ours.run(ours.transcribe_all(files[:1]))
    peer.transcribe_batched(files[0])
    mine, theirs = [], []
    for _ in range(RUNS):
        start = time.perf_counter()
        ours.run(ours.transcribe_all(files))
        mine.append(seconds / (time.perf_counter() - start))
        start = time.perf_counter()
        for file in files:
            peer.transcribe_batched(file)
        theirs.append(seconds / (time.perf_counter() - start))
    return float(np.median(mine)), float(np.median(theirs)), f"{peer.name}, its batched pipeline"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["wer", "words", "throughput"])
    parser.add_argument("--record", action="store_true", help="append the figures to the ledger")
    args = parser.parse_args()
    voice = Hibari()
    figures: list[tuple[str, float, str, str | None, float | None]] = []
    if "wer" in args.parts:
        figures += [(name, mine, "%", peer, theirs) for name, mine, theirs, peer in measure_wer(voice)]
    if "words" in args.parts:
        figures.append(("word times, mean absolute error", measure_words(voice), "ms", None, None))
    if "throughput" in args.parts:
        mine, theirs, peer = measure_throughput(voice)
        figures.append(("8 files at once, int8", mine, "x real time", peer, theirs))
    for name, value, unit, peer, peer_value in figures:
        print(f"{name}: {value:.2f} {unit}" + ("" if peer is None else f" ({peer}: {peer_value:.2f})"), flush=True)
        if args.record:
            record("recognition", name, value, unit, peer=peer, peer_value=peer_value)


if __name__ == "__main__":
    main()
