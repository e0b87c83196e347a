"""The routes of all dialects as one OpenAPI 3.1 document. Pure: made of the tables that check the requests, once.

A body that fits its schema may still be refused for what no schema says, one that does not fit is refused for certain,
but for numbers: JSON Schema takes 1.0 for an integer, and the gateway does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gateway.api.dialect import FORM, JSON, Dialect, Route
from gateway.api.fields import JsonSchema, Parameter, or_null

OWN: Final = "kvasir"
"""Under this name are the routes of the gateway itself, which are of no dialect."""

_NAME = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
_SECURITY: Final[Mapping[str, list[dict[str, list[str]]]]] = {
    "tenant": [{"bearer": []}, {"x-api-key": []}, {"x-goog-api-key": []}, {"key": []}, {}],
    "admin": [{"bearer": []}, {}],
    "none": [],
}
_SCHEMES: Final[JsonSchema] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "x-goog-api-key": {"type": "apiKey", "in": "header", "name": "x-goog-api-key"},
    "key": {"type": "apiKey", "in": "query", "name": "key"},
}


class _Operation(NamedTuple):
    """A route, and the dialect that it is of."""

    dialect: Dialect
    tag: str
    route: Route

    @property
    def id(self) -> str:
        words = re.findall(r"\w+", template(self.route.path))
        return "_".join([self.tag, self.route.method.lower(), *words])


def document(routes: Mapping[str, Sequence[Route]], dialects: Sequence[Dialect], version: str) -> JsonSchema:
    """An OpenAPI 3.1 document, the same for the same arguments.

    routes    by the name of their dialect, or OWN
    dialects  the last of them writes the errors of the gateway's own routes, too
    """
    by_name = {dialect.name: dialect for dialect in dialects}
    operations: dict[tuple[str, str], list[_Operation]] = {}
    for name, own in routes.items():
        for route in own:
            one = _Operation(by_name.get(name, dialects[-1]), name, route)
            operations.setdefault((template(route.path), route.method.lower()), []).append(one)
    paths: JsonSchema = {}
    for (path, method), several in operations.items():
        paths.setdefault(path, {})[method] = _operation(several)
    every = [one for several in operations.values() for one in several]
    titles = [(name, by_name[name].title if name in by_name else "The gateway itself") for name in routes]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir",
            "version": version,
            "description": "A prompt-caching gateway that speaks several APIs on one port.",
        },
        "tags": [{"name": name, "description": title} for name, title in titles],
        "paths": paths,
        "components": {
            "schemas": {
                **{_error_name(dialect): dialect.error_schema for dialect in dialects},
                **{one.id: body_schema(one.route) for one in every if one.route.parameters is not None},
            },
            "securitySchemes": _SCHEMES,
        },
    }


def template(path: str) -> str:
    """A router's path as OpenAPI writes it: without the patterns of its parts."""
    return _NAME.sub(r"{\1}", path)


def body_schema(route: Route) -> JsonSchema:
    """Of the JSON body, where null is "not given". What else is in it is ignored, or refused."""
    table = route.parameters or {}
    return {
        "type": "object",
        "properties": {name: _property(parameter, name in route.required) for name, parameter in table.items()},
        "required": list(route.required),
    }


def form_schema(route: Route) -> JsonSchema:
    """Of the parts of a form. Others are ignored, or refused."""
    table = route.form or {}
    file = {"type": "string", "format": "binary", "description": "The bytes, and a filename."}
    return {
        "type": "object",
        "properties": {"file": file, **{name: _property(parameter, True) for name, parameter in table.items()}},
        "required": ["file", *route.required],
    }


def _property(parameter: Parameter, required: bool) -> JsonSchema:
    schema = parameter.check.schema
    if parameter.effect == "refused":
        harmless = ", ".join(str(value) for value in parameter.harmless)
        described = f"Refused{f', but for {harmless}' if harmless else ''}: {parameter.does}"
        return {"description": described, "enum": [None, *map(_plain, parameter.harmless)]}
    described = parameter.does if parameter.effect == "used" else f"No effect: {parameter.does}"
    return {"description": described, **(schema if required else or_null(schema))}


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _operation(several: Sequence[_Operation]) -> JsonSchema:
    """One for each path and method, of all dialects that have it."""
    first = several[0].route
    written: JsonSchema = {
        "operationId": several[0].id,
        "tags": [one.tag for one in several],
        "summary": " Or: ".join(dict.fromkeys(one.route.summary for one in several)),
        "parameters": _parameters(several),
        "responses": {
            "200": {
                "description": "The answer.",
                "content": {media: {} for media in _unique(media for one in several for media in one.route.media)},
            },
            "default": {
                "description": "An error.",
                "content": {JSON: {"schema": _any_of([_error_name(one.dialect) for one in several])}},
            },
        },
        "security": _SECURITY[first.key],
    }
    if forms := [form_schema(one.route) for one in several if one.route.form is not None]:
        schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
        written["requestBody"] = {"required": True, "content": {FORM: {"schema": schema}}}
    elif bodies := [one for one in several if one.route.parameters is not None]:
        written["requestBody"] = {
            "required": all(one.route.required for one in several),
            "content": {JSON: {"schema": _any_of([one.id for one in bodies]), "examples": _examples(bodies)}},
        }
    return written


def _parameters(several: Sequence[_Operation]) -> list[JsonSchema]:
    in_path = _NAME.findall(several[0].route.path)
    found: dict[str, JsonSchema] = {
        name: {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in in_path
    }
    for one in several:
        for name, parameter in one.route.query.items():
            described = {"name": name, "in": "query", "description": parameter.does, "schema": parameter.check.schema}
            found.setdefault(f"?{name}", described)
    return list(found.values())


def _examples(bodies: Sequence[_Operation]) -> JsonSchema:
    return {one.tag: {"value": one.route.example} for one in bodies if one.route.example is not None}


def _any_of(names: Iterable[str]) -> JsonSchema:
    references = [{"$ref": f"#/components/schemas/{name}"} for name in _unique(names)]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _error_name(dialect: Dialect) -> str:
    return f"{dialect.name}_error"


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
