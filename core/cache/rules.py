"""Step caches by name: how a model's option `step_cache` becomes a rule.

step_cache = "first-block"                                    the rule's own defaults
step_cache = { name = "first-block", threshold = 0.12 }       with options
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polymux.core.cache.stepcache import DeepCache, FirstBlock, MagCache, StepMask, StepRule, TaylorSeer, TeaCache
from polymux.core.errors import ConfigError


@dataclass(frozen=True)
class StepCaching:
    """A rule with a name, registered through the `step_caches` hook."""

    name: str
    """What the option `step_cache` of a model says."""
    make: Callable[..., StepRule]
    """Called with the options beside the name. `TypeError` and `ValueError` mean that they are wrong."""


BUILT_IN = (
    StepCaching("first-block", FirstBlock),
    StepCaching("teacache", TeaCache),
    StepCaching("magcache", MagCache),
    StepCaching("mask", StepMask),
    StepCaching("deepcache", DeepCache),
    StepCaching("taylorseer", TaylorSeer),
)


def open_rule(option: str | Mapping[str, Any] | None, known: Iterable[StepCaching] = ()) -> StepRule | None:
    """The rule that a model's option asks for; None for none. `known` come before core's own.

    Raises `ConfigError` for an unknown name or for options that the rule does not take.
    """
    if option is None:
        return None
    options = {"name": option} if isinstance(option, str) else dict(option)
    name = options.pop("name", None)
    kinds = {kind.name: kind for kind in (*BUILT_IN, *known)}
    if name not in kinds:
        raise ConfigError(f"step cache {name!r} is unknown: use {', '.join(sorted(kinds))}", param="step_cache")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        return kinds[name].make(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"step cache {name!r}: {error}", param="step_cache") from error
