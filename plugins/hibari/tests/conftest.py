"""The voice's files, its front, and a loop that speaks with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from polymux_hibari import Speech
from polymux_hibari.source import HibariSource

from polymux.core.compute.device import Device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import ModelFiles
from polymux.core.pipeline import Front, Program
from polymux.core.testing.drive import Driver


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYMUX_HOME", str(tmp_path_factory.mktemp("home")))
        located = HibariSource().resolve("heart", sha256=None, report=print)
    return ModelFiles("hibari:heart", located.path)


@pytest.fixture(scope="session")
def front(files: ModelFiles) -> Front:
    return Speech().front(files, {})


@pytest.fixture
def load(files: ModelFiles) -> Callable[[Site], Program]:
    return lambda site: Speech().load(files, site, {})


@pytest.fixture
def drive(load: Callable[[Site], Program]) -> Callable[..., Driver]:
    """`drive(LaggedCpu)`: a loop that serves the voice as `voice`."""

    def open_loop(device: type[Device] = Device) -> Driver:
        site = Site(device(), SiteSettings(cache_bytes=1 << 20, superpage=1 << 18))
        return Driver(Loop(site, {"voice": load(site)}))

    return open_loop
