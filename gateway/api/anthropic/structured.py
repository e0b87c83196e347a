"""`output_config`: what an answer has to be. The API's subset of JSON Schema is checked here, and what is outside of it
is a 400, as it is upstream; the engine does the rest.

Required properties come before optional ones, each in the order of the schema: the engine writes properties in the
order that it is given.
"""

from __future__ import annotations

from typing import Any, Final

from engine.protocol import follow_reference
from gateway.api.constraints import check_size, json_schema
from gateway.api.fields import an_object, choice, closed_record, invalid, made, record
from gateway.types import Constraint

MAX_OPTIONAL: Final = 24
"""Properties of all schemas of a request that are not required."""

_FORBIDDEN: Final = (
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "maxItems",
    "uniqueItems",
    "contains",
    "prefixItems",
    "minProperties",
    "maxProperties",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
)


def _format(given: dict[str, Any], path: str) -> Constraint:
    where = f"{path}.schema"
    schema, optional = read_schema(given["schema"], where)
    if optional > MAX_OPTIONAL:
        raise invalid(where, f"it has {optional} optional properties, and may have {MAX_OPTIONAL}")
    return json_schema(schema, where)


check_format: Final = made(closed_record("type", "schema", type=choice("json_schema"), schema=an_object), _format)
check_output_config = record(effort=choice("low", "medium", "high", "xhigh", "max"), format=check_format)


def read_schema(schema: dict[str, Any], path: str) -> tuple[dict[str, Any], int]:
    """The schema with required properties first, and how many are optional. Raises BadRequestError with the path of
    what is outside of the subset."""
    recursive = check_size(schema, path)
    reader = _Reader(schema)
    read = reader.read(schema, path)
    if recursive is not None:
        raise invalid(recursive, "recursive schemas are not supported")
    return read, reader.optional


class _Reader:
    """Goes through one schema."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.optional = 0
        self._root = root

    def read(self, schema: Any, path: str) -> Any:
        if type(schema) is bool:
            return schema
        an_object(schema, path)
        for key in _FORBIDDEN:
            if key in schema:
                raise invalid(f"{path}.{key}", f"'{key}' is not supported in schemas")
        self._check_values(schema, path)
        if "$ref" in schema:
            self._check_reference(schema["$ref"], f"{path}.$ref")
        read = dict(schema)
        kinds = schema.get("type")
        if kinds == "object" or (type(kinds) is list and "object" in kinds) or "properties" in schema:
            self._read_object(read, path)
        for key in ("$defs", "definitions"):
            if key in schema:
                items = an_object(schema[key], f"{path}.{key}").items()
                read[key] = {name: self.read(item, f"{path}.{key}.{name}") for name, item in items}
        for key in ("anyOf", "allOf"):
            if key in schema:
                read[key] = self._read_all(schema[key], f"{path}.{key}")
        if "items" in schema:
            read["items"] = self.read(schema["items"], f"{path}.items")
        return read

    def _read_object(self, schema: dict[str, Any], path: str) -> None:
        if schema.get("additionalProperties") is not False:
            why = "for 'object' type, 'additionalProperties' must be explicitly set to false"
            raise invalid(f"{path}.additionalProperties", why)
        where = f"{path}.properties"
        properties = an_object(schema.get("properties", {}), where)
        required = schema.get("required", [])
        if type(required) is not list or any(type(name) is not str or name not in properties for name in required):
            raise invalid(f"{path}.required", "an array of names of properties is expected")
        self.optional += sum(name not in required for name in properties)
        order = sorted(properties, key=lambda name: name not in required)
        schema["properties"] = {name: self.read(properties[name], f"{where}.{name}") for name in order}

    def _read_all(self, schemas: Any, path: str) -> list[Any]:
        if type(schemas) is not list or not schemas:
            raise invalid(path, "an array of schemas is expected")
        if path.endswith("allOf") and any(type(schema) is dict and "$ref" in schema for schema in schemas):
            raise invalid(path, "'allOf' is not supported together with '$ref'")
        return [self.read(schema, f"{path}[{index}]") for index, schema in enumerate(schemas)]

    def _check_values(self, schema: dict[str, Any], path: str) -> None:
        values = schema.get("enum", [])
        if type(values) is not list or any(type(value) in (dict, list) for value in values):
            raise invalid(f"{path}.enum", "an array of strings, numbers, booleans and nulls is expected")
        if schema.get("minItems") not in (None, 0, 1):
            raise invalid(f"{path}.minItems", "only 0 and 1 are supported")

    def _check_reference(self, reference: Any, path: str) -> None:
        """What is referred to is read where it is."""
        if type(reference) is not str or not reference.startswith("#"):
            raise invalid(path, "only references inside of the schema are supported")
        if follow_reference(self._root, reference) is None:
            raise invalid(path, f"there is nothing at {reference[:64]!r}")
