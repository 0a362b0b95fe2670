"""Every property of the loop holds with and without launch-ahead."""

from __future__ import annotations

import pytest

from polymux.core.compute.device import Device, LaggedCpu


@pytest.fixture(params=["cpu", "lagged"])
def device(request: pytest.FixtureRequest) -> Device:
    return LaggedCpu() if request.param == "lagged" else Device()
