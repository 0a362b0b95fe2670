"""Who runs the modules: a watch over every forward pass of the process, for a test that only stages launch them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.stage import Stage


class Watch:
    """How often modules of each class ran inside of a launch, and outside of any."""

    def __init__(self) -> None:
        self.inside: Counter[str] = Counter()
        self.outside: Counter[str] = Counter()
        self.depth = 0

    def see(self, module: torch.nn.Module, _: Any) -> None:
        counter = self.inside if self.depth else self.outside
        counter[type(module).__name__] += 1


@contextmanager
def watch_forwards() -> Iterator[Watch]:
    """Watch every torch module's forward pass until the block ends. Stages made before it are watched too."""
    watch = Watch()
    places = [(OneShotStage, "_run")]  # also where a pass on the host enters
    places += [(stage, verb) for stage in _stages(Stage) for verb in ("launch", "join") if verb in vars(stage)]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, original in originals:
        setattr(owner, name, _enter(watch, original))
    handle = torch.nn.modules.module.register_module_forward_pre_hook(watch.see)
    try:
        yield watch
    finally:
        handle.remove()
        for owner, name, original in originals:
            setattr(owner, name, original)


def _enter(watch: Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **keywords: Any) -> Any:
        watch.depth += 1
        try:
            return original(*args, **keywords)
        finally:
            watch.depth -= 1

    return run


def _stages(kind: type[Stage]) -> Iterator[type[Stage]]:
    for stage in kind.__subclasses__():
        yield stage
        yield from _stages(stage)
