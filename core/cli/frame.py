"""What every verb gets: settings and plugins, errors as one line, and an exit status.

Plugins bring verbs, so the options that say which plugins there are must be read before the verbs are known: the
options of `FRAME_HELP` are taken from anywhere in the command line, and a verb never sees them.

Exit status: 0 ok, 1 failed while running, 2 wrong usage or settings, 3 could not start.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from polymux.core.config import Config, PluginSettings, Settings, read_config
from polymux.core.errors import ConfigError, ModelError, PluginError, PolymuxError
from polymux.core.logs import open_log
from polymux.core.plugins import Plugins, load_plugins

FRAME_HELP = (
    "With every verb: --config FILE (settings; else polymux.toml), "
    "--plugin-dir PATH (more plugins; repeatable), --disable-plugin NAME (repeatable)."
)


@dataclass(frozen=True)
class Frame:
    """The context of every verb: `ctx.obj` of a typer command."""

    config: Config
    settings: Settings
    plugins: Plugins


def run(arguments: Sequence[str] | None = None) -> int:
    """Run `polymux` with `arguments` (the process's own by default) and return its exit status."""
    try:
        frame, rest = open_frame(sys.argv[1:] if arguments is None else arguments)
        return call(build_app(frame), rest, frame)
    except ConfigError as error:
        return complain(error.message, 2)
    except (ModelError, PluginError) as error:
        return complain(error.message, 3)
    except PolymuxError as error:
        return complain(error.message, 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read our output has seen enough; nothing more can be flushed
        sys.stdout = None
        return 1
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return complain(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno}); this is a bug", 1)


def open_frame(arguments: Sequence[str]) -> tuple[Frame, list[str]]:
    """The frame that the command line asks for, and what is left of the command line.

    Raises `ConfigError` for a frame option without its value, and what reading settings and plugins raises.
    """
    own, rest = split_options(arguments)
    config = read_config(own.config)
    given = {"plugins": {"dirs": own.plugin_dir, "disable": own.disable_plugin}}
    settings = config.settings(given)
    plugins = open_plugins(settings.plugins)
    for record in plugins.records:
        if record.fault is not None:
            typer.echo(f"polymux: {record.fault}", err=True)
    return Frame(config, settings, plugins), rest


def open_plugins(settings: PluginSettings) -> Plugins:
    """The plugins that the settings ask for."""
    return load_plugins(settings.dirs, settings.disable, enable=settings.enable, patience=settings.patience_seconds)


def split_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The frame's own options, wherever they stand before a `--`, and all the rest."""
    parser = FrameParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--plugin-dir", type=Path, action="append")
    parser.add_argument("--disable-plugin", action="append")
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    own, rest = parser.parse_known_args(words[:end])
    return own, rest + words[end:]


class FrameParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_app(frame: Frame) -> typer.Typer:
    """The typer application with the verbs of every plugin."""
    app = typer.Typer(
        name="polymux",
        epilog=FRAME_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    app.callback(help="Serve and run generative models: chat, embeddings, and what plugins add.")(add_version)
    frame.plugins.add_commands(app)
    for command in app.registered_commands:
        command.epilog = command.epilog or FRAME_HELP
    return app


def print_version(wanted: bool) -> None:
    if wanted:
        from polymux import __version__

        typer.echo(__version__)
        raise typer.Exit()


def add_version(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """What stands before the verb."""


def call(app: typer.Typer, arguments: list[str], frame: Frame) -> int:
    open_log()
    try:
        get_command(app).main(args=arguments, prog_name="polymux", obj=frame)
    except SystemExit as exit:
        return exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    return 0


def complain(message: str, status: int) -> int:
    typer.echo(f"polymux: error: {' '.join(message.split())}", err=True)
    return status
