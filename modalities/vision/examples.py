"""Tiny models that see, with random weights, and what to ask them, for `polymux plugin check`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from polymux.core.plugins import Example
from polymux.core.tasks import Chat, Complete, Detokenize, Embed, Sampling, Tokenize
from polymux.core.testing.media import write_picture
from polymux.core.testing.seeing import write_seer, write_shower

GREEDY, DRAWN = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=5)


def write_chat(folder: Path) -> None:
    write_seer(folder, "qwen3-vl")


def write_embedder(folder: Path) -> None:
    write_shower(folder, "clip")


def show(data: bytes) -> dict[str, Any]:
    """A picture as the part of a message."""
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


def say(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "Hello"}, *parts]}]


def make_examples() -> list[Example]:
    wide, tall = show(write_picture(48, 32, seed=1)), show(write_picture(24, 40, seed=2))
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    return [
        Example(
            pipeline="vision-language",
            make=write_chat,
            options={"dtype": "float32", "deterministic": True},
            asks={
                "chat": [
                    Chat(messages=say(wide), max_tokens=6, sampling=GREEDY),
                    Chat(messages=say(tall, wide), max_tokens=8, sampling=DRAWN, n=2),
                    Chat(messages=say(), max_tokens=4, sampling=GREEDY),
                ],
                "complete": [Complete(prompts=["The quick", [5, 6, 7]], max_tokens=5, sampling=GREEDY)],
                "embed": [Embed(inputs=[wide, tall])],
                "tokenize": [Tokenize(text="The end"), Tokenize(chat=Chat(messages=say(wide)))],
                "detokenize": [Detokenize(ids=[5, 6, 7])],
            },
            refused={"chat": [Chat(messages=say(broken), max_tokens=1)], "embed": [Embed(inputs=["words"])]},
            tolerance=1e-4,
            dtype="<f4",
        ),
        Example(
            pipeline="image-embedding",
            make=write_embedder,
            options={"dtype": "float32"},
            asks={"embed": [Embed(inputs=["the end"]), Embed(inputs=[wide, "fox", tall])]},
            refused={"embed": [Embed(inputs=["dog " * 500]), Embed(inputs=[broken])]},
            tolerance=1e-4,
            dtype="<f4",
        ),
    ]
