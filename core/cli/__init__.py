"""The command line: the frame is here, its verbs come by hook (`serve` is the gateway's)."""

from polymux.core.cli.frame import Frame, run

__all__ = ["Frame", "run"]
