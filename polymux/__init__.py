"""polymux serves every generative modality through one runtime, behind one OpenAI-compatible gateway.

Importing this package is cheap: it never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymux.core.errors import PolymuxError
from polymux.core.hooks import hookimpl
from polymux.core.vocabulary import API_LEVEL

if TYPE_CHECKING:
    from polymux.core.client import Client

__all__ = ["API_LEVEL", "Client", "PolymuxError", "__version__", "hookimpl"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Client":  # plugins import this package; most of them need no HTTP client
        from polymux.core.client import Client

        return Client
    raise AttributeError(f"module 'polymux' has no attribute {name!r}")
