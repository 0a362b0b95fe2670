"""Adapters on their way into the arena: read when a job needs one that is not there, kept while there is room."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polymux.core.batch.encode import ContentStage, EncodeRow
from polymux.core.cache.arena import fit_stride
from polymux.core.cache.holding import Holding
from polymux.core.compute.adapters import AdapterFiles, AdapterSet
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError, InternalError, ModelError, PolymuxError


class AdapterStage(ContentStage):
    """Brings adapters into the arena, known by content. Raises `ConfigError` when not even one would fit."""

    def __init__(self, adapters: AdapterSet, site: Site) -> None:
        super().__init__("adapters", adapters.spec, site, max_units=1)
        self._adapters = adapters
        self._digests = {name: files.digest for name, files in adapters.by_name.items()}
        _, run = fit_stride(adapters.spec.nbytes, site.arena.superpage)
        if 2 * run > site.arena.total:
            raise ConfigError(
                f"an adapter takes {adapters.spec.nbytes} bytes; a cache of {site.settings.cache_bytes} bytes has no "
                "room for one and for what it computes",
                param="cache_bytes",
            )

    def fill(self, items: list[Any], blocks: list[list[int]]) -> list[PolymuxError | None]:
        """The "pass" over an adapter's name: its file's content goes into its block."""
        for name, (block,) in zip(items, blocks, strict=True):
            self._adapters.write(name, self.view[block])
        return [None] * len(items)

    def digest(self, name: str) -> bytes:
        """Names the adapter's content. Raises `InternalError` for one that the front should not have let pass."""
        if name not in self._digests:
            raise InternalError(f"there is no adapter {name}")
        return self._digests[name]

    async def fetch(self, job: Job, name: str) -> Holding:
        """The adapter's block, held until the job ends."""
        row = await job.start(self, EncodeRow(job, {self.digest(name): name}))
        if row.holding is None:
            raise InternalError(f"adapter {name} was not kept")
        return row.holding


def open_adapters(folders: Mapping[str, str]) -> list[AdapterFiles]:
    """The adapters of a model's option `adapters`: name -> folder. Raises `ModelError`."""
    if not isinstance(folders, Mapping):
        raise ModelError("adapters is no table of names and folders")
    return [AdapterFiles.open(name, Path(folder)) for name, folder in folders.items()]
