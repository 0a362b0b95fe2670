"""What core itself brings, declared through the same hooks as a stranger's plugin."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polymux.core.hooks import hookimpl
from polymux.core.models import ModelSource
from polymux.core.vocabulary import Task

if TYPE_CHECKING:
    from polymux.core.compute.attention import AttentionBackend

POLYMUX_API_LEVEL = 1


@hookimpl
def tasks() -> list[Task]:
    from polymux.core.tasks import BUILT_IN  # needs numpy, which would double the time of `polymux --help`

    return list(BUILT_IN)


@hookimpl
def model_sources() -> list[ModelSource]:
    from polymux.core.models.sources import BUILT_IN_SOURCES

    return list(BUILT_IN_SOURCES)


@hookimpl
def attention_backends() -> list[AttentionBackend]:
    import torch

    from polymux.core.compute.cpu.attention import NativeAttention
    from polymux.core.compute.packed import PACKED_BACKENDS

    # triton comes with torch's CUDA builds; where it can do nothing it would cost two seconds and 150 MB
    if not torch.cuda.is_available() or find_spec("triton") is None:
        return [NativeAttention(), *PACKED_BACKENDS]
    from polymux.core.compute.triton.attention import TritonAttention

    return [TritonAttention(), NativeAttention(), *PACKED_BACKENDS]


@hookimpl
def checks() -> list[Path]:
    from polymux.core.testing import conformance

    return sorted(Path(conformance.__file__).parent.glob("check_*.py"))


@hookimpl
def commands(app: Any) -> None:
    from polymux.core.cli.verbs import add_verbs

    add_verbs(app)
