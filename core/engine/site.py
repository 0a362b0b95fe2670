"""Where a pipeline is loaded: the device, its arena, and the settings of this engine."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from polymux.core.cache.arena import SUPERPAGE, Arena
from polymux.core.cache.rules import StepCaching, open_rule
from polymux.core.cache.stepcache import StepRule
from polymux.core.compute.attention import AttentionBackend, choose_attention
from polymux.core.compute.device import Device
from polymux.core.compute.packed import choose_packed

if TYPE_CHECKING:
    from polymux.core.batch.drafting import Drafting
    from polymux.core.compute.quantization import Quantizer


@dataclass(frozen=True)
class SiteSettings:
    """How an engine runs, the same for all its pipelines."""

    max_rows: int = 64
    """Rows of one stage that may hold a slot at once."""
    max_units: int = 512
    """Tokens (or other units) of one launch."""
    block: int = 16
    """Tokens of one KV block."""
    cache_bytes: int = 1 << 30
    """Of the arena that all models share."""
    superpage: int = SUPERPAGE
    """Bytes of a piece of the arena, from which blocks are cut."""
    slice_ms: float = 50.0
    """What a launch is cut to while another stage waits for the device. While streams of its own stage wait, it is cut
    to between 0.3 and 1.5 times that (`Lane`)."""
    deterministic: bool = False
    """The same text alone and under load: prompts are computed in fixed chunks, whatever else runs."""


@dataclass
class Site:
    """What a pipeline finds when it is loaded: the device, its memory, and what plugins brought for both."""

    device: Device = field(default_factory=Device)
    """Where it computes."""
    settings: SiteSettings = field(default_factory=SiteSettings)
    """What the engine was told."""
    attention_backends: tuple[AttentionBackend, ...] = ()
    """What plugins and core bring, in the order of trying; likewise below."""
    quantizers: tuple[Quantizer, ...] = ()
    """Number formats."""
    draftings: tuple[Drafting, ...] = ()
    """Kinds of speculation."""
    step_caches: tuple[StepCaching, ...] = ()
    """Rules that skip denoising steps."""

    def __post_init__(self) -> None:
        self.arena = Arena(self.settings.cache_bytes, self.device.torch, self.settings.superpage)

    @cached_property
    def executor(self) -> Executor:
        """The runtime's own thread for passes that run beside the device."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="host-pass")

    @cached_property
    def cores(self) -> Executor:
        """The runtime's own threads, one for each core that torch may use, for such passes as share nothing."""
        return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="host-core")

    def attention(self, dtype: torch.dtype, dim: int) -> AttentionBackend:
        """The attention backend for heads of `dim` in `dtype` on this device."""
        return choose_attention(self.attention_backends, self.device.torch, dtype, dim)

    def packed_attention(self, dtype: torch.dtype, dim: int) -> AttentionBackend:
        """The same for rows that see only themselves: what is fastest here, where several can."""
        return choose_packed(self.attention_backends, self.device.torch, dtype, dim)

    def step_rule(self, options: Mapping[str, Any]) -> StepRule | None:
        """The rule that a model's options ask for under `step_cache`. Raises `ConfigError`."""
        return open_rule(options.get("step_cache"), self.step_caches)
