"""Tiny voices with random weights, and what to ask them, for `polymux plugin check`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from polymux.core.plugins import Example
from polymux.core.tasks import Speak
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.testing.tokenizers import letters
from polymux.core.testing.voices import CODES, tiny_csm, tiny_dac, tiny_vits

SYMBOLS = "_ abcdefghijklmnopqrstuvwxyz'-"
CONTEXT = 72
"""Of the tiny CSM: random weights seldom end by themselves."""
FIRST, END = 30, 29
"""Of the flat model's ids: where the codec's begin, and what ends a sound."""


def write_vits(folder: Path) -> None:
    torch.manual_seed(1)
    tiny_vits(speakers=2).eval().save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({symbol: id for id, symbol in enumerate(SYMBOLS)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"phonemize": False, "add_blank": True}))


def write_csm(folder: Path) -> None:
    build(lambda: tiny_csm(CONTEXT), seed=3).save_pretrained(folder)
    letters().save(str(folder / "tokenizer.json"))


def write_flat(folder: Path) -> None:
    torch.manual_seed(5)
    tiny_dac().eval().save_pretrained(folder / "codec")
    build(tiny_llama).save_pretrained(folder)
    letters(FIRST - 1).save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["speech"] = {"codec": "codec", "first": FIRST, "codebooks": 3, "size": CODES, "end": END, "voices": ["tara"]}
    (folder / "config.json").write_text(json.dumps(config))


def make_examples() -> list[Example]:
    hello, longer = Speak(text="hello there.", seed=3), Speak(text="one. two, and three.", seed=4, speed=1.5)
    refused = {"speak": [Speak(text="!"), Speak(text="hello", voice="nobody"), Speak(text="hello", speed=9.0)]}
    drawn = {"dtype": "float32"}
    return [
        Example(
            pipeline="vits-speech",
            make=write_vits,
            asks={"speak": [hello, longer, Speak(text="hello", voice="1", seed=5)]},
            refused=refused,
            tolerance=1e-3,
            dtype="<i2",
        ),
        Example(
            pipeline="csm-speech",
            make=write_csm,
            options=drawn,
            asks={"speak": [hello, longer]},
            refused=refused,
            tolerance=1e-3,
            dtype="<i2",
        ),
        Example(
            pipeline="codec-speech",
            make=write_flat,
            options=drawn,
            asks={"speak": [hello, longer]},
            refused=refused,
            tolerance=1e-3,
            dtype="<i2",
        ),
    ]
