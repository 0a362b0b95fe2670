"""A folder, or a single file of a format that has a converter."""

from __future__ import annotations

from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models.cache import hash_file
from polymux.core.models.source import Located, ModelSource, Report


class FolderSource(ModelSource):
    scheme = "folder"

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        path = Path(name).expanduser().absolute()
        if not path.exists():
            raise ModelError(
                f"there is no folder {name!r}. A model is a folder, hf:org/name, pypi:dist==version#member, "
                "or a name from `polymux list`"
            )
        if sha256 is not None:
            if path.is_dir():
                raise ModelError(f"{name!r} is a folder: sha256 can be checked for a single file or a pypi: wheel")
            if hash_file(path) != sha256:
                raise ModelError(f"{name!r} does not have the sha256 {sha256}")
        stamp = path.stat()
        return Located(path, f"{path} {stamp.st_size} {stamp.st_mtime_ns}")

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        return Path(name).expanduser().exists()
