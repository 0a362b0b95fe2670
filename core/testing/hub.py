"""A model hub without a network: folders under names, as a source of the scheme `hub`.

hub = FakeHub({"org/model": folder})
files = resolve("hub:org/model", sources=[hub])
hub.offline = True                    # from now on only what was fetched before is found
assert hub.fetched == ["org/model"]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models import Located, ModelSource
from polymux.core.models.source import Report


class FakeHub(ModelSource):
    """Serves `models` (name -> folder) and remembers what was asked for."""

    scheme = "hub"

    def __init__(self, models: Mapping[str, Path]) -> None:
        self.models = dict(models)
        self.fetched: list[str] = []
        self.offline = False

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        if name not in self.models:
            raise ModelError(f"hub:{name}: there is no such model; there are: {', '.join(sorted(self.models))}")
        if name not in self.fetched:
            if self.offline:
                raise ModelError(f"hub:{name} was never fetched, and there is no network: fetch it first")
            report(f"fetching hub:{name}")
            self.fetched.append(name)
        return Located(self.models[name], f"hub:{name}")

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        return name in self.fetched
