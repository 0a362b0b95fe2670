"""The runtime owns every loop, thread, queue and forward pass; a modality supplies models and rules of its domain."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.load import prepare_body
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.testing.drive import Driver
from polymux.core.testing.ownership import watch_forwards
from polymux.core.testing.tiny import build, tiny_bert, tiny_llama
from polymux.modalities.llm.embedder import TextEmbedder
from polymux.modalities.llm.program import EmbeddingProgram
from polymux.modalities.llm.work import EmbedWork

ROOT = Path(__file__).parent.parent

RUNTIME = {"_thread", "anyio", "asyncio", "concurrent", "multiprocessing", "queue", "sched", "threading", "trio"}
"""Modules with which one could run something of one's own."""

MODELS = {"TokenModel", "OneShotModel", "DenoiseModel", "BlockModel", "Module"}
"""What a stage runs: only there, and in classes derived from them, are modules called."""

SOURCES = sorted(
    path
    for folder in ("modalities", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    if not {"tests", "train"} & set(path.relative_to(ROOT).parts)
)
"""Recipes that train starters serve nothing, and are no part of what is installed."""


def find_owned(tree: ast.AST) -> Iterator[str]:
    """Imports of what could run by itself, and endless loops that are no program waiting for its rows or messages."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "torch":
                names += [f"torch.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] in RUNTIME or name == "torch.multiprocessing":
                yield f"line {node.lineno}: imports {name}"
        if (
            isinstance(node, ast.While)
            and isinstance(node.test, ast.Constant)
            and not any(isinstance(inner, ast.Await) for inner in ast.walk(node))
        ):
            yield f"line {node.lineno}: an endless loop"


def find_passes(tree: ast.Module, models: set[str]) -> Iterator[str]:
    """Forward passes outside of a model: calls of attributes that are no methods, generate, gradient modes.

    A module is data of its owner (`self.encoder`); who calls it as `self.encoder(...)` runs a forward pass.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("inference_mode", "no_grad", "enable_grad"):
            yield f"line {node.lineno}: {node.attr} is the runtime's"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = ast.unparse(node.func.value) in ("super()", "self")  # a model's way to itself
            if node.func.attr in ("generate", "forward") and not own:
                yield f"line {node.lineno}: .{node.func.attr}() runs a model"
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if owner.name in models:
            continue
        modules = {name for name in _attributes(owner) if name.strip("_") in MODULE_NAMES}
        for node in ast.walk(owner):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in modules:
                yield f"line {node.lineno}: {owner.name} calls its {node.func.attr}"


MODULE_NAMES = {"backbone", "decoder", "encoder", "head", "model", "module", "transformer", "unet", "vae", "vocoder"}


def _attributes(owner: ast.ClassDef) -> set[str]:
    """Names that the class sets on itself."""
    return {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }


def read_models() -> set[str]:
    """Names of all classes in modalities and plugins that derive from a model, however far."""
    bases: dict[str, set[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases}
    found = set(MODELS)
    while more := {name for name, parents in bases.items() if name not in found and parents & found}:
        found |= more
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_modality_runs_anything_of_its_own(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [*find_owned(tree), *find_passes(tree, read_models())] == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import threading", "imports threading"),
        ("from concurrent.futures import ThreadPoolExecutor", "imports concurrent.futures"),
        ("def run():\n while True:\n  step()", "an endless loop"),
        ("class Program:\n def run(self):\n  self.model = load()\n  return self.model(1)", "Program calls its model"),
        ("def answer(model):\n return model.generate(1)", "runs a model"),
        ("import torch\ndef run():\n with torch.inference_mode():\n  pass", "is the runtime's"),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, says: str) -> None:
    tree = ast.parse(source)
    assert says in " ".join([*find_owned(tree), *find_passes(tree, set(MODELS))])


def test_a_program_may_wait_for_ever() -> None:
    assert not list(find_owned(ast.parse("async def run(job):\n while True:\n  await job.receive()")))


@pytest.mark.parametrize("lagged", [False, True])
def test_every_forward_pass_is_a_launch(lagged: bool) -> None:
    """Chat and embedding together: not one module of the process runs outside of a stage's launch."""
    site = Site(LaggedCpu() if lagged else Device(), SiteSettings(cache_bytes=1 << 18, superpage=1 << 14, block=4))
    embedder = TextEmbedder(prepare_body(build(tiny_bert), tier="reference"), site, "mean")
    programs = {
        "chat": GenerationProgram(TokenStage("decode", TransformersDecoder(build(tiny_llama)), site), "m"),
        "embed": EmbeddingProgram(OneShotStage("embed", embedder, site, max_units=64, to_host=True), embedder),
    }
    driver = Driver(Loop(site, programs))
    with watch_forwards() as watch:
        driver.submit("chat", "chat", "chat", GenerateWork(prompts=[[5, 6, 7]], max_tokens=[4], seeds=[0, 1], n=2))
        driver.submit("embed", "embed", "embed", EmbedWork.of([[5, 6], [7]]))
        driver.finish()
        assert not watch.outside
        assert watch.inside["LlamaForCausalLM"] >= 4
        assert watch.inside["BertModel"] >= 1
        build(tiny_llama)(input_ids=site.arena.buffer[:1].long()[None])
        assert watch.outside["LlamaForCausalLM"] == 1, "the watch sees everything"
