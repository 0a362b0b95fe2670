"""`polymux doctor`: what this machine has, what is broken, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from polymux.core.cli.output import print_json, print_table
from polymux.core.config import PluginSettings
from polymux.core.models.cache import find_home
from polymux.core.plugins import Plugins

LOW_DISK = 5 * 2**30

PROBE = """
import json, torch
devices = ["cpu"] + [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "devices": devices}))
"""
"""Heavy imports are probed in a process of their own: a broken build may end it, or hang."""

ATTENTION_PROBE = """
import json
from polymux.core.compute.packed.report import report_attention
from polymux.core.plugins import load_plugins
plugins = load_plugins({dirs!r}, {disable!r})
print(json.dumps(report_attention(plugins.attention_backends(), measure={measure!r})))
"""


@dataclass(frozen=True)
class Finding:
    """`status`: ok, warning or broken. `advice` says what to do about the last two."""

    check: str
    status: str
    detail: str
    advice: str = ""


def examine(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the attention backends anew.")] = False,
) -> None:
    """Check Python, torch, devices, plugins, cache and disk; exits with 1 when something is broken."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        check_torch,
        check_torchaudio,
        lambda: check_attention(ctx.obj.settings.plugins, measure),
        lambda: check_plugins(ctx.obj.plugins),
        check_cache,
        check_disk,
        check_processes,
    )
    findings = [check() for check in checks]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(["CHECK", "STATUS", "DETAIL"], [row for finding in findings for row in list_lines(finding)])
        for each in findings:
            if each.advice:
                typer.echo(f"\n{each.check}: {each.advice}")
    if any(finding.status == "broken" for finding in findings):
        raise typer.Exit(1)


def list_lines(finding: Finding) -> list[list[str]]:
    """A finding as rows of the table, one for each line of its detail."""
    first, *more = finding.detail.splitlines()
    return [[finding.check, finding.status, first], *(["", "", line] for line in more)]


def check_python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}, polymux {version('polymux')}"
    return Finding("python", "ok", detail)


def check_torch() -> Finding:
    try:
        facts = json.loads(probe(PROBE))
    except ProbeFailed as error:
        return Finding("torch", "broken", str(error), "Install it again: pip install --force-reinstall torch")
    return Finding("torch", "ok", f"{facts['version']}, {facts['threads']} threads, {', '.join(facts['devices'])}")


def check_torchaudio() -> Finding:
    """transformers imports torchaudio whenever it is installed, so a broken one breaks every model."""
    try:
        installed = version("torchaudio")
    except PackageNotFoundError:
        return Finding("torchaudio", "ok", "not installed (speech needs it)")
    try:
        probe("import torchaudio")
    except ProbeFailed as error:
        return Finding("torchaudio", "broken", f"{installed} does not import: {error}", explain_torchaudio(installed))
    return Finding("torchaudio", "ok", f"{installed} imports beside torch {version('torch')}")


def explain_torchaudio(installed: str) -> str:
    return (
        f"torchaudio {installed} and torch {version('torch')} are builds that do not fit (a CUDA-linked torchaudio "
        "beside a CPU-only torch is the usual case), and transformers then fails as well. Install both from the same "
        "index: pip install --force-reinstall torch torchaudio"
    )


def check_attention(plugins: PluginSettings, measure: bool = False) -> Finding:
    """Which backends serve this device, why the others do not, and the table of the fastest."""
    dirs = [str(folder) for folder in plugins.dirs]
    code = ATTENTION_PROBE.format(dirs=dirs, disable=list(plugins.disable), measure=measure)
    try:
        report = json.loads(probe(code))
    except ProbeFailed as error:
        return Finding("attention", "broken", str(error), "See torch above, and `polymux plugins`")
    return Finding("attention", "ok", "\n".join([", ".join(report["serving"]), *report["refused"], *report["table"]]))


def check_plugins(plugins: Plugins) -> Finding:
    failed = [record for record in plugins.records if record.fault is not None]
    if failed:
        names = ", ".join(record.name for record in failed)
        return Finding("plugins", "warning", f"failed: {names}", "; ".join(str(record.fault) for record in failed))
    return Finding("plugins", "ok", ", ".join(record.name for record in plugins.records))


def check_cache() -> Finding:
    home = find_home()
    place = home
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return Finding("cache", "broken", f"{home} cannot be written", "Set POLYMUX_HOME to a folder that can")
    size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) if home.exists() else 0
    return Finding("cache", "ok", f"{home}, {size / 2**30:.1f} GiB")


def check_disk() -> Finding:
    place = find_home()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < LOW_DISK:
        return Finding("disk", "warning", f"{free / 2**30:.1f} GiB free", "Models may not fit; set POLYMUX_HOME")
    return Finding("disk", "ok", f"{free / 2**30:.1f} GiB free")


def check_processes() -> Finding:
    """Processes of polymux name themselves, such as `polymux engine main`."""
    import psutil

    found: list[str] = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        line: Any = process.info["cmdline"]
        if line and line[0].startswith("polymux "):
            found.append(f"{line[0].strip()} ({process.info['pid']})")
    return Finding("processes", "ok", ", ".join(found) or "none running")


class ProbeFailed(Exception):
    pass


def probe(code: str) -> str:
    """What `code` prints in a Python of its own. Raises `ProbeFailed` with its last line of error."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed("it did not answer within two minutes") from error
    if done.returncode:
        raise ProbeFailed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout
