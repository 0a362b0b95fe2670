"""What a caller asks is checked against the model; files are read beside the event loop, piece by piece."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import numpy as np
import pytest

from polymux.core.errors import InvalidRequest
from polymux.core.preparers import Preparers
from polymux.core.tasks import Transcribe
from polymux.core.testing.media import RECIPES, write_media, write_wav
from polymux.core.testing.tokenizers import byte_level
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.front import TranscribeFront, gather_chunks
from polymux.modalities.asr.tokens import SpeechTokens

SOUND = write_wav(np.random.default_rng(0).normal(0, 0.1, 16_000), 16_000)
CONTEXT = 40
MANY = SpeechTokens(900, 901, 902, 903, 909, 904, 905, {"en": 906, "de": 907})
ENGLISH = SpeechTokens(900, 901, 902, 903, 909, 904, 905, {})


def open_front(tokens: SpeechTokens = MANY) -> TranscribeFront:
    return TranscribeFront(Tokenizer(byte_level()), tokens, CONTEXT)


@pytest.mark.parametrize("language", ["de", "DE", " german ", "German"])
def test_a_language_by_code_or_name(language):
    work = open_front().prepare("transcribe", Transcribe(audio=SOUND, language=language)).work
    assert work.language == "de"


@pytest.mark.parametrize(
    ("task", "ask", "tokens", "param"),
    [
        ("transcribe", {"language": "klingon"}, MANY, "language"),
        ("transcribe", {"language": "fr"}, MANY, "language"),
        ("transcribe", {"language": ""}, MANY, "language"),
        ("transcribe", {"language": "de"}, ENGLISH, "language"),
        ("translate", {}, ENGLISH, "model"),
        ("transcribe", {"temperature": float("nan")}, MANY, "temperature"),
        ("transcribe", {"temperature": -0.1}, MANY, "temperature"),
        ("transcribe", {"threshold": 1.1}, MANY, "threshold"),
        ("transcribe", {"silence": float("inf")}, MANY, "silence"),
        ("transcribe", {"best_of": 1_000}, MANY, "best_of"),
        ("transcribe", {"audio": b"no sound"}, MANY, "file"),
        ("transcribe", {"audio": "/nowhere/at/all.wav"}, MANY, "file"),
    ],
)
def test_what_the_model_cannot_do_is_refused(task, ask, tokens, param):
    with pytest.raises(InvalidRequest) as caught:
        open_front(tokens).prepare(task, Transcribe(**{"audio": SOUND, **ask}))
    assert caught.value.param == param
    assert "nowhere" not in caught.value.message


def test_a_long_prompt_keeps_its_end_and_leaves_room_for_the_answer():
    front = open_front()
    prompt = front.prepare("transcribe", Transcribe(audio=SOUND, prompt="never " * 50 + "the end")).work.prompt
    assert len(prompt) == CONTEXT // 2 - 1
    assert front.tokenizer.decode(prompt).endswith("the end")
    both = Transcribe(audio=SOUND, prompt="never " * 50 + "the end", hotwords="Polymux " * 50)
    work = front.prepare("transcribe", both).work
    assert len(work.hotwords) == (CONTEXT // 2 - 1) // 2
    assert len(work.prompt) + len(work.hotwords) == CONTEXT // 2 - 1
    assert front.tokenizer.decode(work.prompt).endswith("the end")
    assert front.prepare("transcribe", Transcribe(audio=SOUND, prompt=" \n")).work.prompt == []


def test_chunks_hold_every_sample_and_the_last_says_so():
    pieces = [np.arange(start, start + 700, dtype=np.float32) for start in range(0, 7_000, 700)]
    chunks = list(gather_chunks(iter(pieces), 1_000))
    assert [len(chunk.samples) for chunk in chunks] == [1_000] * 7 + [0]
    assert [chunk.last for chunk in chunks] == [False] * 7 + [True]
    assert np.array_equal(np.concatenate([chunk.samples for chunk in chunks]), np.arange(7_000, dtype=np.float32))


def test_the_gateway_half_needs_no_torch():
    code = "import sys, polymux.modalities.asr.plugin, polymux.modalities.asr.front; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.slow
def test_the_event_loop_never_stalls_while_files_are_decoded():
    """Two long files at once, on the preparers' threads. A machine that is busy elsewhere gets three chances."""
    sound = np.random.default_rng(0).normal(0, 0.1, 24_000 * 60).astype(np.float32)
    file = write_media(sound, 24_000, RECIPES["mp3"])

    def read_all() -> int:
        prepared = open_front().prepare("transcribe", Transcribe(audio=file))
        return sum(len(chunk.samples) for chunk in prepared.messages)

    async def measure_stall() -> float:
        preparers = Preparers()
        reading = asyncio.gather(*(preparers.run(read_all, abandoned=lambda: None) for _ in range(2)))
        worst, last = 0.0, time.monotonic()
        while not reading.done():
            await asyncio.sleep(0.001)
            worst, last = max(worst, time.monotonic() - last), time.monotonic()
        assert await reading == [16_000 * 60] * 2
        preparers.close()
        return worst

    assert any(asyncio.run(measure_stall()) < 0.05 for _ in range(3))
