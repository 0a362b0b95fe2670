"""Voices from folders as their authors save them, under names of our own, over HTTP by the official client."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import wave
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from transformers import VitsModel

from polymux.core.errors import ModelError
from polymux.core.plugins import load_plugins
from polymux.core.testing.local import LocalModel, open_local
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.testing.voices import CODES, SNAC, tiny_csm, tiny_dac, tiny_snac, tiny_vits
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings
from polymux.modalities.tts import codec_program

pytestmark = pytest.mark.anyio

VOCABULARY = {symbol: id for id, symbol in enumerate("_k'zyxwvutsrponmlihgfedcba -")}
TEXT = "Hello there, old friend. It is a fine day!"
CODEC_VOICES = ["csm", "orpheus-dac", "orpheus-snac"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def write_vits(folder: Path) -> None:
    torch.manual_seed(1)
    tiny_vits(2).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
    settings = {"tokenizer_class": "VitsTokenizer", "phonemize": False, "add_blank": True, "normalize": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_csm(folder: Path) -> None:
    build(tiny_csm, seed=3).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of few ids: the tiny models have few."""
    vocabulary = {letter: 28 + place for place, letter in enumerate("?aeot 01")}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def write_flat(folder: Path, codes: int) -> None:
    build(tiny_llama).save_pretrained(folder)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config["speech"] = {
        "codec": "codec",
        "first": 40 if codes == 3 else 97 - 7 * 8,
        "codebooks": codes,
        "size": CODES if codes == 3 else 8,
        "end": 5,
        "voices": ["tara", "leo"],
        "template": "{voice}: {text}",
        "before": [6],
        "after": [7, 8],
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_folders(root: Path) -> list[LocalModel]:
    """One folder for each kind of voice."""
    folders = {name: root / name for name in ("mms", *CODEC_VOICES)}
    for folder in folders.values():
        folder.mkdir()
    write_vits(folders["mms"])
    write_csm(folders["csm"])
    write_flat(folders["orpheus-dac"], 3)
    tiny_dac().save_pretrained(folders["orpheus-dac"] / "codec")
    write_flat(folders["orpheus-snac"], 7)
    codec = folders["orpheus-snac"] / "codec"
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps(SNAC))
    save_file(tiny_snac().state_dict(), codec / "model.safetensors")
    return [
        LocalModel(f"my/{name}", folder, options={"voices": ["anna", "bert"]} if name == "mms" else {})
        for name, folder in folders.items()
    ]


@pytest.fixture(scope="module")
def short() -> Any:
    """Random codec models seldom come to an end."""
    before, codec_program.LONGEST = codec_program.LONGEST, 0.6
    yield
    codec_program.LONGEST = before


@pytest.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory, short: None) -> AsyncIterator[openai.AsyncOpenAI]:
    pytest.importorskip("snac", reason="pip install 'polymux[snac]'")
    service = open_local(load_plugins(), write_folders(tmp_path_factory.mktemp("voices")))
    settings = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1)
    listener = bind_socket(settings)
    server = Server(create_app(service, settings), service)
    serving = asyncio.create_task(server.run_until_stopped(listener))
    while not (server.started and service.ready):
        await asyncio.sleep(0.02)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client
    server.should_exit = True
    await asyncio.wait_for(serving, 30)


async def speak(client: openai.AsyncOpenAI, model: str, voice: str, text: str = TEXT, **more: Any) -> np.ndarray:
    """Samples at the voice's own rate."""
    answer = await client.audio.speech.create(
        model=model, voice=voice, input=text, response_format="wav", extra_body={"seed": 7, "stream": False, **more}
    )
    with wave.open(io.BytesIO(answer.content)) as reader:
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2")


async def test_each_is_listed_with_its_voices(client: openai.AsyncOpenAI) -> None:
    listed = {model.id: model.to_dict() for model in (await client.models.list()).data}
    assert set(listed) == {"my/mms", *(f"my/{name}" for name in CODEC_VOICES)}
    with pytest.raises(openai.BadRequestError, match="tara, leo"):
        await client.audio.speech.create(model="my/orpheus-snac", voice="nobody", input=TEXT)


async def test_a_vits_folder_says_what_transformers_says(client: openai.AsyncOpenAI, tmp_path: Path) -> None:
    """The first sentence of a speaker, to one step of the samples."""
    found = await speak(client, "my/mms", "bert", "hello there")
    write_vits(tmp_path)
    model = VitsModel.from_pretrained(tmp_path).eval()
    ids = [0, *(id for letter in "hello there" for id in (VOCABULARY[letter], 0))]
    torch.manual_seed(7)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), speaker_id=1).waveform[0].numpy()
    assert np.abs(found / 32767 - expected.clip(-1, 1)).max() < 2e-4


@pytest.mark.parametrize("name", ["mms", *CODEC_VOICES])
async def test_streamed_is_whole_and_the_same_beside_others(client: openai.AsyncOpenAI, name: str) -> None:
    """Two voices of a model at once, streamed as events, are what each is alone; the receipt tells how fast."""
    voices = {"mms": ["anna", "bert"], "csm": ["0", "1"]}.get(name, ["tara", "leo"])

    async def stream(voice: str) -> tuple[np.ndarray, int, dict[str, Any]]:
        sound, pieces, receipt = b"", 0, {}
        asked = client.audio.speech.with_streaming_response.create(
            model=f"my/{name}",
            voice=voice,
            input=TEXT,
            response_format="wav",
            stream_format="sse",
            extra_body={"seed": 7},
        )
        async with asked as answer:
            async for line in answer.iter_lines():
                if "speech.audio.delta" in line:
                    sound += base64.b64decode(json.loads(line[6:])["audio"])
                    pieces += 1
                elif "speech.audio.done" in line:
                    receipt = json.loads(line[6:])["receipt"]
        return np.frombuffer(sound[44:], "<i2"), pieces, receipt

    together = await asyncio.gather(*map(stream, voices))
    for voice, (sound, pieces, receipt) in zip(voices, together, strict=True):
        alone = await speak(client, f"my/{name}", voice)
        assert len(alone) == len(sound) > 0
        assert np.abs(alone.astype(int) - sound).max() <= 4  # 1e-4 of full scale
        assert pieces >= 2
        assert 0 < receipt["first_ms"] <= receipt["total_ms"]
        assert receipt["sound_seconds"] > 0
        factor = receipt["total_ms"] / 1e3 / receipt["sound_seconds"]
        assert receipt["real_time_factor"] == pytest.approx(factor, abs=1e-3)
    assert not np.array_equal(together[0][0], together[1][0]), "two voices"


@pytest.mark.parametrize("name", ["mms", *CODEC_VOICES])
@pytest.mark.parametrize("speed", [0.25, 4.0])
async def test_every_voice_speaks_at_any_pace(client: openai.AsyncOpenAI, name: str, speed: float) -> None:
    """To the sample where the sound is stretched; VITS speaks slowly, and up to twice as fast, by itself."""
    voice = {"mms": "anna", "csm": "0"}.get(name, "leo")
    own = min(speed, 2.0) if name == "mms" else 1.0
    plain = await speak(client, f"my/{name}", voice, "a tea to eat", speed=own)
    paced = await speak(client, f"my/{name}", voice, "a tea to eat", speed=speed)
    assert len(paced) == round(len(plain) * own / speed)
    usual = await speak(client, f"my/{name}", voice, "a tea to eat")
    assert len(paced) > 2 * len(usual) if speed < 1 else len(paced) < len(usual) / 2


async def test_times_are_metrics(client: openai.AsyncOpenAI) -> None:
    """Time to first sound and the real-time factor, by model."""
    await speak(client, "my/mms", "anna", "hello")
    async with httpx.AsyncClient() as plain:
        told = (await plain.get(str(client.base_url).removesuffix("v1/") + "metrics")).text
    for metric in ("time_to_first_token_seconds", "sound_real_time_factor"):
        (line,) = (line for line in told.splitlines() if line.startswith(f'polymux_{metric}_count{{model="my/mms"'))
        assert float(line.split()[-1]) > 0


async def test_a_codec_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_flat(tmp_path, 7)
    tiny_dac().save_pretrained(tmp_path / "codec")
    with pytest.raises(ModelError, match="do not fit the codec"):
        open_local(load_plugins(), [LocalModel("x", tmp_path)])
