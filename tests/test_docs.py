"""The documentation builds strictly, spells, links, and says what is so. What its code does: test_docs_run.py."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polymux.core.testing.service import FakeService
from polymux.gateway.app import create_app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    title: str | None
    code: str


def read_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text[: match.start()].count("\n") + 1
        yield Block(str(page.relative_to(ROOT)), line, match[1], match[2], match[3])


BLOCKS = [block for page in PAGES for block in read_blocks(page)]


def name(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Every link and anchor leads somewhere, every page is in the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    comparison = (tmp_path / "site" / "comparison" / "index.html").read_text()
    assert "tokens/s" in comparison, "the figures are in the page"
    contract = (tmp_path / "site" / "contract" / "index.html").read_text()
    assert "attention_backends" in contract and "OneShotStage" in contract


def test_the_words_are_spelled() -> None:
    paths = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "plugins").glob("*/README.md")]
    command = [sys.executable, "-m", "codespell_lib", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_links_of_the_readme_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (ROOT / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "python"], ids=name)
def test_python_is_python(block: Block) -> None:
    ast.parse(block.code)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language == "toml"], ids=name)
def test_settings_are_settings(block: Block, tmp_path: Path) -> None:
    if block.title is not None:
        assert tomllib.loads(block.code)
        return
    from polymux.core.config import read_config
    from polymux.gateway.settings import GatewaySettings

    path = tmp_path / "polymux.toml"
    path.write_text(block.code)
    config = read_config(path, {})
    config.settings()
    config.read("gateway", GatewaySettings)


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.title], ids=lambda block: block.title)
def test_the_tutorial_is_the_example(block: Block) -> None:
    assert block.code == (ROOT / "plugins" / "example" / block.title).read_text().rstrip() + "\n"


def test_every_file_of_the_example_is_in_the_tutorial() -> None:
    shown = {block.title for block in BLOCKS if block.title}
    folder = ROOT / "plugins" / "example"
    files = {str(path.relative_to(folder)) for path in folder.glob("polymux_example/*.py")} | {"pyproject.toml"}
    assert shown == files


def test_what_the_migration_page_names_is_there() -> None:
    """Settings and fields of requests that it sends people to."""
    from polymux.core.config import EngineSettings
    from polymux.gateway.schemas.chat import ChatRequest
    from polymux.gateway.schemas.images import ImageRequest
    from polymux.gateway.settings import GatewaySettings

    page = (ROOT / "docs" / "migration.md").read_text()
    settings = {"engine": EngineSettings, "gateway": GatewaySettings}
    named = re.findall(r"`\[(engine|gateway)\] ([^|]+?)(?: \||:)", page)
    assert len(named) == 3
    for section, names in named:
        for each in re.findall(r"\w+", names):
            assert each in settings[section].__dataclass_fields__, f"[{section}] {each}"
    fields = set(re.findall(r"[`,] ?\"(\w+)\":", page.partition("diffusers scripts")[2]))
    assert {"prompt", "size", "seed", "n"} <= fields <= ImageRequest.model_fields.keys()
    assert {"structured_outputs", "response_format"} <= ChatRequest.model_fields.keys()


def test_every_metric_is_documented() -> None:
    app = create_app(FakeService())  # type: ignore[arg-type]
    page = (ROOT / "docs" / "operations.md").read_text()
    metrics = app.state.gateway.metrics
    metrics.of("m", "chat")
    for family in metrics.registry.collect():
        if family.name.startswith("polymux_engine_"):
            continue
        shown = f"`{family.name}_total`" if family.type == "counter" else f"`{family.name}`"
        assert shown in page, f"docs/operations.md does not say what {family.name} is"


def test_every_setting_is_somewhere() -> None:
    """In a page, or in the reference of fields that the error of an unknown one gives: none may be forgotten."""
    from dataclasses import fields

    from polymux.gateway.settings import GatewaySettings

    page = (ROOT / "docs" / "operations.md").read_text()
    for field in fields(GatewaySettings):
        assert f"`{field.name}`" in page or f"{field.name} =" in page or field.name in page, field.name
