"""Every class of model is served on a CUDA card that is only imagined (`core.testing.imagined`).

What costs minutes of a real card when it is first found there is found here: tensors of two devices in one operation,
steps that cannot be recorded, shapes that a kernel does not take, and, while answers are made, a host that waits.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import InternalError
from polymux.core.testing.imagined import imagine_card

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

WAITING = {
    "vits": 100,  # the spline flow of its durations looks at what it masks
    "flux": 40,  # a row's noise and its clock, once a request; the program of the test reads the result
    "embedder": 20,  # backends are tried before the first request
    "vlm": 6,  # tables of a new size of picture
}
"""Times that the host may wait for the card in a run; 0 for others."""

RECORDED = {"vits": 0, "embedder": 0}
"""Steps that are recorded at least; 1 for others."""


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "gpu"))
    import smoke

    from polymux.modalities.asr.activity import SpeechDetector

    # its recurrent network packs rows in a way that fakes do not know
    load = SpeechDetector.load
    monkeypatch.setattr(SpeechDetector, "load", lambda device: load(torch.device("cpu")))
    # only the reference adds pictures by a mask, and it only runs to prove the fast tier
    monkeypatch.setattr(
        "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextModel._deepstack_process",
        lambda self, hidden, *others: hidden,
    )
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return smoke


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("csm", marks=pytest.mark.slow),
        pytest.param("vits", marks=pytest.mark.slow),
        "embedder",
        pytest.param("vlm", marks=pytest.mark.slow),
        pytest.param("flux", marks=pytest.mark.slow),
        pytest.param("whisper", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("moe", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_served(smoke, name: str) -> None:
    with imagine_card() as card:
        site = smoke.open_site(card.device)
        program, asked = smoke.CLASSES[name](site)
        card.waits.clear()
        assert smoke.serve(program, asked, site) >= len(asked)
        assert card.recorded >= RECORDED.get(name, 1)
        assert sum(card.waits.values()) <= WAITING.get(name, 0), card.waits


@pytest.mark.parametrize("curious", [False, True], ids=["", "looking at the host"])
def test_launches_with_prompts_are_recorded_where_they_can_be(
    smoke, curious: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that looks at the host where prompts are is served all the same."""
    from polymux.core.batch.packing import Packer
    from polymux.core.compute.mixed import MixedGraphs

    pack, run = Packer.pack_frame, MixedGraphs.run
    frames = []

    def look(packer: Packer, frame: Any, buffer: torch.Tensor) -> Any:
        if curious:
            buffer.sum().item()
        return pack(packer, frame, buffer)

    monkeypatch.setattr(Packer, "pack_frame", look)
    monkeypatch.setattr(MixedGraphs, "run", lambda graphs, *args: (frames.append(args[0]), run(graphs, *args))[1])
    with imagine_card() as card:
        site = smoke.open_site(card.device)
        program, asked = smoke.CLASSES["llama"](site)
        assert smoke.serve(program, asked, site) >= len(asked)
    assert bool(frames) != curious
    assert ("not recorded" in caplog.text) == curious


def test_tensors_of_two_devices_are_refused() -> None:
    with imagine_card() as card, pytest.raises(RuntimeError):
        torch.ones(3, device=card.device.torch) + torch.ones(3)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
        lambda x: x.copy_(torch.ones(3)),
    ],
    ids=["item", "cpu", "mask", "nonzero", "upload", "copy"],
)
def test_what_cannot_be_recorded_is_refused(step) -> None:
    with imagine_card() as card:
        x = torch.ones(3, device=card.device.torch)
        step(x)  # elsewhere it only waits
        with pytest.raises(InternalError, match="recorded"), torch.cuda.graph(None):
            step(x)


def test_a_kernel_is_not_given_tensors_of_the_host() -> None:
    from polymux.core.compute.triton.fused import gate

    with imagine_card() as card:
        gate(torch.ones(2, 8, device=card.device.torch), "silu")
        with pytest.raises(InternalError, match="tensor of the host"):
            gate(torch.ones(2, 8), "silu")


def test_a_table_that_is_bounded_bounds_the_context() -> None:
    """Rows longer than a decoder's rotary tables would be turned by what lies behind them."""
    from polymux.core.batch.tokens import TokenStage
    from polymux.core.compute.decoder import TransformersDecoder
    from polymux.core.compute.fast import accelerate
    from polymux.core.testing.tiny import build, tiny_llama

    decoder = accelerate(TransformersDecoder(build(tiny_llama)), positions=48)
    assert decoder.layers[0].rotary.table.shape[1] == 48  # type: ignore[attr-defined]
    site = Site(settings=SiteSettings(cache_bytes=1 << 24, superpage=1 << 20))
    assert TokenStage("decode", decoder, site).capacity == 48
