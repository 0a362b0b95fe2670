"""Devices: results come back in order, and the lagged CPU catches a loop that reads them too early."""

from __future__ import annotations

import pytest
import torch

from polymux.core.compute.device import Device, LaggedCpu, open_device
from polymux.core.errors import ConfigError, InternalError


def test_a_lagged_result_is_legal_once_the_next_launch_is_out() -> None:
    device = LaggedCpu()
    copy = device.copy_to_host({"tokens": torch.tensor([1])})
    device.launched()
    with pytest.raises(InternalError, match="before the next launch"):
        copy.read()
    device.copy_to_host({})
    device.launched()
    assert copy.read()["tokens"].tolist() == [1]


def test_a_lagged_result_is_legal_once_nothing_more_can_be_launched() -> None:
    device = LaggedCpu()
    copy = device.copy_to_host({"tokens": torch.tensor([1])})
    device.launched()
    device.drained()
    assert copy.read()["tokens"].tolist() == [1]


def test_a_lagged_result_is_that_of_its_own_launch() -> None:
    """Later launches overwrite the device's tensors; the copy keeps what it saw."""
    device = LaggedCpu()
    tensor = torch.tensor([1])
    copy = device.copy_to_host({"tokens": tensor})
    tensor += 1
    device.drained()
    assert copy.read()["tokens"].tolist() == [1]


def test_the_cpu_answers_at_once() -> None:
    copy = Device().copy_to_host({"tokens": torch.tensor([1])})
    assert copy.read()["tokens"].tolist() == [1]


def test_a_device_that_is_not_there_is_a_setting_to_fix() -> None:
    assert open_device("cpu").torch.type == "cpu"
    with pytest.raises(ConfigError, match="unknown device"):
        open_device("abacus")
    if not torch.cuda.is_available():
        assert open_device("auto").torch.type == "cpu"
        with pytest.raises(ConfigError, match="no CUDA device"):
            open_device("cuda:1")
