"""Model references and the local files behind them: `resolve("hf:org/name")` gives a `ModelFiles`.

Weights are safetensors and nothing else: foreign formats are converted once, pickles and remote code are refused.
"""

from polymux.core.models.catalogue import Catalogue
from polymux.core.models.files import ModelFiles
from polymux.core.models.resolve import is_fetched, resolve
from polymux.core.models.source import Located, ModelSource

__all__ = ["Catalogue", "Located", "ModelFiles", "ModelSource", "is_fetched", "resolve"]
