"""`python -m polymux.core.engine`: an engine process; its spec is one line of JSON on standard input."""

from __future__ import annotations

from polymux.core.engine.load import load
from polymux.core.engine.process import main

main(load)
