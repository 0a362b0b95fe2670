"""Attention backends, quantizers and step caches compute what they stand for, and refuse what they cannot."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn

from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.stepcache import AdaptiveRule, StepCache, StepRule
from polymux.core.compute.attention import AttentionBackend
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device
from polymux.core.compute.quantization import Quantizer
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError
from polymux.core.pipeline import Program
from polymux.core.plugins import Plugin, Plugins
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import DECODERS, build

NEEDS = ("attention_backends", "quantizers", "step_caches")

CPU = torch.device("cpu")
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [3], [20 + place for place in range(37)])
STEPS = 12


class Write(msgspec.Struct):
    prompt: list[int]


class Writer(Program):
    """Greedy tokens of one model."""

    def __init__(self, stage: TokenStage) -> None:
        self.work = {"write": Write}
        self.stage = stage
        self.stages = (stage,)

    async def run(self, job: Job, work: Write) -> None:
        await job.start(self.stage, TokenRow(job, TokenRequest(work.prompt, 8, Sampling(temperature=0.0), logprobs=0)))


def own(plugins: Plugins, record: Plugin, hook: str) -> list[object]:
    found = [value for plugin, values in plugins.answers(hook) if plugin is record for value in values]
    if not found:
        pytest.skip(f"it brings no {hook.replace('_', ' ')}")
    return found


def write(make: object, backends: tuple[AttentionBackend, ...]) -> list[tuple[list[int], list[float]]]:
    site = Site(Device(), SiteSettings(cache_bytes=1 << 22, superpage=1 << 16, block=4, max_units=16), backends)
    driver = Driver(Loop(site, {"m": Writer(TokenStage("tokens", TransformersDecoder(build(make)), site))}))
    for number, prompt in enumerate(PROMPTS):
        driver.submit(str(number), "m", "write", Write(prompt))
    driver.finish()
    return [(driver.tokens(str(number)), driver.logprobs(str(number))) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("family", DECODERS)
def test_attention_gives_what_the_reference_gives(record: Plugin, plugins: Plugins, family: str) -> None:
    """Ragged prompts in chunks and decode steps together, with blocks of four; grouped heads, windows, head sizes."""
    wanted = write(DECODERS[family], ())
    for backend in own(plugins, record, "attention_backends"):
        assert isinstance(backend, AttentionBackend)
        reasons = [backend.refuses(CPU, torch.float32, dim) for dim in (8, 16)]
        if any(reasons):
            pytest.skip(f"{backend.name} refuses this machine: {next(filter(None, reasons))}")
        for (tokens, scores), (expected, logprobs) in zip(write(DECODERS[family], (backend,)), wanted, strict=True):
            assert tokens == expected, f"{backend.name} writes other tokens than the reference"
            torch.testing.assert_close(torch.tensor(scores), torch.tensor(logprobs), atol=2e-3, rtol=1e-3)


def test_backends_refuse_with_a_reason(record: Plugin, plugins: Plugins) -> None:
    for backend in own(plugins, record, "attention_backends"):
        reason = backend.refuses(torch.device("meta"), torch.float64, 7)  # type: ignore[attr-defined]
        assert reason is None or (isinstance(reason, str) and reason), "refuses() says why, or None"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (96, 64)])
def test_a_quantized_layer_stands_for_the_linear_one(
    record: Plugin, plugins: Plugins, shape: tuple[int, int], bias: bool
) -> None:
    torch.manual_seed(3)
    layer = nn.Linear(shape[1], shape[0], bias=bias)
    rows = torch.randn(9, shape[1])
    for quantizer in own(plugins, record, "quantizers"):
        assert isinstance(quantizer, Quantizer)
        if quantizer.refuses(CPU):
            pytest.skip(f"{quantizer.name} refuses this machine: {quantizer.refuses(CPU)}")
        with torch.no_grad():
            made = quantizer.make_linear(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
            exact, found = layer(rows), made(rows)
            assert found.shape == exact.shape and found.dtype == exact.dtype
            error = float((found - exact).norm() / exact.norm())
            assert error < 0.25, f"{quantizer.name} is off by {error:.0%}"
            for place in range(len(rows)):
                alone = made(rows[place : place + 1])
                torch.testing.assert_close(alone, found[place : place + 1], atol=1e-4, rtol=1e-4)
            assert (made.in_features, made.out_features) == (shape[1], shape[0])


def test_a_weight_that_cannot_be_held_is_refused(record: Plugin, plugins: Plugins) -> None:
    for quantizer in own(plugins, record, "quantizers"):
        assert isinstance(quantizer, Quantizer)
        if quantizer.refuses(CPU):
            pytest.skip(f"{quantizer.name} refuses this machine")
        with pytest.raises(ConfigError):
            quantizer.make_linear(torch.full((64, 64), float("nan")), None)


def test_a_step_cache_plans_every_step(record: Plugin, plugins: Plugins) -> None:
    for kind in own(plugins, record, "step_caches"):
        rule = kind.make()  # type: ignore[attr-defined]
        assert isinstance(rule, StepRule)
        plan = rule.plan(STEPS)
        assert plan is not None or isinstance(rule, AdaptiveRule), "a rule without a plan decides by distance"
        assert plan is None or (len(plan) == STEPS and plan[0] is True), "the first step is always computed"
        state = StepCache(rule, STEPS)
        for step in range(STEPS):
            if state.foresee(step) is None:
                state.decide(step, 0.05)
        assert sorted(state.computed) == list(range(STEPS)) and state.computed[0]
