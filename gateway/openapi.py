"""The OpenAPI document, generated from the endpoints and their models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.schemas.errors import ErrorBody

REFERENCE = "#/components/schemas/{model}"


def describe_api(endpoints: Sequence[Endpoint], version: str) -> dict[str, Any]:
    """OpenAPI 3.1, which takes JSON Schema as it is."""
    references, definitions = models_json_schema(_list_models(endpoints), ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    names: set[str] = set()
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        names.add(name := _name(endpoint, names))
        paths.setdefault(path, {})[endpoint.method.lower()] = _describe(endpoint, name, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": "polymux", "version": version, "description": "OpenAI-compatible, with extensions."},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _list_models(endpoints: Iterable[Endpoint]) -> list[tuple[type[BaseModel], JsonSchemaMode]]:
    models: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {(ErrorBody, "serialization"): None}
    for endpoint in endpoints:
        if endpoint.request is not None:
            models[endpoint.request, "validation"] = None
        for model in (endpoint.response, endpoint.stream):
            if model is not None:
                models[model, "serialization"] = None
    return list(models)


def _name(endpoint: Endpoint, taken: set[str]) -> str:
    """The operation's name, an identifier that no other has: generators of clients make a function of it."""
    place = re.sub(r"\W+", "_", endpoint.path).strip("_")
    name = place if endpoint.tag == "plugins" else endpoint.handle.__name__
    for free in (name, f"{name}_{place}", f"{name}_{place}_{endpoint.method.lower()}"):
        if free not in taken:
            return free
    raise ValueError(f"{endpoint.method} {endpoint.path} is there twice")


def _describe(endpoint: Endpoint, name: str, references: Any) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.response is not None:
        content[endpoint.media] = {"schema": references[endpoint.response, "serialization"]}
    elif endpoint.media != "application/json":
        content[endpoint.media] = {}
    if endpoint.stream is not None:
        content["text/event-stream"] = {"schema": references[endpoint.stream, "serialization"]}
    if not content:
        content[endpoint.media] = {}
    failure = {"schema": references[ErrorBody, "serialization"]}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "operationId": name,
        "responses": {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "What went wrong", "content": {"application/json": failure}},
        },
    }
    if endpoint.task is not None:
        operation["x-polymux"] = {"task": endpoint.task, "stream": endpoint.mode, "upload": endpoint.upload}
    if "{" in endpoint.path:
        name = endpoint.path.partition("{")[2].partition(":")[0].rstrip("}")
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.request is not None and endpoint.method == "POST":
        body = {endpoint.request_media: {"schema": references[endpoint.request, "validation"]}}
        operation["requestBody"] = {"required": True, "content": body}
    elif endpoint.request is not None:
        operation["parameters"] = [
            {"name": field.alias or name, "in": "query", "required": field.is_required(), "schema": {}}
            for name, field in endpoint.request.model_fields.items()
        ]
    return operation
