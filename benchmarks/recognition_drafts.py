"""starter/transcribe with and without guesses, on real speech: how often they are right, and what they cost or save.

Nobody distilled a smaller model from the starter. So its own first decoder layers, behind its own encoder, stand in for
one: such a draft was never trained to speak, and is right less often than a distilled one. Beside it the look-back at
what was said, which needs no draft. Recordings are transcribed one at a time, every way in turn, in the same process.

python benchmarks/recognition_drafts.py --record
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polymux_starter
import torch
from hibari import Hibari
from ledger import record
from recognition import RATE, SENTENCES, say

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import ModelFiles, resolve
from polymux.core.service import Served, Service
from polymux.core.tasks import Done, TextDelta, Transcribe
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.media import write_wav
from polymux.core.vocabulary import Receipt
from polymux.modalities.asr.plugin import Transcription
from polymux.modalities.asr.whisper import load_whisper

GUESSES = 5
KINDS = {
    "look-back": 0,
    "draft of the first 1 of 4 decoder layers": 1,
    "draft of the first 3 of 4 decoder layers": 3,
    "draft of all 4 decoder layers": 4,
}
"""Decoder layers of the draft."""


def cut_decoder(folder: Path, layers: int, target: Path) -> Path:
    """The model in `folder` with its first decoder layers alone."""
    model = load_whisper(folder, torch.device("cpu"), torch.float32)
    model.model.decoder.layers = model.model.decoder.layers[:layers]
    model.config.decoder_layers = layers
    model.save_pretrained(target)
    return target


class Ours:
    """The starter in this process."""

    def __init__(self, files: ModelFiles, speculation: Any) -> None:
        starter, pipeline = polymux_starter.TRANSCRIBE, Transcription()
        options = {**starter.options, "speculation": speculation}
        site = Site(settings=SiteSettings())
        engine = LocalEngine({starter.name: pipeline.load(files, site, options)}, site)
        self.service = Service([Served(starter.name, pipeline.tasks, pipeline.front(files, options), engine)])
        self.engine = engine

    async def transcribe(self, sound: np.ndarray) -> tuple[str, Receipt]:
        texts, receipt = [], Receipt()
        ask = Transcribe(audio=write_wav(sound, RATE), language="en")
        async with self.service.open("starter/transcribe", "transcribe", ask) as answers:
            async for answer in answers:
                if isinstance(answer, TextDelta):
                    texts.append(answer.text)
                elif isinstance(answer, Done):
                    receipt = answer.receipt
        return "".join(texts), receipt


async def measure(files: ModelFiles, sounds: list[np.ndarray], runs: int, folder: Path) -> dict[str, tuple[float, ...]]:
    """By kind: seconds for all recordings, guesses, right ones, passes."""
    options: dict[str, Any] = {"no guesses": None}
    for kind, layers in KINDS.items():
        draft = cut_decoder(files.folder, layers, folder / str(layers)) if layers else None
        model = {"drafter": "model", "model": str(draft), "tokens": GUESSES}
        options[kind] = model if draft is not None else GUESSES
    ours = {kind: Ours(files, option) for kind, option in options.items()}
    for each in ours.values():
        await each.engine.start()
        await each.engine.wait_ready()
        await each.transcribe(sounds[0])
    seconds: dict[str, list[float]] = {kind: [] for kind in ours}
    counts: dict[str, tuple[int, int, int]] = {}
    texts: dict[str, list[str]] = {}
    for _ in range(runs):
        for kind, each in ours.items():
            start = time.perf_counter()
            told = [await each.transcribe(sound) for sound in sounds]
            seconds[kind].append(time.perf_counter() - start)
            texts[kind] = [text for text, _ in told]
            receipts = [receipt for _, receipt in told]
            counts[kind] = (
                sum(receipt.guessed_units for receipt in receipts),
                sum(receipt.accepted_units for receipt in receipts),
                sum(receipt.launches for receipt in receipts),
            )
    for kind, said in texts.items():
        if said != texts["no guesses"]:
            raise RuntimeError(f"{kind}: the text is another than without guesses")
    for each in ours.values():
        await each.engine.stop()
    return {kind: (statistics.median(seconds[kind]), *counts[kind]) for kind in ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="say so in the record")
    parser.add_argument("--record", action="store_true", help="append the figures to the ledger")
    args = parser.parse_args()
    voice = Hibari()
    sounds = [
        np.concatenate([say(voice, "hibari", SENTENCES[(13 * number + 7 * k) % 100]) for k in range(8)])
        for number in range(args.files)
    ]
    heard = sum(map(len, sounds)) / RATE
    files = resolve(polymux_starter.TRANSCRIBE.reference, sha256=polymux_starter.TRANSCRIBE.sha256)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(files, sounds, args.runs, Path(folder)))
    plain, *_ = found["no guesses"]
    peer = "ours without guesses, the same run" + ("; a busy machine" if args.busy else "")
    for kind, (seconds, guessed, accepted, launches) in found.items():
        share = accepted / guessed if guessed else 0.0
        print(
            f"{kind}: {heard / seconds:.2f} x real time, {share:.2f} of {guessed} right, {launches} passes", flush=True
        )
        if args.record and kind != "no guesses":
            name = f"speculation, {kind}, {GUESSES} guesses, one file at a time, float32"
            record("recognition", name, heard / seconds, "x real time", peer=peer, peer_value=heard / plain)
            record("recognition", f"{name}: guesses that were right", 100 * share, "%")


if __name__ == "__main__":
    main()
