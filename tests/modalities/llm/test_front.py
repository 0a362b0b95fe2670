"""Fronts check asks and presenters tell answers: no engine here, its events are written by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.engine.wire import pack
from polymux.core.errors import ContextTooLong, InvalidRequest
from polymux.core.generation.front import GenerateFront
from polymux.core.generation.work import SCORES, GenerateWork, PromptScores
from polymux.core.tasks import Chat, ChoiceEnded, Complete, Done, Embed, Sampling, TextDelta
from polymux.core.testing import tokenizers as small
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import BranchEnded, Ended, Output, Receipt, Tokens
from polymux.modalities.llm.embedding import EmbedFront
from polymux.modalities.llm.work import VECTORS, Vectors

TOKENIZER = Tokenizer(small.byte_level(), special_tokens={"eos_token": "<|im_end|>"})
EOS = TOKENIZER.find("<|im_end|>")
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"}, {})
CONTEXT = 100
VOCABULARY = TOKENIZER.size + 10
FRONT = GenerateFront(TOKENIZER, TEMPLATE, CONTEXT, VOCABULARY)

WORDS = Tokenizer(small.wordpiece())
EMBED = EmbedFront(WORDS, 16, WORDS.size, 8)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, special=False)


def prepare(ask: Chat | Complete) -> GenerateWork:
    return FRONT.prepare("chat" if isinstance(ask, Chat) else "complete", ask).work


def chat(**kwargs: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": "the quick"}], **kwargs)


class Told:
    """What a presenter made of events: per choice the text, the deltas, the logprobs and the reason."""

    def __init__(self, ask: Chat | Complete, front: GenerateFront = FRONT) -> None:
        task = "chat" if isinstance(ask, Chat) else "complete"
        prepared = front.prepare(task, ask)
        self.work: GenerateWork = prepared.work
        self.presenter = front.present(task, ask, prepared)
        self.answers: list[msgspec.Struct] = []

    def feed(self, *events: Any) -> Told:
        for event in events:
            self.answers += self.presenter.feed(event)
        return self

    def tokens(self, branch: int, ids: list[int], **kwargs: Any) -> Told:
        """The ids one event each, as a model makes them."""
        logprobs = [-0.5] if self.work.logprobs is not None else None
        for id in ids:
            self.feed(Tokens("job", branch, [id], **{"logprobs": logprobs, **kwargs}))
        return self

    def end(self, branch: int, reason: str) -> Told:
        return self.feed(BranchEnded("job", branch, reason))

    def deltas(self, index: int = 0) -> list[TextDelta]:
        return [each for each in self.answers if isinstance(each, TextDelta) and each.index == index]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas(index))

    def reason(self, index: int = 0) -> str | None:
        reasons = [each.reason for each in self.answers if isinstance(each, ChoiceEnded) and each.index == index]
        assert len(reasons) <= 1
        return reasons[0] if reasons else None

    @property
    def done(self) -> Done:
        assert [type(each) for each in self.answers].count(Done) == 1
        assert isinstance(self.answers[-1], Done)
        return self.answers[-1]


ENDED = Ended("job", Receipt(queued_ms=1.0, cached_units=3))


class TestAsks:
    """What reaches the engine is checked and resolved; what is wrong is named."""

    def test_a_chat_is_templated_without_doubled_special_tokens(self):
        assert prepare(chat()).prompts == [[*encode("the quick"), EOS]]

    def test_prompts_are_texts_or_token_ids(self):
        assert prepare(Complete(prompts=["the", [5, 6]])).prompts == [encode("the"), [5, 6]]

    def test_the_answer_gets_the_rest_of_the_context(self):
        """max_tokens of a billion reserves nothing: the engine hears what fits."""
        prompt = len(prepare(chat()).prompts[0])
        for wanted, given_to_engine in {None: CONTEXT - prompt, 10**9: CONTEXT - prompt, 7: 7}.items():
            assert prepare(chat(max_tokens=wanted)).max_tokens == [given_to_engine]
        assert prepare(Complete(prompts=[[1] * 99, [1] * 10], max_tokens=50)).max_tokens == [1, 50]

    @pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 50_000])
    def test_a_prompt_too_long_names_both_numbers(self, length: int):
        with pytest.raises(ContextTooLong, match=rf"{CONTEXT} tokens.*has {length} tokens") as caught:
            prepare(Complete(prompts=[[1] * length]))
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    def test_megabytes_are_refused_without_encoding_them(self):
        with pytest.raises(ContextTooLong, match="at least"):
            prepare(Chat(messages=[{"role": "user", "content": "word " * 3_000_000}]))

    @pytest.mark.parametrize("prompts", [[""], [[]], ["a", ""], []])
    def test_an_empty_prompt_is_refused(self, prompts: list[Any]):
        with pytest.raises(InvalidRequest):
            prepare(Complete(prompts=prompts))

    @pytest.mark.parametrize("wrong", [-1, VOCABULARY, 2**40])
    def test_a_token_outside_the_vocabulary_is_named_with_its_position(self, wrong: int):
        with pytest.raises(InvalidRequest, match=rf"prompt\[1\]\[2\] is {wrong}") as caught:
            prepare(Complete(prompts=["a", [1, 2, wrong]]))
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequest, match="stop_token_ids"):
            prepare(chat(stop_token_ids=[wrong]))
        with pytest.raises(InvalidRequest, match="logit_bias"):
            prepare(chat(sampling=Sampling(logit_bias={wrong: 1.0})))

    def test_padded_vocabulary_may_be_used(self):
        """The embedding table is larger than the tokenizer: such ids exist for the model."""
        assert prepare(Complete(prompts=[[VOCABULARY - 1]])).prompts == [[VOCABULARY - 1]]

    @pytest.mark.parametrize(
        "wrong", [{"n": 0}, {"n": 5000}, {"max_tokens": 0}, {"max_tokens": -1}, {"stop": [""]}, {"logprobs": -1}]
    )
    def test_what_makes_no_sense_is_refused(self, wrong: dict[str, Any]):
        with pytest.raises(InvalidRequest) as caught:
            prepare(chat(**wrong))
        assert caught.value.param == next(iter(wrong))

    def test_what_exceeds_the_vocabulary_is_clamped(self):
        work = prepare(chat(sampling=Sampling(top_k=10**9), logprobs=10**9))
        assert (work.sampling.top_k, work.logprobs) == (VOCABULARY, VOCABULARY)

    def test_a_model_without_a_template_refuses_chats(self):
        with pytest.raises(InvalidRequest, match="no chat template"):
            GenerateFront(TOKENIZER, None, CONTEXT, VOCABULARY).prepare("chat", chat())

    def test_seeds(self):
        """Choices differ and can each be had again alone; without a seed no two branches share one."""
        assert prepare(chat(n=3, sampling=Sampling(seed=41))).seeds == [41, 42, 43]
        assert prepare(Complete(prompts=["a", "b"], n=2, sampling=Sampling(seed=5))).seeds == [5, 6, 5, 6]
        assert all(0 <= seed < 2**63 for seed in prepare(chat(n=2, sampling=Sampling(seed=-1))).seeds)
        assert len({*prepare(chat(n=50)).seeds, *prepare(chat(n=50)).seeds}) == 100

    def test_end_tokens_stop_unless_ignored(self):
        assert prepare(chat(stop_token_ids=[9])).stop_token_ids == [EOS, 9]
        assert prepare(chat(ignore_eos=True, stop_token_ids=[9])).stop_token_ids == [9]


class TestAnswers:
    """Events become deltas, reasons and usage."""

    def test_an_answer_that_ends_by_itself(self):
        told = Told(chat()).tokens(0, [*encode("lazy dog"), EOS]).end(0, "stop").feed(ENDED)
        assert (told.text(), told.reason()) == ("lazy dog", "stop")
        usage = told.done.usage
        assert usage.input_tokens == len(told.work.prompts[0])
        assert usage.output_tokens == len(encode("lazy dog")) + 1, "the stop token was generated, so it counts"
        assert usage.cached_tokens == 3 and told.done.receipt == ENDED.receipt
        assert not any(delta.text == "" for delta in told.deltas())

    def test_an_answer_cut_by_its_limit(self):
        told = Told(chat()).tokens(0, encode("the")).end(0, "length").feed(ENDED)
        assert (told.text(), told.reason()) == ("the", "length")

    def test_ignored_end_tokens_are_text(self):
        told = Told(chat(ignore_eos=True)).tokens(0, [*encode("a"), EOS, *encode("b")]).end(0, "length")
        assert told.text() == "a<|im_end|>b"

    def test_a_stop_token_is_not_text(self):
        dot = encode(".")[0]
        told = Told(chat(stop_token_ids=[dot])).tokens(0, [*encode("a"), dot]).end(0, "stop").feed(ENDED)
        assert (told.text(), told.done.usage.output_tokens) == ("a", 2)

    def test_half_a_character_at_the_end_is_flushed(self):
        told = Told(chat()).tokens(0, encode("a😀")[:-1]).end(0, "length")
        assert told.text() == "a\ufffd" and told.deltas()[0].text == "a"

    def test_a_stop_string_across_tokens_ends_the_choice_at_once(self):
        """Cut exactly before it, tokens counted up to its last one, and the engine told to stop the branch."""
        ids = [*encode("the"), *encode("x"), *encode("E"), *encode("N"), *encode("D"), *encode("more")]
        told = Told(chat(stop=["END"])).tokens(0, ids).feed(ENDED)
        assert (told.text(), told.reason()) == ("thex", "stop")
        assert told.presenter.take_unneeded() == [0]
        assert told.done.usage.output_tokens == len(ids) - len(encode("more"))

    def test_a_false_start_of_a_stop_string_is_released_at_the_end(self):
        told = Told(chat(stop=["END"])).tokens(0, encode("E") + encode("N")).end(0, "length")
        assert (told.text(), told.reason()) == ("EN", "length")
        assert told.deltas()[0].text == "EN"

    def test_choices_end_on_their_own(self):
        told = Told(chat(n=3, stop=["x"]))
        told.tokens(1, encode("bx")).tokens(0, encode("a")).tokens(1, encode("ignored")).tokens(2, encode("c"))
        assert (told.reason(1), told.reason(0)) == ("stop", None)
        assert told.presenter.take_unneeded() == [1], "choice 1 met its stop string, the others go on"
        assert told.presenter.take_unneeded() == []
        told.end(0, "length").end(2, "stop").feed(ENDED)
        assert [told.text(i) for i in range(3)] == ["a", "b", "c"]
        assert [told.reason(i) for i in range(3)] == ["length", "stop", "stop"]
        assert told.done.usage.output_tokens == 4

    def test_the_engines_receipt_is_used_when_it_ends_the_job(self):
        told = Told(chat(n=2)).end(0, "length").end(1, "length")
        assert told.feed(ENDED).done.receipt == ENDED.receipt

    @settings(deadline=None)
    @given(
        text=st.text(alphabet="aé😀 .END", min_size=1, max_size=20),
        stops=st.lists(st.text(alphabet="aé😀 .END", min_size=1, max_size=3), max_size=2),
        sizes=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    )
    def test_how_tokens_are_grouped_changes_nothing(self, text: str, stops: list[str], sizes: list[int]):
        """One token per event or several (speculation), the caller reads the same and pays the same."""
        ids = encode(text)
        alone = Told(chat(stop=stops, logprobs=1)).tokens(0, ids).end(0, "length").feed(ENDED)
        grouped = Told(chat(stop=stops, logprobs=1))
        rest = iter(ids)
        for size in sizes:
            group = list(itertools.islice(rest, size))
            if group:
                grouped.feed(Tokens("job", 0, group, [-0.5] * len(group), [[] for _ in group]))
        grouped.feed(Tokens("job", 0, remaining := list(rest), [-0.5] * len(remaining), None))
        grouped.end(0, "length").feed(ENDED)
        assert alone.reason() == ("stop" if any(stop in text for stop in stops) else "length")
        assert alone.text() == text or alone.reason() == "stop"
        assert (alone.text(), alone.reason()) == (grouped.text(), grouped.reason())
        assert (scores(alone), alone.done.usage) == (scores(grouped), grouped.done.usage)


def scores(told: Told) -> list[tuple[str, float]]:
    return [(each.token, each.logprob) for delta in told.deltas() for each in delta.logprobs or ()]


class TestLogprobs:
    """Exact bytes, finite numbers, only for text that is shown."""

    def test_bytes_of_split_characters_join(self):
        told = Told(chat(logprobs=0)).tokens(0, encode("a😀é")).end(0, "length")
        told_scores = [each for delta in told.deltas() for each in delta.logprobs]
        assert b"".join(each.data for each in told_scores) == "a😀é".encode()
        assert len(told_scores) == len(encode("a😀é"))

    def test_alternatives_come_best_first_and_finite(self):
        a, b = encode("a")[0], encode("b")[0]
        told = Told(chat(logprobs=2))
        told.feed(Tokens("job", 0, [a, a, a], [-math.inf, math.nan, 1e-6], [[(a, -0.1), (b, -math.inf)], [], []]))
        told_scores = told.deltas()[0].logprobs
        assert [(other.token, other.logprob) for other in told_scores[0].top] == [("a", -0.1), ("b", -9999.0)]
        assert [each.logprob for each in told_scores] == [-9999.0, -9999.0, 0.0]

    def test_zero_means_the_chosen_token_only_and_none_means_off(self):
        told = Told(chat(logprobs=0)).tokens(0, encode("a"), top=None).end(0, "length")
        assert [each.top for each in told.deltas()[0].logprobs] == [[]]
        assert all(delta.logprobs is None for delta in Told(chat()).tokens(0, encode("a")).deltas())

    def test_held_back_text_holds_back_its_logprobs(self):
        told = Told(chat(logprobs=0, stop=["END"])).tokens(0, encode("a") + encode("E") + encode("N"))
        assert [token for token, _ in scores(told)] == ["a"]
        told.tokens(0, encode("D"))
        assert [token for token, _ in scores(told)] == ["a"], "tokens of the stop string are not shown"

    def test_a_stop_token_has_no_logprob(self):
        told = Told(chat(logprobs=0)).tokens(0, [*encode("a"), EOS]).end(0, "stop")
        assert [token for token, _ in scores(told)] == ["a"]


class TestEcho:
    """Completions may begin with their prompt."""

    def test_each_choice_begins_with_its_prompt(self):
        ask = Complete(prompts=["the dog", encode("a fox")], n=2, echo=True, stop=["dog"])
        told = Told(ask)
        for branch in range(4):
            told.tokens(branch, encode(" b")).end(branch, "length")
        assert [told.text(i) for i in range(4)] == ["the dog b", "the dog b", "a fox b", "a fox b"]

    def test_an_echo_of_tokens_that_end_inside_a_character(self):
        ids = encode("a😀b")
        told = Told(Complete(prompts=[ids[:2]], echo=True)).tokens(0, ids[2:]).end(0, "length")
        assert told.text() == "a😀b"

    def test_an_echo_with_logprobs_scores_the_prompt(self):
        ask = Complete(prompts=["ab"], echo=True, logprobs=1)
        told = Told(ask)
        assert told.work.score_prompts and len(told.work.prompts[0]) == 2
        told.feed(Output("job", SCORES, pack(PromptScores(0, [-2.0], [[(5, -1.0)]]))))
        told.tokens(0, encode("c")).end(0, "length")
        assert scores(told) == [("a", -math.inf), ("b", -2.0), ("c", -0.5)]

    def test_without_echo_the_prompt_never_appears(self):
        ids = encode("a😀b")
        told = Told(Complete(prompts=[ids[:2]])).tokens(0, ids[2:]).end(0, "length")
        assert told.text() == "😀b"


class TestEmbed:
    """Inputs keep their order and their special tokens; limits are named."""

    def embed(self, *inputs: Any, **kwargs: Any) -> list[list[int]]:
        work = EMBED.prepare("embed", Embed(inputs=list(inputs), **kwargs)).work
        return [ids.tolist() for ids in np.split(work.ids, work.lengths.cumsum()[:-1])]

    def test_texts_get_special_tokens_and_token_ids_are_taken_as_they_are(self):
        assert self.embed("the dog", [5, 6]) == [WORDS.encode("the dog"), [5, 6]]

    @pytest.mark.parametrize("text", ["the dog " * 20, [5] * 17])
    def test_a_long_input_is_refused_or_cut_on_request(self, text: Any):
        with pytest.raises(ContextTooLong, match=r"input\[1\] has \d+ tokens; this model reads 16"):
            self.embed("a", text)
        cut = self.embed("a", text, truncate=True)[1]
        assert len(cut) == 16 and (cut[-1] == WORDS.find("[SEP]") or cut == [5] * 16)

    @pytest.mark.parametrize(
        "inputs", [[], [""], [[]], ["a", ""], ["a"] * 2049, [[10**6]], [[-1]]], ids=lambda inputs: str(inputs)[:20]
    )
    def test_what_cannot_be_embedded_is_refused(self, inputs: list[Any]):
        with pytest.raises(InvalidRequest):
            self.embed(*inputs)

    @pytest.mark.parametrize("dimensions", [0, -1, 9])
    def test_dimensions_beyond_the_model_are_refused(self, dimensions: int):
        with pytest.raises(InvalidRequest, match="from 1 to 8"):
            self.embed("a", dimensions=dimensions)

    def test_vectors_are_told_in_order(self):
        ask = Embed(inputs=["a", "b", "c"])
        prepared = EMBED.prepare("embed", ask)
        presenter = EMBED.present("embed", ask, prepared)
        answers = []
        for index in (2, 0, 1):
            vectors = Vectors(index, 8, np.full(8, index, "<f4").tobytes())
            answers += presenter.feed(Output("job", VECTORS, pack(vectors)))
        answers += presenter.feed(ENDED)
        assert [answer.index for answer in answers[:-1]] == [0, 1, 2]
        assert answers[-1].usage.input_tokens == len(prepared.work.ids)
