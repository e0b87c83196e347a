"""`tools` and `toolConfig` of the Gemini API into the tools of a prompt and what an answer may do with them. Pure."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from gateway.api.fields import (
    MAX_ITEMS,
    an_object,
    anything,
    boolean,
    invalid,
    left_out,
    no_effect,
    table,
    takes,
    text,
    used,
)
from gateway.api.gemini.proto import enum, message, message_schema, read, repeated, under
from gateway.api.gemini.schemas import schema
from gateway.api.tools import Mode, ToolChoice, check_together, use_of
from gateway.types import Tool, ToolUse

MODES: Final = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
_MODES: Final[dict[str, Mode]] = {"ANY": "required", "NONE": "none"}
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

_OPEN: Final = frozenset(
    ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "$ref")
)
"""Keywords that allow other arguments."""

_string = text()
_NOT_OURS: Final = "Kvasir has no tools of its own; declare functions."

DECLARATION: Final = table(
    used("name", _string, "1 to 128 letters, digits and `_.:-`, required", "Of the function."),
    used("description", _string, "string", "What the model is told of it."),
    used("parameters", schema, "Schema of type `OBJECT`", "Its arguments, with types in capitals."),
    used("parametersJsonSchema", an_object, "JSON Schema of an object", "The same; not together with `parameters`."),
    no_effect("response", anything, "Schema", "The model is not told what comes back."),
    no_effect("responseJsonSchema", anything, "JSON Schema", "The model is not told what comes back."),
    no_effect("behavior", enum("UNSPECIFIED", "BLOCKING"), "`BLOCKING`", "Every call is."),
)


_SERVER_TOOLS: Final = (
    *("googleSearch", "googleSearchRetrieval", "codeExecution", "urlContext", "computerUse", "fileSearch"),
    *("googleMaps", "retrieval", "enterpriseWebSearch", "mcpServers", "parallelAiSearch", "exaAiSearch"),
)
TOOL: Final = table(
    used("functionDeclarations", repeated(message(DECLARATION)), "array of declarations", "Functions."),
    *(left_out(name, anything, "anything", _NOT_OURS) for name in _SERVER_TOOLS),
)
CALLING: Final = table(
    used("mode", enum(*MODES), "`AUTO`, `ANY`, `NONE` or `VALIDATED`; default `AUTO`", "Whether functions are called."),
    used(
        "allowedFunctionNames",
        repeated(_string),
        "array of names; with `ANY` or `VALIDATED`",
        "The functions that may be called.",
    ),
    no_effect("streamFunctionCallArguments", boolean, "boolean", "Calls are streamed whole."),
)
TOOL_CONFIG: Final = table(
    used("functionCallingConfig", message(CALLING), "object: `mode`, `allowedFunctionNames`", "Which calls are made."),
    no_effect("retrievalConfig", an_object, "object", "Nothing is retrieved."),
    no_effect("includeServerSideToolInvocations", boolean, "boolean", "There are none."),
)


_groups = repeated(message(TOOL))


@takes(_groups.schema)
def tools(value: Any, path: str) -> tuple[Tool, ...]:
    """All declared functions, in order. Raises BadRequestError for a name that is no name, or there twice."""
    declared = {
        f"{path}[{number}].functionDeclarations[{index}]": one
        for number, group in enumerate(_groups(value, path))
        for index, one in enumerate(group.get("functionDeclarations", []))
    }
    found = [_tool(one, where) for where, one in declared.items()]
    return check_together(found, path, [f"{where}.name" for where in declared], MAX_ITEMS)


def _tool(declared: dict[str, Any], path: str) -> Tool:
    name = declared.get("name", "")
    if not _NAME.fullmatch(name):
        raise invalid(f"{path}.name", "1 to 128 letters, digits and '_.:-' are expected")
    if "parameters" in declared and "parametersJsonSchema" in declared:
        raise invalid(f"{path}.parametersJsonSchema", "it is there besides 'parameters'")
    key = "parametersJsonSchema" if "parametersJsonSchema" in declared else "parameters"
    return Tool(name, declared.get("description"), _closed(declared.get(key)), path=f"{path}.{key}")


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Arguments are those that are declared, unless a schema says otherwise: the SDK makes schemas of Python functions,
    which take no others, and does not say so."""
    if not parameters or not parameters.get("properties") or _OPEN & set(parameters):
        return parameters
    return {**parameters, "additionalProperties": False}


@takes(message_schema(TOOL_CONFIG))
def tool_config(value: Any, path: str) -> dict[str, Any]:
    """Its functionCallingConfig, checked; empty without one."""
    calling: dict[str, Any] = read(value, TOOL_CONFIG, path).get("functionCallingConfig", {})
    return calling


def tool_use(declared: tuple[Tool, ...], calling: dict[str, Any], path: str) -> ToolUse | None:
    """None where nothing may be called. ANY is one call or several, also of a single allowed name: the names say which
    functions, not how often, and this API has no field for one call. `calling` is what `tool_config` returned, `path`
    its path."""
    mode, names = calling.get("mode", "AUTO"), calling.get("allowedFunctionNames", [])
    where = under(path, "functionCallingConfig.allowedFunctionNames")
    if names and mode not in ("ANY", "VALIDATED"):
        raise invalid(where, "it may only be set with the mode ANY or VALIDATED")
    if mode == "ANY" and not declared:
        raise invalid(under(path, "functionCallingConfig.mode"), "it is ANY, and no functions are declared")
    allowed = tuple((name, f"{where}[{index}]") for index, name in enumerate(names))
    return use_of(declared, ToolChoice(_MODES.get(mode, "auto"), allowed or None), parallel=True)


def strict(declared: tuple[Tool, ...], calling: dict[str, Any]) -> tuple[Tool, ...]:
    """The tools of a prompt: with the mode VALIDATED their arguments are held to their schemas."""
    if calling.get("mode") != "VALIDATED":
        return declared
    return tuple(replace(tool, strict=True) for tool in declared)
