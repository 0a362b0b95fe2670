"""The names that users may put into `model`, and which models a server is to serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from polymux.core.errors import ConfigError
from polymux.core.vocabulary import NamedModel

if TYPE_CHECKING:
    from polymux.core.config import Settings
    from polymux.core.plugins import Plugins


@dataclass(frozen=True)
class Catalogue:
    """Named models by name; what the configuration defines comes before what plugins bring."""

    models: tuple[NamedModel, ...]

    @staticmethod
    def gather(settings: Settings, plugins: Plugins) -> Catalogue:
        """What is configured and what plugins bring."""
        return Catalogue.join(
            settings.models,
            plugins.named_models(),
            starters=settings.starters.enabled,
            aliases=settings.starters.aliases,
        )

    @staticmethod
    def join(
        configured: Iterable[NamedModel], brought: Iterable[NamedModel], *, starters: bool = True, aliases: bool = True
    ) -> Catalogue:
        """The configured models, then those that plugins bring under other names.

        `starters`: whether what plugins bring is served by default; it is not where models are configured.
        `aliases`: whether it also answers under its aliases.
        """
        own = {model.name: model for model in configured}
        default = starters and not own
        others = [
            replace(model, aliases=model.aliases if aliases else (), default=model.default and default)
            for model in brought
            if model.name not in own
        ]
        return Catalogue((*own.values(), *others))

    def find(self, name: str) -> NamedModel:
        """The model of that name or alias; any other name is taken as a reference and named after itself."""
        for model in self.models:
            if name == model.name or name in model.aliases:
                return model
        return NamedModel(name=name, reference=name)

    def choose(self, names: Sequence[str]) -> list[NamedModel]:
        """The models to serve: those named, or the default ones. Raises `ConfigError` when a name is used twice."""
        chosen = [self.find(name) for name in names] or [model for model in self.models if model.default]
        taken: dict[str, str] = {}
        for model in chosen:
            for name in (model.name, *model.aliases):
                if name in taken:
                    raise ConfigError(f"the model name {name!r} is used by both {taken[name]!r} and {model.name!r}")
                taken[name] = model.name
        return chosen
