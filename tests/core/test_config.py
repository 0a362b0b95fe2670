"""A flag wins over the environment, that over the file, that over the default; what nobody knows is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path

import pytest

from polymux.core.config import ByteSize, EngineSettings, Settings, read_config
from polymux.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "polymux.toml"
    path.write_text(text)
    return path


def test_nothing_set_gives_the_defaults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_config(environment={}).settings() == Settings()


def test_each_level_wins_over_the_one_below(tmp_path):
    path = write(tmp_path, '[engine]\nmax_rows = 1\nmax_units = 1\ndevice = "cuda"\n')
    config = read_config(path, {"POLYMUX_ENGINE_MAX_ROWS": "2", "POLYMUX_ENGINE_DEVICE": "cuda:1"})
    engine = config.settings({"engine": {"device": "cpu", "dtype": None}}).engine
    assert engine == EngineSettings(device="cpu", max_rows=2, max_units=1)


def test_the_file_is_found_here_or_where_the_environment_says(tmp_path, monkeypatch):
    write(tmp_path, "[engine]\nmax_rows = 3\n")
    monkeypatch.chdir(tmp_path)
    assert read_config(environment={}).settings().engine.max_rows == 3
    (tmp_path / "other.toml").write_text("[engine]\nmax_rows = 4\n")
    assert read_config(environment={"POLYMUX_CONFIG": "other.toml"}).settings().engine.max_rows == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[engin]\n", r"unknown setting 'engin'; did you mean 'engine'\?"),
        ("[engine]\nmax_row = 1\n", r"unknown setting 'max_row'; did you mean 'max_rows'\?"),
        ("[models.x]\nreference = 'y'\nsha = '0'\n", r"\[models.x\].*unknown setting 'sha'"),
        ("engine = 1\n", r"engine is a value, not a table; write \[engine\]"),
        ("[models]\nx = 'y'\n", r"\[models.x\].*is not a table"),
        ("[models.x]\n", "missing required field `reference`"),
        ("[engine]\nmax_rows = 0\n", r"engine\.max_rows: Expected `int` >= 1"),
        ("[engine]\nmax_rows = 'many'\n", r"engine\.max_rows: Expected `int"),
        ("[engine]\ncache_bytes = '2 bananas'\n", r"engine\.cache_bytes: expected a size"),
        ("[engine]\ncache_bytes = 0\n", r"engine\.cache_bytes: expected a size"),
        ("[plugins]\ndisable = 'starter'\n", r"plugins\.disable: Expected `array`"),
        ("[engine\n", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_config(write(tmp_path, text), {}).settings()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("POLYMUX_ENGINE_MAX_ROW", "1", "unknown setting 'max_row'; did you mean 'max_rows'"),
        ("POLYMUX_PROT", "1", "unknown variable POLYMUX_PROT"),
        ("POLYMUX_ENGINE_MAX_ROWS", "x", "engine.max_rows: Expected `int"),
        ("POLYMUX_STARTERS_ALIASES", "perhaps", "starters.aliases: Expected `bool`"),
    ],
)
def test_a_mistake_in_the_environment_is_named(name, value, message):
    with pytest.raises(ConfigError, match=message):
        read_config(environment={name: value}).settings()


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_config(tmp_path / "missing.toml", {})


def test_lists_and_switches_in_the_environment(tmp_path):
    config = read_config(
        environment={
            "POLYMUX_PLUGINS_DIRS": "/a, /b",
            "POLYMUX_PLUGINS_DISABLE": "starter",
            "POLYMUX_STARTERS_ALIASES": "false",
            "POLYMUX_HOME": "/elsewhere",
        }
    )
    settings = config.settings()
    assert settings.plugins.dirs == (Path("/a"), Path("/b")) and settings.plugins.disable == ("starter",)
    assert settings.starters.aliases is False


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("2GiB", 2**31), ("1.5 MiB", 3 * 2**19), ("1GB", 10**9)])
def test_sizes_have_units(text, size):
    config = read_config(environment={"POLYMUX_ENGINE_CACHE_BYTES": text})
    assert config.settings().engine.cache_bytes == size == ByteSize(size)


def test_models_of_your_own(tmp_path):
    text = """
    [models."my/chat"]
    reference = "./folder"
    aliases = ["gpt-4o"]
    options = {dtype = "bfloat16"}
    [models.far]
    reference = "hf:org/name"
    """
    near, far = read_config(write(tmp_path, text), {}).settings().models
    assert (near.name, near.aliases, near.options, near.default) == (
        "my/chat",
        ("gpt-4o",),
        {"dtype": "bfloat16"},
        True,
    )
    assert near.reference == str(tmp_path / "folder"), "relative to the file, not to where the command was typed"
    assert far.reference == "hf:org/name"


def test_plugin_folders_are_relative_to_the_file(tmp_path):
    path = write(tmp_path, '[plugins]\ndirs = ["mine", "/theirs"]\n')
    assert read_config(path, {}).settings().plugins.dirs == (tmp_path / "mine", Path("/theirs"))


def test_settings_are_frozen():
    with pytest.raises(FrozenInstanceError):
        EngineSettings().device = "cpu"


def test_another_part_reads_its_own_table(tmp_path):
    @dataclass(frozen=True)
    class Own:
        host: str = "127.0.0.1"
        port: int = 8000

    config = read_config(write(tmp_path, "[gateway]\nport = 9\n"), {"POLYMUX_GATEWAY_HOST": "::1"})
    assert config.read("gateway", Own, {"port": None}) == Own("::1", 9)
    with pytest.raises(ConfigError, match="unknown setting"):
        read_config(write(tmp_path, "[gateway]\nprot = 9\n"), {}).read("gateway", Own)
