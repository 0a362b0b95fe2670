"""Adapters beside one model's weights: what rows say is what the merged model says, whoever shares the launch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polymux.core.batch.adapters import AdapterStage, open_adapters
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.adapters import AdapterFiles, AdapterSet
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.int8 import Int8Linear
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError, ModelError
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import SCORES, GenerateWork, PromptScores
from polymux.core.tasks import Sampling
from polymux.core.testing.adapting import merge_adapter, write_adapter
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import DECODERS, build, tiny_llama

GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 9, 14, 3, 60, 22, 41, 8] * 5


def open_driver(
    model: nn.Module,
    adapters: dict[str, Path],
    *,
    fast: bool = False,
    lagged: bool = False,
    make: Any = None,
    **settings: Any,
) -> Driver:
    limits = SiteSettings(**{"cache_bytes": 1 << 22, "superpage": 1 << 16, "max_rows": 8, **settings})
    site = Site(LaggedCpu() if lagged else Device(), limits, (NativeAttention(),) if fast else ())
    decoder = TransformersDecoder(copy.deepcopy(model))
    served = AdapterSet(
        decoder.model, open_adapters({name: str(path) for name, path in adapters.items()}), torch.float32
    )
    if fast:
        decoder = accelerate(decoder, make, adapters=served)
        assert isinstance(decoder, FastDecoder)
    else:
        decoder.adapt(served)
    stage = TokenStage("decode", decoder, site)
    return Driver(Loop(site, {"m": GenerationProgram(stage, "m", adapters=AdapterStage(served, site))}))


def work(adapter: str | None, prompt: list[int] = PROMPT, tokens: int = 12, **options: Any) -> GenerateWork:
    return GenerateWork(
        prompts=[prompt], max_tokens=[tokens], seeds=[0], sampling=GREEDY, logprobs=0, adapter=adapter, **options
    )


def check(driver: Driver, job: str, model: nn.Module, prompt: list[int] = PROMPT) -> None:
    """The job's tokens are the model's greedy ones, and as likely as the model says."""
    said = driver.tokens(job)
    ids = torch.tensor([[*prompt, *said]])
    with torch.inference_mode():
        logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(said)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(driver.logprobs(job)), chosen, rtol=0, atol=2e-3)
    assert (logprobs.amax(dim=-1) - chosen).max() < 2e-3


@pytest.fixture(params=["reference", "fast"])
def fast(request: pytest.FixtureRequest) -> bool:
    return request.param == "fast"


@pytest.mark.parametrize("make", DECODERS.values(), ids=DECODERS.keys())
@pytest.mark.parametrize("lagged", [False, True])
def test_many_adapters_in_one_launch_say_what_merged_models_say(
    make: Callable[[], nn.Module], fast: bool, lagged: bool, tmp_path: Path
) -> None:
    model = build(make)
    adapters = {
        "one": write_adapter(tmp_path / "one", model, rank=4, seed=1),
        "two": write_adapter(tmp_path / "two", model, rank=2, seed=2, targets=("q_proj", "v_proj"), lora_alpha=4),
        "three": write_adapter(tmp_path / "three", model, rank=3, seed=3, targets=("o_proj", "down_proj")),
    }
    driver = open_driver(model, adapters, fast=fast, lagged=lagged, max_units=30)
    for number, adapter in enumerate([None, "one", "two", "three", "one", None, "two"]):
        driver.submit(f"{number} {adapter}", "m", "chat", work(adapter, PROMPT[number:]))
        driver.run(2)
    driver.finish()
    merged: dict[str, nn.Module] = {
        "None": model,
        "one": merge_adapter(model, adapters["one"]),
        "two": merge_adapter(model, adapters["two"], scale=2.0),
        "three": merge_adapter(model, adapters["three"]),
    }
    answers = set()
    for job in driver.reports:
        number, adapter = job.split()
        check(driver, job, merged[adapter], PROMPT[int(number) :])
        answers.add(tuple(driver.tokens(job)))
    assert len(answers) > 3


def test_quantized_weights_take_adapters_as_they_are(tmp_path: Path) -> None:
    model = build(tiny_llama)
    folder = write_adapter(tmp_path, model, seed=1)
    driver = open_driver(model, {"one": folder}, fast=True, make=Int8Linear)
    driver.submit("plain", "m", "chat", work(None))
    driver.submit("one", "m", "chat", work("one"))
    driver.finish()
    with torch.inference_mode():
        logits = merge_adapter(model, folder)(torch.tensor([PROMPT])).logits[0, -1]
    close = logits.log_softmax(dim=-1)[driver.tokens("one")[0]].item()
    assert driver.logprobs("one")[0] == pytest.approx(close, abs=0.5)
    assert driver.tokens("one") != driver.tokens("plain")


def test_a_prefix_is_shared_only_under_the_same_adapter(fast: bool, tmp_path: Path) -> None:
    model = build(tiny_llama)
    adapters = {name: write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("one", "two"))}
    driver = open_driver(model, adapters, fast=fast)
    for adapter in ("one", "two", None, "one"):
        name = f"{adapter} {driver.steps}"
        driver.submit(name, "m", "chat", work(adapter))
        driver.finish()
        receipt = driver.receipt(name)
        assert receipt is not None
        seen = [job for job in driver.reports if job.split()[0] == str(adapter)]
        assert (receipt.cached_units > 0) == (len(seen) > 1)
        check(driver, name, model if adapter is None else merge_adapter(model, adapters[adapter]))


def test_what_is_scored_is_scored_by_the_adapted_model(tmp_path: Path) -> None:
    model = build(tiny_llama)
    folder = write_adapter(tmp_path, model, seed=1)
    driver = open_driver(model, {"one": folder})
    driver.submit("a", "m", "complete", work("one", score_prompts=True))
    driver.finish()
    [scores] = driver.outputs("a", SCORES, PromptScores)
    with torch.inference_mode():
        logprobs = merge_adapter(model, folder)(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(dim=-1)
    expected = logprobs.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=0, atol=2e-3)


def test_adapters_share_the_byte_budget_and_come_back(tmp_path: Path) -> None:
    """Twelve adapters through a cache that holds a few, with rows that need it for themselves; nothing leaks."""
    model = build(tiny_llama)
    adapters = {f"{i}": write_adapter(tmp_path / f"{i}", model, rank=8, seed=i) for i in range(12)}
    driver = open_driver(model, adapters, cache_bytes=6 * (1 << 16), superpage=1 << 16)  # one to a superpage
    for turn in range(2):
        for name in adapters:
            driver.submit(f"{turn} {name}", "m", "chat", work(name, tokens=20))
            driver.run(1)
    driver.cancel("1 3")
    driver.finish()
    for name, folder in adapters.items():
        merged = merge_adapter(model, folder)
        for turn in range(2):
            if (turn, name) != (1, "3"):
                check(driver, f"{turn} {name}", merged)
    stage = driver.loop.scheduler.lanes["m/adapters"].residency
    assert stage.pool is not None and 0 < stage.pool.idle < 12


def test_the_same_bits_alone_and_in_company_when_deterministic(tmp_path: Path) -> None:
    """On 8-bit weights, whose sums are exact: then the adapters' sums must not depend on neighbours either."""
    model = build(tiny_llama)
    adapters = {name: write_adapter(tmp_path / name, model, seed=seed) for seed, name in enumerate(("one", "two"))}
    alone = open_driver(model, adapters, fast=True, make=Int8Linear, deterministic=True)
    alone.submit("a", "m", "chat", work("one"))
    alone.finish()
    crowded = open_driver(model, adapters, fast=True, make=Int8Linear, deterministic=True)
    for number, adapter in enumerate(("two", "one", None, "one")):
        crowded.submit(f"{number}", "m", "chat", work(adapter, PROMPT[number + 1 :]))
    crowded.submit("a", "m", "chat", work("one"))
    crowded.finish()
    assert crowded.tokens("a") == alone.tokens("a")
    assert crowded.logprobs("a") == alone.logprobs("a")


def test_scales_as_peft_defines_them(tmp_path: Path) -> None:
    model = build(tiny_llama)
    for settings, scale in (
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"layers.0.self_attn.q_proj": 4}}, 1.0),
    ):
        files = AdapterFiles.open("a", write_adapter(tmp_path, model, rank=4, targets=("q_proj",), **settings))
        assert files.pairs["model.layers.0.self_attn.q_proj"].scale == pytest.approx(scale)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"peft_type": "IA3"}, "LORA is supported"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_alpha": "much"}, "not a number"),
    ],
)
def test_other_kinds_are_refused_by_name(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, build(tiny_llama), **settings)
    with pytest.raises(ModelError, match=f"adapter a.*{reason}"):
        AdapterFiles.open("a", tmp_path)


def test_broken_folders_are_refused_with_their_reason(tmp_path: Path) -> None:
    model = build(tiny_llama)
    with pytest.raises(ModelError, match="no adapter_config"):
        AdapterFiles.open("a", tmp_path)
    write_adapter(tmp_path, model)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{garbage")
    with pytest.raises(ModelError, match="cannot be read"):
        AdapterFiles.open("a", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ModelError, match="not an object"):
        AdapterFiles.open("a", tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = build(tiny_llama)
    wide = write_adapter(tmp_path / "wide", build(DECODERS["qwen3"]))
    head = write_adapter(tmp_path / "head", model, targets=("lm_head",))
    with pytest.raises(ModelError, match="of another model"):
        AdapterSet(model, [AdapterFiles.open("a", wide)], torch.float32)
    with pytest.raises(ModelError, match="lm_head, which is no linear layer"):
        AdapterSet(model, [AdapterFiles.open("a", head)], torch.float32)


def test_an_adapter_that_cannot_fit_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    model = build(tiny_llama)
    folder = write_adapter(tmp_path, model, rank=16)
    with pytest.raises(ConfigError, match="has no room"):
        open_driver(model, {"one": folder}, cache_bytes=1 << 16)
