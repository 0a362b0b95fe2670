"""polymux serves every generative modality through one runtime, behind one OpenAI-compatible gateway.

Importing this package is cheap: it never imports torch.
"""

from polymux.core.errors import PolymuxError
from polymux.core.hooks import hookimpl
from polymux.core.vocabulary import API_LEVEL

__all__ = ["API_LEVEL", "PolymuxError", "__version__", "hookimpl"]

__version__ = "0.1.0"
