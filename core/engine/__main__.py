"""`python -m polymux.core.engine`: an engine process; its spec is one line of JSON on standard input."""

from __future__ import annotations

from polymux.core.engine.process import EngineLoop, main
from polymux.core.engine.spec import EngineSpec
from polymux.core.vocabulary import Ready


def load_models(spec: EngineSpec) -> tuple[EngineLoop, Ready]:
    # torch takes seconds to import: by then the process has its name, and its signals are settled
    from polymux.core.engine.load import load

    return load(spec)


main(load_models)
