"""Low-rank adapters (LoRA, Hu et al. 2021): many of them beside one model's weights, several in one launch.

files    a PEFT folder, checked
layout   where the matrices of an adapter lie in its block of the arena
linear   a linear layer that adds what the rows' own adapters say
"""

from polymux.core.compute.adapters.files import AdapterFiles
from polymux.core.compute.adapters.layout import AdapterSet

__all__ = ["AdapterFiles", "AdapterSet"]
