"""`polymux plugin new`: a project that is a working plugin before any edit, from the templates beside this file."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

from polymux.core.errors import ConfigError

TEMPLATES = Path(__file__).parent / "templates"
COMMON = "common"
SUFFIX = ".txt"
"""Of every template, so that nothing takes one for code."""

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def list_kinds() -> list[str]:
    """What there are templates for."""
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name != COMMON)


def write_plugin(kind: str, name: str, into: Path) -> Path:
    """Write the project `polymux-NAME` into the folder `into`; returns the project's folder.

    Raises `ConfigError` for an unknown kind, a name that cannot be one, or a folder that is there already.
    """
    if kind not in list_kinds():
        raise ConfigError(f"there is no kind {kind!r}; there are: {', '.join(list_kinds())}", param="kind")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name: use small letters, digits and dashes, such as my-{kind}", param="name")
    package = f"polymux_{name.replace('-', '_')}"
    folder = into / f"polymux-{name}"
    if folder.exists():
        raise ConfigError(f"{folder} is there already; choose another name or --into another folder", param="name")
    title = "".join(word.capitalize() for word in name.split("-"))
    values = {"name": name, "package": package, "title": title, "kind": kind.replace("-", " ")}
    values["upper"] = name.upper().replace("-", "_")
    for source in (TEMPLATES / COMMON, TEMPLATES / kind):
        for path in sorted(source.rglob(f"*{SUFFIX}")):
            target = str(path.relative_to(source)).removesuffix(SUFFIX).replace("PACKAGE", package)
            text = Template(path.read_text(encoding="utf-8")).substitute(values)
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).write_text(text, encoding="utf-8")
    return folder
