"""A language model small enough for tests, whole: tokenizer, template, front, engine and gateway, reached by HTTP."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from polymux.core.batch.adapters import AdapterStage, open_adapters
from polymux.core.batch.speculation import LookupDrafter
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import LaggedCpu
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.front import GenerateFront
from polymux.core.generation.guidance import GrammarStage
from polymux.core.generation.program import GenerationProgram
from polymux.core.pipeline import Program
from polymux.core.service import Served, Service
from polymux.core.testing import tokenizers
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.text.grammar import Grammars
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer
from polymux.gateway.app import create_app

CONTEXT = 2048

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>"
    "{% endfor %}<|im_start|>assistant "
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
)
"""Shows tools and calls as Qwen's does, and takes its switch for thinking."""


@cache
def tokenizer_of(thinks: bool) -> Tokenizer:
    backend = tokenizers.byte_level()
    marks = ["<tool_call>", "</tool_call>", *(("<think>", "</think>") if thinks else ())]
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(backend, special_tokens={"eos_token": "<|im_end|>"})


@cache
def decoder_of(thinks: bool) -> TransformersDecoder:
    return TransformersDecoder(build(lambda: tiny_llama(tokenizer_of(thinks).size, CONTEXT)))


def open_service(
    *, thinks: bool = False, adapters: Mapping[str, str] = {}, speculation: int = 0, **settings: Any
) -> Service:
    """`tiny`, and with `speculation` also `quick`, which guesses so many tokens ahead. `adapters`: name -> folder;
    `settings`: further ones of the site."""
    tokenizer, decoder = tokenizer_of(thinks), decoder_of(thinks)
    site = Site(LaggedCpu(), SiteSettings(**{"cache_bytes": 1 << 24, "superpage": 1 << 16, "block": 16, **settings}))
    if adapters:
        decoder = TransformersDecoder(copy.deepcopy(decoder.model))
        decoder.adapt(AdapterSet(decoder.model, open_adapters(adapters), decoder.shape.dtype))
    programs: dict[str, Program] = {}
    for name, guesses in {"tiny": 0, **({"quick": speculation} if speculation else {})}.items():
        stage = TokenStage("decode", decoder, site, drafter=LookupDrafter(guesses) if guesses else None)
        grammars = GrammarStage(Grammars(tokenizer, decoder.shape.vocabulary), site)
        loader = AdapterStage(decoder.adapters, site) if decoder.adapters is not None else None
        programs[name] = GenerationProgram(stage, "tiny", grammars, loader)
    engine = LocalEngine(programs, site)
    front = GenerateFront(tokenizer, ChatTemplate({"default": TEMPLATE}, {}), CONTEXT, decoder.shape.vocabulary)
    front.adapters = tuple(adapters)
    tasks = ("chat", "complete", "tokenize", "detokenize")
    return Service([Served(name, tasks, front, engine) for name in programs])


@asynccontextmanager
async def serve_tiny(*, library: Any = httpx, **options: Any) -> AsyncIterator[Any]:
    """`library`: the HTTP client whose transport the official client insists on; `options`: of `open_service`."""
    service = open_service(**options)
    await service.start()
    await service.wait_ready()
    transport = library.ASGITransport(create_app(service))
    try:
        async with library.AsyncClient(transport=transport, base_url="http://tiny") as client:
            yield client
    finally:
        await service.stop()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[Any]]:
    """`async with serve(thinks=True) as http:` the tiny model behind a gateway."""
    return serve_tiny


@pytest.fixture
def ending() -> dict[str, Any]:
    """A `logit_bias` towards what ends a JSON text and an answer: left alone, random weights hardly ever do."""
    tokenizer = tokenizer_of(False)
    closers = [tokenizer.encode(text, special=False)[0] for text in ('"', "}", "]", ",", ":")]
    return {str(id): 8.0 for id in [*closers, tokenizer.find("<|im_end|>")]}
