"""The fast tier: recognised by structure, proven when it loads, and left aside where it would be wrong."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from polymux.core.batch.tokens import TokenBatch, TokenModel
from polymux.core.compute.attention import PackedContext
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.fast import build as build_module
from polymux.core.compute.fast.operations import Operations, TallLinear
from polymux.core.compute.int8 import Int8Linear
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.testing.tiny import DECODERS, VOCABULARY, build, tiny_llama

LENGTHS = (1, 9, 20)

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_mixture() -> torch.nn.Module:
    """Routed experts, two of four per token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **SIZES, **experts))


def tiny_phi3() -> torch.nn.Module:
    """Its projections are merged already: a structure that the fast tier does not know."""
    return Phi3ForCausalLM(Phi3Config(vocab_size=VOCABULARY, pad_token_id=0, **SIZES))


def tiny_renamed() -> torch.nn.Module:
    """A Llama that is called something else."""
    model = tiny_llama()
    model.__class__ = type("NobodyHasHeardOfForCausalLM", (LlamaForCausalLM,), {})
    model.config.model_type = "nobody_has_heard_of"
    return model


def forward(decoder: TokenModel) -> torch.Tensor:
    """Logits at every place of three rows packed together."""
    ids = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    everything = torch.arange(len(ids))
    context = PackedContext(SdpaAttention(), [0, *itertools.accumulate(LENGTHS)])
    with torch.inference_mode():
        return decoder.forward(TokenBatch(ids, positions, everything, everything, context))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [*DECODERS.values(), tiny_mixture, tiny_renamed], ids=lambda make: make.__name__)
def test_whoever_has_the_structure_is_rebuilt_and_says_the_same(make: Callable[[], torch.nn.Module]) -> None:
    model = build(make)
    fast = accelerate(TransformersDecoder(copy.deepcopy(model)))
    assert isinstance(fast, FastDecoder)
    torch.testing.assert_close(forward(fast), forward(TransformersDecoder(model)), rtol=1e-4, atol=1e-4)


def test_an_unfamiliar_structure_stays_on_the_reference_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    reference = TransformersDecoder(build(tiny_phi3))
    assert accelerate(reference) is reference
    assert "Phi3ForCausalLM runs on the reference tier: attention has no q, k, v and o projections" in caplog.text


def test_a_rebuilt_model_that_computes_something_else_is_not_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Operations):
        def gate(self, act: torch.nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
            return act(gate_up.chunk(2, dim=-1)[0])

    monkeypatch.setattr(build_module, "choose_operations", lambda device, dtype: Wrong())
    reference = TransformersDecoder(build(tiny_llama))
    assert accelerate(reference) is reference
    assert "put together from its parts it computes something else" in caplog.text


def test_quantized_layers_come_in_after_the_proof_and_stay_close() -> None:
    reference = TransformersDecoder(build(tiny_llama))
    quantized = accelerate(reference, Int8Linear)
    assert isinstance(quantized, FastDecoder) and isinstance(quantized.layers[0].qkv, Int8Linear)
    expected, found = forward(reference).log_softmax(-1), forward(quantized).log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1)
    assert divergence.mean() < 0.02
    assert not torch.equal(expected, found)


@pytest.mark.parametrize("rows", [0, 1, 2, 9])
def test_a_head_multiplies_like_any_layer(rows: int) -> None:
    """However it is computed: (rows, out), contiguous, with the weight shared and not copied."""
    weight, x = torch.randn(200, 8), torch.randn(rows, 8)
    head = Operations().linear(weight, None)
    assert isinstance(head, TallLinear) and head.weight.data_ptr() == weight.data_ptr()
    assert head(x).is_contiguous()
    torch.testing.assert_close(head(x), torch.nn.functional.linear(x, weight))
    torch.testing.assert_close(head(x[None]), torch.nn.functional.linear(x[None], weight))
    assert not isinstance(Operations().linear(weight, torch.zeros(200)), TallLinear)
    assert not isinstance(Operations().linear(weight.half(), None), TallLinear)
