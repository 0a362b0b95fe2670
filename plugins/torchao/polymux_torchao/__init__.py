"""Four-bit weights through torchao, as a plugin. Cheap to import, as every plugin is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polymux import hookimpl

if TYPE_CHECKING:
    from polymux.core.compute.quantization import Quantizer

POLYMUX_API_LEVEL = 1


@hookimpl
def quantizers() -> list[Quantizer]:
    from polymux_torchao.int4 import Int4

    return [Int4()]
