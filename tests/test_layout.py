"""The import path says the folder, in the tree, in the editable install and in the wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "polymux": "polymux",
    "core": "polymux/core",
    "gateway": "polymux/gateway",
    "modalities": "polymux/modalities",
}
SHIPPED = {".py", ".typed", ".cpp", ".html", ".css", ".js", ".svg", ".txt"}


def run_python(code: str, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def list_tree() -> set[str]:
    """Every file of the tree that belongs into the wheel, under its import path."""
    return {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # built from a copy, so that the build leaves nothing in the tree that others work in
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", *FOLDERS):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=240)
    (built,) = folder.glob("polymux-*.whl")
    return built


def test_every_folder_of_code_is_a_package():
    """A folder without `__init__.py` would be left out of the wheel in silence."""
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_the_wheel_holds_exactly_the_tree(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == list_tree()


def test_the_wheel_imports_from_another_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import polymux, polymux.core.plugins, polymux.modalities.llm.plugin, polymux.gateway.plugin\n"
        "print(polymux.core.plugins.__file__)"
    )
    # the editable install's finder must not answer instead of the wheel
    assert run_python(
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n" + code, tmp_path
    ) == str(tmp_path / "site" / "polymux" / "core" / "plugins" / "__init__.py")


def test_the_installed_package_imports_from_another_folder(tmp_path):
    code = "import polymux.core.errors, polymux.gateway, polymux.modalities; print(polymux.core.errors.__file__)"
    assert Path(run_python(code, tmp_path)).name == "errors.py"


def test_core_gateway_and_modalities_are_never_top_level():
    """A class imported under two names exists twice, and `except` and `isinstance` miss it."""
    assert not {"core", "gateway", "modalities"} & set(sys.modules)


@pytest.mark.parametrize(
    "module",
    [
        "polymux",
        "polymux.core.plugins",
        "polymux.core.config",
        "polymux.core.service",
        "polymux.core.cli",
        "polymux.core.assembly",
        "polymux.gateway.command",
        "polymux.gateway.app",
        "polymux.core.generation.front",
        "polymux.modalities.asr.front",
        "polymux.modalities.vision.front",
        "polymux_hibari.front",
    ],
)
def test_what_the_gateway_process_imports_leaves_torch_alone(module, tmp_path):
    heavy = "('torch', 'transformers', 'diffusers')"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    assert run_python(code, tmp_path) == "[]"


def test_loading_every_plugin_leaves_torch_alone(tmp_path):
    code = (
        "import sys; from polymux.core.plugins import load_plugins\n"
        "plugins = load_plugins(); plugins.tasks(), plugins.pipelines(), plugins.named_models(), plugins.routes()\n"
        "assert all(record.fault is None for record in plugins.records), plugins.describe()\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(code, tmp_path) == "False"


def test_types_are_marked_and_levels_agree():
    assert (ROOT / "polymux" / "py.typed").exists()
    assert run_python("import polymux; print(polymux.__version__, polymux.API_LEVEL)", ROOT / "tests") == "0.1.0 1"
