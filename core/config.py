"""Settings: flag > environment > polymux.toml > default, resolved once into frozen dataclasses.

A table of the file is a dataclass, and its keys are the fields. The variable for `port` of `[gateway]` is
`POLYMUX_GATEWAY_PORT`; lists are separated by commas. Who owns a table owns its dataclass: core owns `[engine]`,
`[models.NAME]`, `[plugins]` and `[starters]`; the gateway asks `Config.read` for its own.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import msgspec

from polymux.core.errors import ConfigError
from polymux.core.vocabulary import NamedModel

FILE = "polymux.toml"
PREFIX = "POLYMUX_"
TABLES = ("engine", "gateway", "models", "plugins", "starters")
NOT_SETTINGS = ("POLYMUX_HOME", "POLYMUX_CONFIG")

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(gt=0)]
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class ByteSize(int):
    """Bytes, written as a number or with a unit: 2147483648, "2GiB"."""

    @classmethod
    def parse(cls, value: Any) -> ByteSize:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
        if match is None or match[2] not in UNITS or not float(match[1]):
            raise ValueError(f'expected a size such as "2GiB" (units: {", ".join(filter(None, UNITS))})')
        return cls(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """How engines run. None: the engine's own choice for its device and models."""

    device: str = "auto"
    """auto (an accelerator if there is one), cpu, cuda or cuda:N."""
    dtype: str | None = None
    """float32, bfloat16 or float16, for every model that does not name its own."""
    deterministic: bool | None = None
    """The same text alone and under load."""
    cache_bytes: ByteSize | None = None
    """What the arena may take; also "2GiB"."""
    max_rows: Count | None = None
    """Rows that run at once."""
    max_units: Count | None = None
    """Tokens (or other units) of one launch."""


@dataclass(frozen=True, kw_only=True)
class PluginSettings:
    """Which plugins there are, and how long their start-up may take."""

    dirs: tuple[Path, ...] = ()
    """Files and folders with plugins, beside the installed ones; relative to the file that names them."""
    disable: tuple[str, ...] = ()
    """Names of plugins to leave out."""
    enable: tuple[str, ...] = ()
    """With any name here, all other plugins but core's own are left out."""
    patience_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """What an import or a hook may take before its plugin is disabled."""


@dataclass(frozen=True, kw_only=True)
class StarterSettings:
    """The models that plugins bring as defaults, such as `starter/chat`."""

    enabled: bool = True
    """Whether they are served when no model is asked for."""
    aliases: bool = True
    """Whether they also answer under the names that clients hard-code (`gpt-4o-mini`)."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """`[models.NAME]`: a name of your own for a model."""

    reference: str
    sha256: str | None = None
    aliases: tuple[str, ...] = ()
    pipeline: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What core itself is told. A server's own settings are the gateway's."""

    engine: EngineSettings = EngineSettings()
    plugins: PluginSettings = PluginSettings()
    starters: StarterSettings = StarterSettings()
    models: tuple[NamedModel, ...] = ()


@dataclass(frozen=True)
class Config:
    """The file and the environment, read but not yet resolved against flags."""

    path: Path | None
    tables: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, str]

    def read(self, table: str, kind: type[T], flags: Mapping[str, Any] | None = None) -> T:
        """`table` as the dataclass `kind`. A flag that is None was not given.

        Raises `ConfigError` for an unknown key (with the nearest known one) or a value that does not fit.
        """
        known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        values = dict(self.tables.get(table, {}))
        refuse_unknown(values, known, f"[{table}] in {self.path}")
        prefix = f"{PREFIX}{table.upper()}_"
        given = {
            name[len(prefix) :].lower(): text for name, text in self.environment.items() if name.startswith(prefix)
        }
        refuse_unknown(given, known, f"the environment ({prefix}…)")
        lists = {key for key, hint in get_type_hints(kind).items() if get_origin(hint) is tuple}
        values.update({key: split(text) if key in lists else text for key, text in given.items()})
        values.update({key: value for key, value in (flags or {}).items() if value is not None})
        return validate(values, kind, table)

    def settings(self, flags: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
        """Core's settings; `flags` maps a table to what the command line gave for it."""
        flags = flags or {}
        return Settings(
            engine=self.read("engine", EngineSettings, flags.get("engine")),
            plugins=self.read("plugins", PluginSettings, flags.get("plugins")),
            starters=self.read("starters", StarterSettings, flags.get("starters")),
            models=tuple(self._read_models()),
        )

    def _read_models(self) -> list[NamedModel]:
        models = []
        for name, table in self.tables.get("models", {}).items():
            where = f"[models.{name}] in {self.path}"
            if not isinstance(table, Mapping):
                raise ConfigError(f'{where} is not a table; write [models.{name!r}] and reference = "…" below it')
            refuse_unknown(table, [each.name for each in fields(ModelSettings)], where)
            model = validate(table, ModelSettings, f"models.{name}")
            models.append(
                NamedModel(
                    name=name,
                    reference=model.reference,
                    sha256=model.sha256,
                    aliases=model.aliases,
                    options=model.options,
                    pipeline=model.pipeline,
                    default=True,
                )
            )
        return models


def read_config(path: Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """The file at `path`, else at `POLYMUX_CONFIG`, else `polymux.toml` here if there is one; and the environment.

    Raises `ConfigError` for a file that is missing or no TOML, and for tables or variables that nobody knows.
    """
    environment = {
        name: text
        for name, text in (os.environ if environment is None else environment).items()
        if name.startswith(PREFIX) and text
    }
    if path is None and "POLYMUX_CONFIG" in environment:
        path = Path(environment["POLYMUX_CONFIG"])
    if path is None and Path(FILE).is_file():
        path = Path(FILE)
    tables = read_tables(path) if path is not None else {}
    for name in environment:
        if name not in NOT_SETTINGS and not any(name.startswith(f"{PREFIX}{table.upper()}_") for table in TABLES):
            tables_known = ", ".join(f"{PREFIX}{table.upper()}_…" for table in TABLES if table != "models")
            raise ConfigError(f"unknown variable {name} in the environment; settings are {tables_known}")
    return Config(path, tables, environment)


def read_tables(path: Path) -> dict[str, Mapping[str, Any]]:
    """The tables of a TOML file; plugin folders and model folders in it are relative to the file."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}", param="config") from error
    refuse_unknown(tables, TABLES, str(path))
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is a value, not a table; write [{name}]", param=name)
    plugins = tables.get("plugins", {})
    if isinstance(plugins.get("dirs"), list):
        plugins["dirs"] = [str(path.parent / str(each)) for each in plugins["dirs"]]
    for model in tables.get("models", {}).values():
        if isinstance(model, dict) and str(model.get("reference", "")).startswith(("./", "../")):
            model["reference"] = str((path.parent / model["reference"]).absolute())
        adapters = model.get("options", {}).get("adapters") if isinstance(model, dict) else None
        for name, reference in adapters.items() if isinstance(adapters, dict) else ():
            if str(reference).startswith(("./", "../")):
                adapters[name] = str((path.parent / reference).absolute())
    return tables


def refuse_unknown(given: Iterable[str], known: Sequence[str], where: str) -> None:
    """Raise `ConfigError` for the first name that is not known, with the nearest one that is."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown setting {name!r}; {hint}", param=name)


def validate(values: Mapping[str, Any], kind: type[T], table: str) -> T:
    """`values` as the dataclass `kind`; the first value that does not fit is named in the `ConfigError`."""
    try:
        return msgspec.convert(dict(values), kind, strict=False, dec_hook=decode)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        key = f"{table}{where.rstrip('`')}"
        raise ConfigError(f"{key}: {what}", param=key) from error


def decode(kind: type, value: Any) -> Any:
    """The types of settings that msgspec does not know."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is ByteSize:
        return ByteSize.parse(value)
    raise ValueError(f"expected a {kind.__name__}, got {type(value).__name__}")


def split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
