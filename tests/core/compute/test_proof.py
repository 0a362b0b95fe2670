"""What proves a rebuilt model in bfloat16: rounding of its own is no fault, another formula is."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm, silu
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.fast import build as build_module
from polymux.core.compute.fast.operations import Operations
from polymux.core.compute.fast.proof import widened
from polymux.core.compute.fast.structure import Norm


def deep_gemma3() -> Gemma3ForCausalLM:
    """As deep as the 4b model, with weights as a benchmark draws them: large norms, so much is made of rounding."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=301, hidden_size=128, intermediate_size=256, num_hidden_layers=34, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, sliding_window=8, query_pre_attn_scalar=32, pad_token_id=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.05) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model.to(torch.bfloat16)


class Fused(Operations):
    """Rounds where fused kernels do: once at the end of each step."""

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x.float(), norm.weight.shape, norm.weight.float(), norm.eps).to(x.dtype)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.float() + residual.float()
        return rms_norm(total, norm.weight.shape, norm.weight.float(), norm.eps).to(x.dtype), total.to(x.dtype)

    def gate(self, act: torch.nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (act(gate) * up).to(gate_up.dtype)


class WrongGate(Fused):
    """Nearly right: SiLU for the tanh form of GELU."""

    def gate(self, act: torch.nn.Module, gate_up: torch.Tensor) -> torch.Tensor:
        return super().gate(silu, gate_up)  # type: ignore[arg-type]


class WrongNorm(Fused):
    """Forgets the residual in every norm that follows one."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(x, norm), residual + x


def accelerated(operations: Operations, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(build_module, "choose_operations", lambda device, dtype: operations)
    return accelerate(TransformersDecoder(deep_gemma3()))


def test_rounding_elsewhere_is_no_reason_for_the_reference_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(accelerated(Fused(), monkeypatch), FastDecoder)


@pytest.mark.parametrize("wrong", [WrongGate, WrongNorm])
def test_another_formula_is_refused_in_bfloat16(wrong: type[Operations], monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(accelerated(wrong(), monkeypatch), TransformersDecoder)


def test_a_model_computes_in_float32_meanwhile_and_has_its_weights_back() -> None:
    model = deep_gemma3()
    weights = {name: (weight, weight.clone()) for name, weight in model.named_parameters()}
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        rounded = model(ids).logits
        with widened(model):
            exact = model(ids).logits
        again = model(ids).logits
        full = model.float()(ids).logits
    assert exact.dtype == torch.float32 and torch.equal(rounded, again)
    torch.testing.assert_close(exact, full, rtol=1e-2, atol=1e-2 * full.abs().max().item())
    assert {name: weight is weights[name][0] for name, weight in model.named_parameters()} == dict.fromkeys(
        weights, True
    )


def test_a_failure_within_leaves_the_weights_in_place() -> None:
    model = deep_gemma3()
    with pytest.raises(IndexError), widened(model):
        model(torch.tensor([[100_000]]))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
