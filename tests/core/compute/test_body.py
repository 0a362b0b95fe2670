"""Models without a head: rebuilt by structure, as encoders or as decoders, and equal to transformers'."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from transformers import (
    DistilBertConfig,
    DistilBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaModel,
    MPNetConfig,
    MPNetModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

from polymux.core.compute.body import Body, TransformersBody, pack_texts
from polymux.core.compute.device import Device
from polymux.core.compute.fast.body import FastBody
from polymux.core.compute.fast.encoder import FastEncoder
from polymux.core.compute.int8 import Int8Linear
from polymux.core.compute.load import prepare_body
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.errors import ConfigError
from polymux.core.testing.tiny import VOCABULARY, build, tiny_bert
from polymux.core.text.flat import flatten

SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}


def roberta() -> torch.nn.Module:
    return RobertaModel(RobertaConfig(**SIZES, **HEADS, type_vocab_size=1))


def distilbert() -> torch.nn.Module:
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
    return DistilBertModel(DistilBertConfig(vocab_size=VOCABULARY, **sizes))


def renamed() -> torch.nn.Module:
    """A BERT that is called something else."""
    model = tiny_bert()
    model.__class__ = type("NobodyHasHeardOfModel", (type(model),), {})
    return model


def qwen3() -> torch.nn.Module:
    return Qwen3Model(Qwen3Config(**SIZES, **HEADS, **GROUPED))


def llama() -> torch.nn.Module:
    return LlamaModel(LlamaConfig(**SIZES, **HEADS, num_key_value_heads=2))


def gemma3() -> torch.nn.Module:
    """Sees both ways, like EmbeddingGemma."""
    return Gemma3TextModel(
        Gemma3TextConfig(**SIZES, **HEADS, **GROUPED, sliding_window=6, use_bidirectional_attention=True)
    )


def mpnet() -> torch.nn.Module:
    """Adds a bias to the scores by distance: a structure that the fast tier does not know."""
    return MPNetModel(MPNetConfig(**SIZES, **HEADS))


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in (1, 9, 30)]


def hidden_states(body: Body) -> torch.Tensor:
    packed = pack_texts(*flatten(texts()), Device(), SdpaAttention())
    with torch.inference_mode():
        return body.run(packed.ids, packed.places, None, packed.context)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (tiny_bert, FastEncoder),
        (roberta, FastEncoder),
        (distilbert, FastEncoder),
        (renamed, FastEncoder),
        (qwen3, FastBody),
        (llama, FastBody),
        (gemma3, FastBody),
    ],
    ids=lambda value: value.__name__,
)
def test_whoever_has_the_structure_is_rebuilt_and_says_the_same(
    make: Callable[[], torch.nn.Module], kind: type[Body]
) -> None:
    model = build(make)
    fast = prepare_body(copy.deepcopy(model))
    assert isinstance(fast, kind)
    with torch.inference_mode():
        alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    torch.testing.assert_close(hidden_states(fast), torch.cat(alone), rtol=1e-5, atol=2e-5)


def test_an_unfamiliar_structure_stays_on_the_reference_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    body = prepare_body(build(mpnet))
    assert isinstance(body, TransformersBody)
    assert "MPNetModel runs on the reference tier: as an encoder, a layer has no q" in caplog.text
    assert "as a decoder, its decoder has no embed_tokens" in caplog.text


@pytest.mark.parametrize(
    "make",
    [
        lambda: LlamaModel(LlamaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=4)),
        lambda: RobertaModel(RobertaConfig(**SIZES, num_attention_heads=4, max_position_embeddings=6)),
    ],
    ids=["llama", "roberta"],
)
def test_a_model_of_a_few_positions_is_checked_within_them(make: Callable[[], torch.nn.Module]) -> None:
    """A depth decoder has no more than codebooks."""
    assert not isinstance(prepare_body(build(make)), TransformersBody)


def test_quantized_layers_are_merged_and_stay_close() -> None:
    model = build(tiny_bert)
    quantized = prepare_body(copy.deepcopy(model), quantization="int8")
    assert isinstance(quantized, FastEncoder) and isinstance(quantized.layers[0].qkv, Int8Linear)
    exact, found = hidden_states(TransformersBody(model)), hidden_states(quantized)
    assert torch.cosine_similarity(exact, found).min() > 0.97 and not torch.equal(exact, found)


def test_the_reference_tier_can_be_asked_for_and_others_cannot() -> None:
    assert isinstance(prepare_body(build(tiny_bert), tier="reference"), TransformersBody)
    with pytest.raises(ConfigError, match="tier 'faster' is unknown"):
        prepare_body(build(tiny_bert), tier="faster")


def test_texts_are_packed_end_to_end() -> None:
    packed = pack_texts(*flatten([[7, 8], [9], [5, 6, 7]]), Device(), SdpaAttention())
    assert packed.ids.tolist() == [7, 8, 9, 5, 6, 7] and packed.places.tolist() == [0, 1, 0, 0, 1, 2]
    assert packed.starts.tolist() == list(itertools.accumulate([0, 2, 1, 3])) == packed.context.rows.starts
