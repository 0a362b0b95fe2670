"""The kernels of FLUX, Wan and UNets against plain torch: on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/modalities/diffusion/test_flux_kernels.py   (without a card)
"""

from __future__ import annotations

import os

import pytest
import torch

from polymux.core.batch.denoiser import DenoiseBatch
from polymux.core.testing.denoising import tiny_flux
from polymux.core.testing.pipelines import tiny_unet, tiny_wan
from polymux.modalities.diffusion import encoders, flux, unet, wan
from polymux.modalities.diffusion.merged_flux import TorchSteps

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.modalities.diffusion.flux_kernels import KernelSteps  # noqa: E402
from polymux.modalities.diffusion.merged import rotate_pairs  # noqa: E402
from polymux.modalities.diffusion.unet_kernels import norm_groups  # noqa: E402
from polymux.modalities.diffusion.wan_kernels import turn_whole  # noqa: E402

DTYPES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
ROWS, HEADS, DIM = 3, 6, 16
WIDTH = HEADS * DIM


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    bound = DTYPES[ours.dtype]
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def parts(dtype: torch.dtype) -> list[torch.Tensor]:
    """Columns of one matrix, as the model cuts them."""
    return list(draw(ROWS, 7 * WIDTH, dtype=dtype)[:, WIDTH:].chunk(6, -1))


def test_norms_and_sums(dtype: torch.dtype, parts: list[torch.Tensor]) -> None:
    hidden, more = draw(ROWS, 5, WIDTH, dtype=dtype), draw(ROWS, 9, WIDTH, dtype=dtype)[:, 2:7]
    ours, theirs = KernelSteps(), TorchSteps()
    assert_near(ours.normalise(hidden, *parts[:2]), theirs.normalise(hidden, *parts[:2]))
    assert_near(ours.add(hidden, more, parts[2]), theirs.add(hidden, more, parts[2]))
    for own, other in zip(ours.add_normalise(hidden, more, *parts[:3]), theirs.add_normalise(hidden, more, *parts[:3])):
        assert_near(own, other)


def test_heads_are_normalised_and_turned(dtype: torch.dtype) -> None:
    angles = draw(12, 1, DIM // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    weights = draw(4, DIM, dtype=dtype)
    text, picture = draw(ROWS, 5, 3 * WIDTH, dtype=dtype), draw(ROWS, 7, 3 * WIDTH, dtype=dtype)
    streams = [(text, weights[0], weights[1]), (picture, weights[2], weights[3])]
    for own, other in zip(KernelSteps().turn(streams, 1e-6, cos, sin), TorchSteps().turn(streams, 1e-6, cos, sin)):
        assert_near(own, other)
    wide = draw(ROWS, 12, 4 * WIDTH, dtype=dtype)
    before = wide.clone()
    expected = TorchSteps().turn([(wide[..., : 3 * WIDTH], weights[0], weights[1])], 1e-6, cos, sin)
    expected = [each.clone() for each in expected]
    turned = KernelSteps().turn([(wide[..., : 3 * WIDTH], weights[0], weights[1])], 1e-6, cos, sin)
    for own, other in zip(turned, expected):
        assert_near(own, other)
    assert torch.equal(wide[..., 2 * WIDTH :], before[..., 2 * WIDTH :]), "what is beside is not touched"


def test_the_activation_joins_what_attention_gave(dtype: torch.dtype) -> None:
    joined, inner = draw(ROWS, 5, WIDTH, dtype=dtype), draw(ROWS, 5, 7 * WIDTH, dtype=dtype)[..., 3 * WIDTH :]
    assert_near(KernelSteps().join(joined, inner), TorchSteps().join(joined, inner))


def test_all_heads_are_normalised_at_once(dtype: torch.dtype) -> None:
    angles = draw(5, 1, 6, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    weights = draw(2, 36, dtype=dtype)
    states = draw(ROWS, 5, 3 * 36, dtype=dtype)
    before = states.clone()
    turn_whole(states, weights, 1e-6, cos, sin)
    for part, weight in enumerate(weights):
        given = before[..., part * 36 :][..., :36].float()
        normed = torch.nn.functional.rms_norm(given, (36,), weight.float(), 1e-6).unflatten(-1, (3, 12))
        assert_near(states[..., part * 36 :][..., :36], rotate_pairs(normed, cos, sin).flatten(2).to(dtype))
    assert torch.equal(states[..., 72:], before[..., 72:]), "values stay as they are"


def test_groups_are_normalised_as_pixels_lie(dtype: torch.dtype) -> None:
    norm = torch.nn.GroupNorm(4, 72).to(DEVICE, dtype)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    pixels = draw(2, 72, 19, 15, dtype=dtype).to(memory_format=torch.channels_last)
    more = draw(2, 72, dtype=dtype)
    ours = norm_groups(pixels, norm, more, activate=True)
    theirs = torch.nn.functional.silu(norm.float()(pixels.float() + more.float()[:, :, None, None]))
    assert_near(ours, theirs.to(dtype))
    assert ours.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_a_unet_predicts_the_same(kind: str) -> None:
    torch.manual_seed(3)
    network = tiny_unet(kind)
    for name, parameter in network.named_parameters():
        if "norm" in name:  # whose weights are ones and zeros in a new model
            torch.nn.init.normal_(parameter, 0.8, 0.3)
    text = network.config.cross_attention_dim
    conditions = [
        {encoders.PROMPT: torch.randn(7, text), encoders.POOLED: torch.randn(16), unet.SIZES: torch.rand(6) * 64}
        for _ in range(2)
    ]
    conditions = [{name: value.to(DEVICE) for name, value in each.items()} for each in conditions]
    times = torch.tensor([900.0, 20], device=DEVICE)
    batch = DenoiseBatch(torch.randn(2, 4, 12, 10).to(DEVICE), times, conditions)
    model = unet.UNetDenoiser(network.to(DEVICE))
    assert model.fits_kernels
    with torch.inference_mode():
        before = model.forward(batch)
        assert model.merge(steps=KernelSteps())
        torch.testing.assert_close(model.forward(batch), before, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_clip_is_predicted_the_same(rows: int) -> None:
    torch.manual_seed(3)
    conditions = [{encoders.PROMPT: torch.randn(7, 32).to(DEVICE)} for _ in range(rows)]
    latents = torch.randn(rows, 4, 3, 4, 6).to(DEVICE)
    batch = DenoiseBatch(latents, torch.linspace(900, 20, rows, device=DEVICE), conditions)
    transformer = tiny_wan(4)
    for name, parameter in transformer.named_parameters():
        if "norm" in name:  # whose weights are ones and zeros in a new model
            torch.nn.init.normal_(parameter, 0.8, 0.3)
    model = wan.WanDenoiser([transformer.to(DEVICE)])
    with torch.inference_mode():
        before = model.forward(batch)
        measured = model.modulate(model.embed(batch))
        model.merge(steps=KernelSteps())
        torch.testing.assert_close(model.forward(batch), before, atol=5e-5, rtol=1e-3)
        torch.testing.assert_close(model.modulate(model.embed(batch)), measured)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_a_model_predicts_the_same(rows: int, split: bool) -> None:
    torch.manual_seed(3)
    conditions = [
        {flux.PROMPT: torch.randn(5, 12), flux.POOLED: torch.randn(10), flux.GUIDANCE: torch.tensor(2.0 + row)}
        for row in range(rows)
    ]
    conditions = [{name: value.to(DEVICE) for name, value in each.items()} for each in conditions]
    times = torch.linspace(900, 20, rows, device=DEVICE)
    batch = DenoiseBatch(torch.randn(rows, 4, 6, 8).to(DEVICE), times, conditions)
    model = flux.FluxDenoiser(tiny_flux().to(DEVICE))
    with torch.inference_mode():
        before = model.forward(batch)
        model.merge(steps=KernelSteps(split=split))
        torch.testing.assert_close(model.forward(batch), before, atol=5e-5, rtol=1e-3)
