"""Quantizers and step caches come by name, a plugin's before core's own, and wrong names are refused with the known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polymux.core.cache.rules import StepCaching, open_rule
from polymux.core.cache.stepcache import FirstBlock, StepMask
from polymux.core.compute.device import Device
from polymux.core.compute.int8 import Int8Linear
from polymux.core.compute.quantization import Quantizer, find_quantization, quantize_model
from polymux.core.engine.load import open_site
from polymux.core.engine.site import SiteSettings
from polymux.core.errors import ConfigError
from polymux.core.testing.plugins import make_plugin, make_plugins

CPU = torch.device("cpu")


class Halves(Quantizer):
    """Rounds weights to multiples of a half."""

    name = "halves"

    def refuses(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "no"

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        with torch.no_grad():
            layer.weight.copy_((weight * 2).round() / 2)
            if bias is not None:
                layer.bias.copy_(bias)
        return layer


def test_every_linear_layer_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    assert quantize_model(model, "int8", CPU) is model
    assert type(model[0]) is Int8Linear and type(model[1][1]) is Int8Linear
    assert model(torch.randn(2, 8)).shape == (2, 4)
    assert quantize_model(model, None, CPU) is model


def test_a_plugin_brings_a_format() -> None:
    make = find_quantization("halves", CPU, [Halves()])
    assert make is not None
    assert torch.equal(make(torch.tensor([[0.6, -0.2]]), None).weight, torch.tensor([[0.5, -0.0]]))


def test_unknown_formats_and_wrong_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="'int3' is unknown: use int8, halves"):
        find_quantization("int3", CPU, [Halves()])
    with pytest.raises(ConfigError, match="cannot be used on meta"):
        find_quantization("int8", torch.device("meta"))


def test_rules_by_name() -> None:
    assert open_rule(None) is None
    assert open_rule("first-block") == FirstBlock()
    assert open_rule({"name": "first-block", "threshold": 0.2}) == FirstBlock(threshold=0.2)
    assert open_rule({"name": "mask", "mask": [True, False]}) == StepMask(mask=(True, False))


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("thrid", "is unknown: use deepcache, first-block"),
        ({"name": "mask"}, "mask"),
        ({"name": "teacache", "speed": 1}, "speed"),
    ],
)
def test_wrong_rules_are_refused(option: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_rule(option)


def test_a_site_has_what_plugins_bring() -> None:
    every_third = StepCaching("thirds", lambda: StepMask(mask=(True, False, False)))
    plugins = make_plugins(make_plugin("mine", quantizers=[Halves()], step_caches=[every_third]))
    site = open_site(plugins, Device(), SiteSettings(cache_bytes=1 << 18, superpage=1 << 14))
    assert [quantizer.name for quantizer in site.quantizers] == ["halves"]
    assert site.step_rule({"step_cache": "thirds"}) == StepMask(mask=(True, False, False))
    assert site.step_rule({}) is None


def test_what_is_no_quantizer_costs_its_plugin() -> None:
    plugins = make_plugins(make_plugin("mine", quantizers=["int3"]))
    assert plugins.quantizers() == []
    assert "a str where a Quantizer belongs" in str(plugins.find("mine").fault)
