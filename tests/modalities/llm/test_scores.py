"""Prompts are scored as transformers would, whatever chunk, cache or preemption they meet."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import SCORES, GenerateWork, PromptScores
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import VOCABULARY, build, tiny_llama

RANDOM = Random(1)
PROMPTS = [[RANDOM.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 2, 30, 45)]
PROMPTS.append(PROMPTS[3][:40])


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("units", [7, 512])
@pytest.mark.parametrize("pages", [3, 60])
def test_scores_are_the_models_own(lagged: bool, units: int, pages: int) -> None:
    model = build(tiny_llama)
    decoder = TransformersDecoder(model)
    page = 4 * 16 * decoder.shape.layers * 2 * decoder.shape.kv_heads * decoder.shape.head_dim * 4
    settings = SiteSettings(max_rows=4, max_units=units, block=16, cache_bytes=pages * page, superpage=page)
    site = Site(LaggedCpu() if lagged else Device(), settings)
    driver = Driver(Loop(site, {"m": GenerationProgram(TokenStage("decode", decoder, site), "m")}))

    def work(score: bool) -> GenerateWork:
        return GenerateWork(
            prompts=PROMPTS,
            n=2,
            max_tokens=[4] * len(PROMPTS),
            seeds=[0] * 2 * len(PROMPTS),
            sampling=Sampling(temperature=0.0),
            logprobs=3,
            score_prompts=score,
        )

    driver.submit("plain", "m", "complete", work(False))
    driver.submit("scored", "m", "complete", work(True))
    driver.submit("again", "m", "complete", work(True))
    driver.finish()
    fresh = build(tiny_llama)
    for job in ("scored", "again"):
        scores = driver.outputs(job, SCORES, PromptScores)
        assert sorted(each.prompt for each in scores) == list(range(len(PROMPTS)))
        for each in scores:
            prompt = PROMPTS[each.prompt]
            truth = fresh(torch.tensor([prompt])).logits[0].log_softmax(-1)
            expected = [truth[place, token].item() for place, token in enumerate(prompt[1:])]
            assert each.logprobs == pytest.approx(expected, abs=2e-4)
            for place, best in enumerate(each.top):
                values = truth[place].topk(3).values.tolist()
                assert [logprob for _, logprob in best] == pytest.approx(values, abs=2e-4)
        for branch in range(2 * len(PROMPTS)):
            assert driver.tokens(job, branch) == driver.tokens("plain", branch)


@pytest.mark.anyio
async def test_echo_with_logprobs(serve: Any) -> None:
    """Four lists of equal length over prompt and answer, streamed and whole."""
    options: dict[str, Any] = {"model": "tiny", "prompt": ["The quick fox", "Hi"], "echo": True}
    async with serve() as http:
        client = AsyncOpenAI(api_key="none", base_url="http://tiny/v1", http_client=http, max_retries=0)
        whole = await client.completions.create(**options, logprobs=2, max_tokens=3, temperature=0, n=2)
        streamed: dict[int, list[Any]] = {}
        async for chunk in await client.completions.create(
            **options, logprobs=2, max_tokens=3, temperature=0, n=2, stream=True
        ):
            for choice in chunk.choices:
                streamed.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else ())
    assert whole.choices[0].text.startswith("The quick fox")
    for choice in whole.choices:
        lists = choice.logprobs
        assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in lists.token_logprobs[1:])
        assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(lists.text_offset)
        assert streamed[choice.index] == pytest.approx(lists.token_logprobs)
