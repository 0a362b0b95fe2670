"""Every code block of the documentation and every command of the README runs, against a server on this machine.

One server for all, with the starters.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polymux.core.testing.command import run_server

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST = ("docs/modalities/speech.md", "docs/modalities/images.md")
"""They make the recording and the picture that other pages read."""
WALKED = "docs/plugins/tutorial.md"
"""From its first word to its last by test_tutorial.py."""
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page != ROOT / WALKED)]

BIN = Path(sys.executable).parent
NODE = shutil.which("node")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str


def read_blocks(*languages: str) -> list[Block]:
    """In the order in which somebody reads them."""
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] in languages:
                line = text[: match.start()].count("\n") + 1
                blocks.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return sorted(blocks, key=lambda block: block.page not in FIRST)


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


@dataclass
class Server:
    url: str
    folder: Path
    environment: dict[str, str]

    def run(self, command: list[str], code: str = "") -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, input=code
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def here(self, code: str) -> str:
        return code.replace("http://127.0.0.1:8000", self.url)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "plugins" / "example", folder / "my-plugin")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    environment = {
        **os.environ,
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder / "my-plugin"),
    }
    with run_server(folder, environment=environment) as running:
        yield Server(running.url, folder, environment)


@pytest.mark.parametrize("block", read_blocks("bash", "python", "javascript"), ids=name)
def test_a_block_runs(block: Block, server: Server) -> None:
    code = server.here(block.code)
    if block.language == "bash":
        out = server.run(["bash", "-eu", "-s"], code)
        assert '"error"' not in out.replace('"error":null', ""), out
    elif block.language == "javascript":
        if NODE is None:
            pytest.skip("there is no node on this machine")
        server.run([NODE, "--input-type=module", "-"], code)
    else:
        if "run_checks" in code:
            pytest.skip("the check of the example is a test of its own")
        server.run([sys.executable, "-"], code)


REVISION = "0" * 40

LONG = re.compile(r"polymux serve|make (serve|test)")
"""Run until they are stopped: `server` above is one of them, and this test run another."""


def list_commands() -> list[tuple[str, str]]:
    """Every line of every console block, each once."""
    found: dict[str, str] = {}
    for block in read_blocks("console"):
        for line in block.code.splitlines():
            command = line.partition("#")[0].strip()
            if command and not LONG.match(command):
                found.setdefault(command, block.page)
    return [(page, command) for command, page in found.items()]


@pytest.fixture(scope="module")
def hub(folder: Path) -> dict[str, str]:
    """The hub's cache as if org/name had been fetched: commands that name it work without a network."""
    from polymux.core.testing.tiny import build, tiny_llama

    snapshot = folder / "hf" / "hub" / "models--org--name" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(REVISION)
    build(tiny_llama).save_pretrained(snapshot)
    return {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(("page", "command"), list_commands(), ids=lambda value: str(value))
def test_commands(page: str, command: str, folder: Path, hub: dict[str, str]) -> None:
    environment = {**os.environ, **hub, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["timeout", "-s", "INT", "90" if command.startswith("polymux run") else "600", "bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    told_enough = done.returncode == 124 and done.stdout  # a small model's story has no end
    assert done.returncode == 0 or told_enough, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"


@pytest.mark.parametrize("target", ["serve", "test", "docs", "lint", "slow"])
def test_make_has_the_targets_that_the_pages_name(target: str) -> None:
    """Dry: this run is itself one of them."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout, done.stderr
