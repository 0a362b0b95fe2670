"""`/openapi.json` and `/docs`: the API as a document and as a page. Both are rendered once, at start.

The page is whole in itself: no script, nothing fetched from anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import polymux
from polymux.gateway.openapi import describe_api
from polymux.gateway.routes.endpoint import Endpoint

POLICY = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"}

STYLE = """
:root { color-scheme: light dark; --edge: #8884; --soft: #8881; --accent: #2a6fdb; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 small { font-weight: 400; opacity: .6; font-size: .5em; } code { font-family: ui-monospace, monospace; }
details { border: 1px solid var(--edge); border-radius: .5rem; margin: .5rem 0; }
summary { padding: .5rem .8rem; cursor: pointer; }
summary b { color: var(--accent); display: inline-block; width: 4rem; }
summary span { opacity: .7; margin-left: 1rem; } details > div { padding: 0 .8rem .8rem; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--edge); vertical-align: top; }
tr.required code { font-weight: 700; }
"""


def make_routes(endpoints: Sequence[Endpoint]) -> list[Route]:
    document = describe_api(endpoints, polymux.__version__)
    encoded = msgspec.json.encode(document)
    page = render_page(document)

    async def show_document(request: Request) -> Response:
        return Response(encoded, media_type="application/json")

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=POLICY)

    return [Route("/openapi.json", show_document), Route("/docs", show_page)]


def render_page(document: dict[str, Any]) -> str:
    """The document as HTML: one folding section per operation, one table per object."""
    schemas = document["components"]["schemas"]
    operations = [
        _render_operation(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    objects = [
        f'<details id="{_escape(name)}"><summary><code>{_escape(name)}</code></summary>'
        f"<div>{_render_object(schema)}</div></details>"
        for name, schema in sorted(schemas.items())
    ]
    info = document["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_escape(info["title"])}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style>'
        f"<h1>{_escape(info['title'])} <small>{_escape(info['version'])}</small></h1>"
        f'<p>{_escape(info["description"])} Machine-readable: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"<h2>Paths</h2>{''.join(operations)}<h2>Objects</h2>{''.join(objects)}</html>"
    )


def _render_operation(method: str, path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = []
    for parameter in operation.get("parameters", ()):
        parts.append(f"<p>{parameter['in']}: <code>{_escape(parameter['name'])}</code></p>")
    for body in operation.get("requestBody", {}).get("content", {}).values():
        parts.append(f"<h4>Request</h4>{_render_object(_resolve(body['schema'], schemas))}")
    for media, content in operation["responses"]["200"]["content"].items():
        shape = _name_type(content["schema"]) if "schema" in content else "any"
        parts.append(f"<p>Answer, <code>{_escape(media)}</code>: {shape}</p>")
    return (
        f"<details><summary><b>{method.upper()}</b><code>{_escape(path)}</code>"
        f"<span>{_escape(operation['summary'])}</span></summary><div>{''.join(parts)}</div></details>"
    )


def _render_object(schema: dict[str, Any]) -> str:
    text = f"<p>{_escape(schema['description'])}</p>" if schema.get("description") else ""
    required = schema.get("required", ())
    rows = [
        f"<tr{' class=required' if name in required else ''}><td><code>{_escape(name)}</code></td>"
        f"<td>{_name_type(field)}</td><td>{_escape(field.get('description', ''))}</td></tr>"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"{text}<table><tr><th>field</th><th>type</th><th></th></tr>{''.join(rows)}</table>"


def _resolve(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _name_type(schema: dict[str, Any]) -> str:
    """A short HTML name of a JSON schema, with its limits."""
    if "$ref" in schema:
        name = _escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " or ".join(_name_type(branch) for branch in branches if branch.get("type") != "null")
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{_escape(repr(each))}</code>" for each in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_name_type(schema.get('items', {}))}"
    limits = [
        f"{sign} {schema[key]}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", "≥"), ("exclusiveMaximum", "<"), ("maximum", "≤"))
        if key in schema
    ]
    return _escape(" ".join([str(schema.get("type", "any")), *limits]))


def _escape(text: object) -> str:
    return html.escape(str(text))
