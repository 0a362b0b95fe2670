"""The contract as a page, written from the code: every hook, and every name that a plugin may rely on.

The documentation's build puts it into docs/contract.md. `python -m polymux.core.plugins.contract` prints it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from polymux.core import hooks
from polymux.core.plugins.registry import HOOKS
from polymux.core.vocabulary import API_LEVEL

PUBLIC: dict[str, tuple[str, ...]] = {
    "polymux": ("Client", "PolymuxError"),
    "polymux.core.vocabulary": ("Task", "Route", "NamedModel", "Usage", "Receipt", "Output", "Tokens", "Ended"),
    "polymux.core.pipeline": ("Pipeline", "Front", "Prepared", "Presenter", "Program"),
    "polymux.core.errors": ("InvalidRequest", "ContextTooLong", "ModelError", "ConfigError", "InternalError"),
    "polymux.core.models": ("ModelFiles", "ModelSource", "Located"),
    "polymux.core.engine.job": ("Job",),
    "polymux.core.engine.site": ("Site", "SiteSettings"),
    "polymux.core.engine.wire": ("pack", "unpack"),
    "polymux.core.batch.oneshot": ("OneShotModel", "OneShotRow", "OneShotStage"),
    "polymux.core.batch.tokens": ("TokenModel", "TokenShape", "TokenStage"),
    "polymux.core.batch.sequence": ("TokenRequest", "TokenRow"),
    "polymux.core.batch.denoiser": ("DenoiseModel", "BlockModel"),
    "polymux.core.batch.trajectory": ("DenoiseRequest", "DenoiseRow"),
    "polymux.core.batch.denoise": ("DenoiseStage",),
    "polymux.core.compute.attention": ("AttentionBackend", "AttentionOptions", "PagedBatch"),
    "polymux.core.compute.quantization": ("Quantizer",),
    "polymux.core.cache.rules": ("StepCaching",),
    "polymux.core.cache.stepcache": ("StepRule", "AdaptiveRule"),
    "polymux.core.plugins": ("Example", "Plugin", "Plugins", "load_plugins"),
    "polymux.core.testing.conformance": ("run_checks",),
    "polymux.core.testing.conformance.bench": ("Bench",),
    "polymux.core.testing.drive": ("Driver",),
    "polymux.core.testing.local": ("LocalModel", "open_local", "serving"),
    "polymux.core.testing.engine": ("LocalEngine",),
    "polymux.core.testing.service": ("FakeService", "FakeServed"),
    "polymux.core.testing.hub": ("FakeHub",),
    "polymux.core.testing.clock": ("Clock",),
    "polymux.core.testing.plugins": ("make_plugin", "make_plugins"),
    "polymux.core.testing.media": ("write_media", "write_wav", "write_video", "write_picture", "write_speech"),
    "polymux.gateway.testing": ("open_gateway",),
}
"""Module -> the names in it that stay as they are while the API level stays. What is not here may change."""

HEAD = f"""This is the contract of **API level {API_LEVEL}**: hooks and names below stay while
the level stays. A plugin says `POLYMUX_API_LEVEL = {API_LEVEL}`; one that asks for a newer level is refused with a
reason. What is to go is marked for one release first, and `polymux plugins` shows the warning beside the plugin that
still uses it.
"""


def write_contract() -> str:
    """The page, as Markdown."""
    parts = [HEAD, "\n## Hooks\n", textwrap.dedent(inspect.getdoc(hooks) or "").partition("\n\n")[2], ""]
    for name, hook in vars(hooks).items():
        if name in HOOKS:
            parts += [f"### `{name}`\n", f"```python\n{write_signature(name, hook)}\n```\n", f"{read_doc(hook)}\n"]
    parts.append("## Names\n")
    for module, names in PUBLIC.items():
        parts.append(f"### `{module}`\n")
        for name in names:
            parts += write_name(name, getattr(importlib.import_module(module), name))
    return "\n".join(parts).rstrip() + "\n"


def write_name(name: str, value: Any) -> Iterator[str]:
    """One class or function with what belongs to it."""
    yield f"#### {name}\n"
    if not inspect.isclass(value):
        yield f"```python\n{write_signature(name, value)}\n```\n"
        yield f"{read_doc(value)}\n"
        return
    yield f"{read_doc(value)}\n"
    fields = read_fields(value)
    if fields:
        yield "| field | |\n|---|---|"
        yield from (f"| `{field}` | {' '.join(text.split())} |" for field, text in fields.items())
        yield ""
    for method, function in own_methods(value):
        yield f"```python\n{write_signature(method, function)}\n```\n"
        yield f"{read_doc(function)}\n"


def find_undocumented() -> list[str]:
    """Hooks, arguments of hooks, public names, their methods and their fields that nothing is said about.

    A field has a string of its own below it, or its name stands in the class's.
    """
    found = []
    for name in HOOKS:
        hook = getattr(hooks, name)
        text = inspect.getdoc(hook) or ""
        if not text:
            found.append(f"hook {name}")
        for argument in inspect.signature(hook).parameters:
            if f"`{argument}`" not in text:
                found.append(f"hook {name}, argument {argument}")
    for module, names in PUBLIC.items():
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if not has_doc(value):
                found.append(f"{module}.{name}")
            if inspect.isclass(value):
                found += [
                    f"{module}.{name}.{method}" for method, each in own_methods(value) if not inspect.getdoc(each)
                ]
                for field, text in read_fields(value).items():
                    own = field.partition(":")[0]
                    if not text and f"`{own}`" not in (inspect.getdoc(value) or ""):
                        found.append(f"{module}.{name}, field {own}")
    return found


def has_doc(value: Any) -> bool:
    """A docstring of its own: dataclasses and Structs make one up from their signature."""
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    return bool(text) and not text.startswith(f"{value.__name__}(")


def own_methods(kind: type) -> list[tuple[str, Any]]:
    """Public methods, except those that a base class defines already."""
    found = []
    for name, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if inspect.isfunction(function) and not name.startswith("_"):
            inherited = any(name in vars(base) for base in kind.__mro__[1:])
            if not inherited:
                found.append((name, function))
    return found


def read_fields(kind: type) -> dict[str, str]:
    """Annotated names of the class's own body, each with the string below it."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    fields = {}
    for place, node in enumerate(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            after = body.body[place + 1] if place + 1 < len(body.body) else None
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = str(after.value.value) if said else ""  # type: ignore[union-attr]
            shape = ast.unparse(node.annotation) + (f" = {ast.unparse(node.value)}" if node.value is not None else "")
            fields[f"{node.target.id}: {shape}".replace("|", "\\|")] = text
    return fields


def write_signature(name: str, function: Any) -> str:
    """The signature as it stands in the code, without `self`."""
    signature = inspect.signature(function)
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    text = str(signature.replace(parameters=parameters)).replace("'", "")
    text = re.sub(r"<class (\S+)>", r"\1", re.sub(r" at 0x[0-9a-f]+", "", text))
    return f"{'async ' if inspect.iscoroutinefunction(function) else ''}def {name}{text}"


def read_doc(value: Any) -> str:
    """The docstring; braces and angle brackets are code here, never markup."""
    text = inspect.getdoc(value) or ""
    return re.sub(r"<(?=[^\s>]+>)", "&lt;", text)


if __name__ == "__main__":
    print(write_contract(), end="")
