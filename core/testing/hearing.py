"""A tiny Whisper as a folder: weights drawn from a seed, and the tokenizer that `tiny.tiny_whisper` describes."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken

from polymux.core.testing.tiny import build, tiny_whisper
from polymux.core.testing.tokenizers import letters

TEXT = 80
LANGUAGES = ("en", "de", "fr")
MARKS = ("translate", "transcribe", "startofprev", "nospeech", "notimestamps")
STAMPS = 51


def write_whisper(folder: Path, seed: int = 0) -> None:
    """Windows of one second, three languages."""
    backend = letters(TEXT)
    names = ["endoftext", "startoftranscript", *LANGUAGES, *MARKS]
    names += [f"{step * 0.02:.2f}" for step in range(STAMPS)]
    backend.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False, special=True) for name in names])
    backend.save(str(folder / "tokenizer.json"))
    build(tiny_whisper, seed).save_pretrained(folder)
    ids = {f"<|{code}|>": backend.token_to_id(f"<|{code}|>") for code in LANGUAGES}
    never = [backend.token_to_id(f"<|{name}|>") for name in (*names[1:5], *MARKS[:-1])]
    generation = {
        "is_multilingual": True,
        "lang_to_id": ids,
        "suppress_tokens": never,
        "begin_suppress_tokens": [backend.token_to_id("<|endoftext|>")],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
