"""The API's description, made of its structs: each parameter and each field."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torchobs.exporter import api_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BOUNDS = ("format", "pattern", "minLength", "maxLength", "minimum", "maximum", "default", "contentEncoding")


def lines(document: dict[str, Any]) -> Iterator[str]:
    """The parameters and fields of a description, by operation; independent of how its schemas are named and nested."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            for parameter in operation["parameters"]:
                yield from fields(document, parameter["schema"], f"{name} {parameter['in']} {parameter['name']}")
            body = {"body": operation["requestBody"]} if "requestBody" in operation else {}
            for part, answer in {**body, **operation["responses"]}.items():
                if "$ref" in answer:
                    yield f"{name} {answer['$ref'].removeprefix('#/components/')}"
                else:
                    yield from contents(document, answer, f"{name} {part}")
    for status, answer in document["components"]["responses"].items():
        yield from contents(document, answer, f"responses/{status}")


def contents(document: dict[str, Any], answer: dict[str, Any], at: str) -> Iterator[str]:
    """The fields of a body, by its media types."""
    for media, content in answer["content"].items():
        yield from fields(document, content["schema"], f"{at} {media} ")


def fields(document: dict[str, Any], schema: dict[str, Any], at: str) -> Iterator[str]:
    """A place with its types, and all places in it."""
    schema = resolved(document, schema)
    kinds = schema.get("type", "any")
    alone = [{**schema, "type": kind} for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    forms = [resolved(document, form) for form in schema.get("oneOf") or schema.get("anyOf") or alone]
    words: list[str] = []
    for form in forms:
        bounds = [f"{name}={form[name]}" for name in BOUNDS if name in form and form["type"] != "null"]
        closed = ["closed"] if form.get("additionalProperties") is False else []
        words += map(json.dumps, form["enum"]) if "enum" in form else [" ".join([form["type"], *closed, *bounds])]
    yield f"{at}: {' | '.join(sorted(words))}"
    for form in forms:
        for name, part in form.get("properties", {}).items():
            yield from fields(document, part, f"{at}.{name}" + "?" * (name not in form["required"]))
        if form.get("additionalProperties"):
            yield from fields(document, form["additionalProperties"], f"{at}.*")
        if "items" in form:
            yield from fields(document, form["items"], f"{at}[]")


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """What a reference refers to; anything else as it is."""
    if "$ref" not in schema:
        return schema
    schemas: dict[str, dict[str, Any]] = document["components"]["schemas"]
    return schemas[schema["$ref"].removeprefix("#/components/schemas/")]


def test_every_field_is_the_one_that_clients_know(golden: Callable[[str, str], None]) -> None:
    """Promise: no parameter, field, type, bound or value of the API comes, goes or changes unnoticed."""
    golden("api_fields.txt", "\n".join(sorted(lines(api_schema.document()))) + "\n")
