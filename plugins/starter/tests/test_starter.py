"""The starters exist under their names, are pinned by hash, and resolve to files that the runtime can read."""

from __future__ import annotations

import json

import polymux_starter
import pytest
from polymux_starter import CHAT, EMBED, MODELS, SPEAK, TRAINED, TRANSCRIBE

from polymux.core.models import Catalogue, resolve
from polymux.core.plugins import load_plugins


def test_served_when_nothing_is_asked_for():
    catalogue = Catalogue.join([], polymux_starter.named_models())
    assert [model.name for model in catalogue.choose([])] == [
        "starter/chat",
        "starter/embed",
        "starter/transcribe",
        "starter/speak",
        *(f"starter/{name}" for name in TRAINED if (MODELS / name).is_dir()),
    ]


def test_a_trained_model_is_served_once_its_folder_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(polymux_starter, "MODELS", tmp_path)
    assert polymux_starter.find_trained() == []
    (tmp_path / "paint").mkdir()
    (painting,) = polymux_starter.find_trained()
    assert (painting.name, painting.default) == ("starter/paint", True)
    assert "gpt-image-1" in painting.aliases
    assert resolve(painting.reference).folder == tmp_path / "paint"


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("gpt-4o-mini", "starter/chat"),
        ("text-embedding-3-small", "starter/embed"),
        ("whisper-1", "starter/transcribe"),
        ("tts-1", "starter/speak"),
    ],
)
def test_names_that_clients_hard_code_reach_the_starters(alias, name):
    models = polymux_starter.named_models()
    assert Catalogue.join([], models).find(alias).name == name
    assert Catalogue.join([], models, aliases=False).find(alias).reference == alias


@pytest.mark.parametrize("model", [CHAT, EMBED, TRANSCRIBE], ids=lambda model: model.name)
def test_resolves_to_safetensors_with_a_tokenizer(model):
    assert len(model.sha256) == 64
    files = resolve(model.reference, sha256=model.sha256)
    assert files.weights()
    assert json.loads(files.path("tokenizer.json").read_text())["model"]


def test_the_chat_starter_brings_its_template_and_architecture():
    files = resolve(polymux_starter.CHAT.reference, sha256=polymux_starter.CHAT.sha256)
    assert "<|im_start|>" in files.path("chat_template.jinja").read_text()
    assert files.config()["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in files.config()


def test_the_voice_is_the_one_that_was_pinned():
    files = resolve(SPEAK.reference, sha256=SPEAK.sha256, sources=load_plugins().model_sources())
    assert list(files.config()["voices"]) == ["heart"]
