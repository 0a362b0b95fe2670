"""Attention inside packed rows: the backends that do only this, and the choice between all that can."""

from polymux.core.compute.packed.backends import PACKED_BACKENDS
from polymux.core.compute.packed.choice import choose_packed

__all__ = ["PACKED_BACKENDS", "choose_packed"]
