"""Merged blocks give what the transformers' own give, in every company and with step caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch
from polymux.core.errors import ConfigError
from polymux.core.testing.denoising import tiny_flux
from polymux.core.testing.pipelines import tiny_unet, tiny_wan
from polymux.modalities.diffusion import encoders, flux, tuning, unet, wan
from polymux.modalities.diffusion.merged import compile_blocks


def make_flux() -> tuple[BlockModel, DenoiseBatch]:
    torch.manual_seed(3)
    conditions = [
        {flux.PROMPT: torch.randn(5, 12), flux.POOLED: torch.randn(10), flux.GUIDANCE: torch.tensor(2.0 + row)}
        for row in range(3)
    ]
    return flux.FluxDenoiser(tiny_flux()), DenoiseBatch(
        torch.randn(3, 4, 6, 8), torch.tensor([900.0, 500, 20]), conditions
    )


def make_wan() -> tuple[BlockModel, DenoiseBatch]:
    torch.manual_seed(3)
    conditions = [{encoders.PROMPT: torch.randn(7, 32)} for _ in range(2)]
    return wan.WanDenoiser([tiny_wan(4)]), DenoiseBatch(
        torch.randn(2, 4, 3, 4, 6), torch.tensor([900.0, 50]), conditions
    )


@pytest.mark.parametrize("make", [make_flux, make_wan])
def test_a_merged_model_predicts_the_same(make) -> None:
    model, batch = make()
    with torch.inference_mode():
        before = model.forward(batch)
        measured = model.modulate(model.embed(batch))
        assert model.merge()
        torch.testing.assert_close(model.forward(batch), before, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(model.modulate(model.embed(batch)), measured)
        alone = model.forward(
            replace(batch, latents=batch.latents[:1], timesteps=batch.timesteps[:1], conditions=batch.conditions[:1])
        )
        torch.testing.assert_close(alone, before[:1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["flux", "wan", "unet"])
def test_what_serves_on_a_card(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels where there are such; UNets are also recorded, but stay adaptable when adapters may come."""
    pytest.importorskip("triton")
    done: list[str] = []
    model = {"flux": lambda: make_flux()[0], "wan": lambda: make_wan()[0], "unet": make_unet}[kind]()
    monkeypatch.setattr(type(model), "merge", lambda self, wrap, steps=None: done.append("kernels" if steps else "own"))
    monkeypatch.setattr(type(model), "record", lambda self: done.append("graphs"))
    monkeypatch.setattr(tuning, "compile_blocks", lambda blocks: done.append("compiled"))
    card = torch.device("cuda")
    tuning.tune(model, card, {})
    assert done == (["kernels", "graphs"] if kind == "unet" else ["kernels"])
    done.clear()
    tuning.tune(model, card, {"compile": True, "graphs": False})
    assert done == ["own", "compiled"]
    done.clear()
    tuning.tune(model, card, {}, lambda layer, *parts: layer)
    assert done == (["own", "compiled", "graphs"] if kind == "unet" else ["kernels"])
    done.clear()
    tuning.tune(model, torch.device("cpu"), {})
    assert done == []
    with pytest.raises(ConfigError):
        tuning.tune(model, torch.device("cpu"), {"kernels": True})


def make_unet() -> BlockModel:
    return unet.UNetDenoiser(tiny_unet("sdxl"))


@pytest.mark.slow
def test_a_compiled_model_predicts_the_same() -> None:
    model, batch = make_flux()
    with torch.inference_mode():
        before = model.forward(batch)
        compile_blocks(model.merge())
        torch.testing.assert_close(model.forward(batch), before, atol=5e-5, rtol=1e-3)
        half = batch.select([0])
        torch.testing.assert_close(model.forward(half), before[:1], atol=5e-5, rtol=1e-3)
