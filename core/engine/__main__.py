"""`python -m polymux.core.engine`: an engine process; its spec is one line of JSON on standard input."""

from __future__ import annotations

import contextlib
from importlib import import_module

from polymux.core.engine.process import EngineLoop, main
from polymux.core.engine.spec import EngineSpec
from polymux.core.imports import importing
from polymux.core.vocabulary import Ready

LOAD = "polymux.core.engine.load"
"""It imports torch, which takes seconds: meanwhile the parent finds out what is to be served."""


def import_torch() -> None:
    # what is wrong with it is told where models are loaded
    with contextlib.suppress(Exception), importing():
        import_module(LOAD)


def load_models(spec: EngineSpec) -> tuple[EngineLoop, Ready]:
    from polymux.core.engine.load import load

    return load(spec)


main(load_models, import_torch)
