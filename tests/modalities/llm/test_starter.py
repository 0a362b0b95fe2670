"""The starters: sentence-transformers' vectors, and the same greedy answers with guesses and without."""

from __future__ import annotations

from random import Random

import numpy as np
import polymux_starter
import pytest

from polymux.core.compute.device import Device
from polymux.core.engine.load import open_site
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import SiteSettings
from polymux.core.models import ModelFiles, resolve
from polymux.core.plugins import load_plugins
from polymux.core.tasks import Complete, Embed, Sampling
from polymux.core.testing.drive import Driver
from polymux.core.vocabulary import NamedModel
from polymux.modalities.llm.plugin import TextEmbedding, TextGeneration
from polymux.modalities.llm.work import VECTORS, Vectors

pytestmark = pytest.mark.slow

WORDS = (
    *("the", "a", "model", "reads", "Paris", "harbor", "naïve", "東京", "rain", "🙂", "seven", "apple", "trees"),
    *("x²+1=0", "don't", "<b>", "https://a.b/c", "Ünïcode"),
)


def find(named: NamedModel) -> ModelFiles:
    return resolve(named.reference, sha256=named.sha256, sources=load_plugins().model_sources())


def make_texts(count: int) -> list[str]:
    """Texts of one word to more than the model reads."""
    random = Random(0)
    lengths = [random.choice([1, 3, 8, 20, 60]) for _ in range(count - 3)] + [300, 400, 500]
    return [" ".join(random.choices(WORDS, k=length)) for length in lengths]


def test_a_thousand_texts_have_the_vectors_of_sentence_transformers() -> None:
    library = pytest.importorskip("sentence_transformers")
    files, texts = find(polymux_starter.EMBED), make_texts(1000)
    options = {"dtype": "float32"}
    pipeline = TextEmbedding()
    work = pipeline.front(files, options).prepare("embed", Embed(inputs=texts, truncate=True)).work
    site = open_site(load_plugins(), Device(), SiteSettings(cache_bytes=1 << 28))
    driver = Driver(Loop(site, {"m": pipeline.load(files, site, options)}))
    driver.submit("a", "m", "embed", work)  # type: ignore[arg-type]
    driver.finish()
    vectors = [vector for part in driver.outputs("a", VECTORS, Vectors) for vector in part.split()]
    told = {each.index: np.frombuffer(each.data, np.float32) for each in vectors}
    expected = library.SentenceTransformer(str(files.folder), device="cpu").encode(texts, normalize_embeddings=True)
    cosines = [float(told[index] @ expected[index]) for index in range(len(texts))]
    assert min(cosines) > 1 - 1e-4


def test_greedy_answers_of_the_chat_starter_to_200_prompts_are_the_same_with_guesses() -> None:
    files, pipeline = find(polymux_starter.CHAT), TextGeneration()
    options = {name: value for name, value in polymux_starter.CHAT.options.items() if name != "deterministic"}
    random, drivers = Random(0), []
    for guesses in (0, 6):
        site = open_site(load_plugins(), Device(), SiteSettings(cache_bytes=1 << 28, max_rows=32))
        drivers.append(Driver(Loop(site, {"m": pipeline.load(files, site, {**options, "speculation": guesses})})))
    front = pipeline.front(files, options)
    for number in range(200):
        words = random.choices(WORDS, k=4)
        ask = Complete(prompts=[" ".join(words * 3)], max_tokens=12, sampling=Sampling(temperature=0.0))
        for driver in drivers:
            driver.submit(f"{number}", "m", "complete", front.prepare("complete", ask).work)  # type: ignore[arg-type]
    for driver in drivers:
        driver.finish()
    plain, bold = drivers
    assert [bold.tokens(f"{i}") for i in range(200)] == [plain.tokens(f"{i}") for i in range(200)]
    receipts = [bold.receipt(f"{i}") for i in range(200)]
    assert sum(each.accepted_units for each in receipts if each) > 200


def test_the_chat_starter_says_the_same_alone_and_under_load_when_deterministic() -> None:
    """Bit for bit: the logprobs are equal, not close."""
    files, pipeline = find(polymux_starter.CHAT), TextGeneration()
    options = {name: value for name, value in polymux_starter.CHAT.options.items() if name != "deterministic"}
    front, random, told = pipeline.front(files, options), Random(1), []
    for company in (0, 12):
        site = open_site(load_plugins(), Device(), SiteSettings(cache_bytes=1 << 28, deterministic=True))
        driver = Driver(Loop(site, {"m": pipeline.load(files, site, options)}))
        for number in range(company):
            words = " ".join(random.choices(WORDS, k=random.randint(1, 60)))
            ask = Complete(prompts=[words], max_tokens=30, sampling=Sampling(temperature=1.0, seed=number))
            driver.submit(f"{number}", "m", "complete", front.prepare("complete", ask).work)  # type: ignore[arg-type]
            driver.run(2)
        ask = Complete(
            prompts=["Once upon a time " * 6], max_tokens=24, logprobs=2, sampling=Sampling(temperature=0.9, seed=5)
        )
        driver.submit("it", "m", "complete", front.prepare("complete", ask).work)  # type: ignore[arg-type]
        driver.finish()
        told.append((driver.tokens("it"), driver.logprobs("it"), driver.top("it")))
    assert told[0] == told[1]
