"""What an answer has to be that must call a tool, or may be a call or JSON, or may call strict tools: its grammar.

Where a call has to be made, the opener of the style goes into the prompt, as the template would write it, and behind it
the engine allows nothing but calls in the model's own style, with the arguments that each tool's schema allows. Every
schema is a grammar of its own, so references in it stay what they are; what the engine finds wrong in one is told with
the tool's own path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar
from gateway.errors import BadRequestError
from gateway.prompt.tool_styles import STYLES, ToolStyle
from gateway.types import Constraint, Tool, ToolUse

MAX_CALLS: Final = 32
"""Calls that one answer may be made to have, so that it comes to an end."""

_MARK: Final = re.compile("(" + "|".join(re.escape(mark) for style in STYLES for mark in style.marks) + ")")
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def calls_only(style: ToolStyle, use: ToolUse, added: Mapping[str, int]) -> Constraint:
    """What an answer has to be that begins behind the opener: a call, or several where the style and the client allow
    it. Raises BadRequestError for schemas that are too long.

    added  the model's added tokens, special or not, with their ids
    """
    rules = _calls(style, use, added)
    return _constraint(["start: calls", *rules], use, {}, "tools")


def calls_or(text: Constraint, style: ToolStyle, use: ToolUse, added: Mapping[str, int]) -> Constraint:
    """As `calls_only`, or JSON that `text` asks for. Raises BadRequestError for a text that is not JSON, and for models
    whose calls are JSON without an opener: a grammar cannot tell the two apart by their first character."""
    if style.bare or text.grammar.kind not in ("json_schema", "json_object"):
        raise BadRequestError(
            f"'{text.param}' cannot be combined with tools that this model may call: there is no telling text and call "
            "apart. With `tool_choice` `none` or `required` it can.",
            param=text.param,
            code="invalid_parameter_combination",
        )
    schema = json.loads(text.grammar.text) if text.grammar.kind == "json_schema" else {"type": "object"}
    rules = [f"start: @text | {_said(style.opener, added)} calls", *_calls(style, use, added)]
    return _constraint(rules, use, {"text": schema}, text.param)


def calls_within(style: ToolStyle, use: ToolUse, added: Mapping[str, int], ends: Collection[int]) -> Constraint | None:
    """Any text, with calls in it whose arguments are held to the schemas of strict tools, and are objects for others.
    None where nothing is strict, and for models whose calls do not begin with a token of their own: what may become a
    call is text there until it is one. Raises BadRequestError for schemas that are too long.

    ends  tokens that end an answer, which are no text
    """
    if not any(tool.strict for tool in use.callable) or style.opener not in added or style.bare:
        return None
    opener = added[style.opener]
    others = "".join(f" | <[{token}]>" for token in sorted(set(added.values()) - {opener, *ends}))
    spelled = re.escape(style.opener).replace("/", r"\/")
    rules = [
        f"start: free (<[{opener}]> calls free)*",
        f"free: TEXT? (({others[3:]}) TEXT?)*" if others else "free: TEXT?",
        rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{spelled}(.|\n)*/",
    ]
    loose = [tool if tool.strict else replace(tool, parameters={"type": "object"}) for tool in use.callable]
    use = replace(use, callable=tuple(loose))
    return _constraint([*rules, *_calls(style, use, added)], use, {}, "tools")


def _calls(style: ToolStyle, use: ToolUse, added: Mapping[str, int]) -> list[str]:
    """The rules of `calls`, behind the opener. @arguments_N are those of the N-th tool that may be called."""
    several = use.parallel and not style.single
    between = f" (between call){{0,{MAX_CALLS - 1}}}" if several else ""
    start, end = ('"[" ', ' "]"') if style.listed else ("", "")
    if style.closer:
        end = " closer?"
    rules = [
        f"calls: {_said(style.before, added)} {start}call{between}{end}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(use.callable))),
    ]
    if several:
        rules.append(f"between: {_said(style.between, added)}")
    if style.closer:
        rules.append(f"closer: {_said(style.before + style.closer, added)}")
    for number, tool in enumerate(use.callable):
        head = f'{{"name": {json.dumps(tool.name)}, "{style.key}": '
        rules.append(f'call_{number}: {json.dumps(head)} @arguments_{number} "}}"')
    return rules


def _constraint(rules: list[str], use: ToolUse, schemas: dict[str, Any], param: str) -> Constraint:
    """`schemas` are those beside the tools' own, which `param` asked for."""
    schemas = schemas | {f"arguments_{number}": _arguments(tool) for number, tool in enumerate(use.callable)}
    source = json.dumps({"lark": "\n".join(rules), "schemas": schemas}, ensure_ascii=False)
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise BadRequestError(
            f"The schemas of the tools that may be called are too long: their grammar may have {MAX_GRAMMAR_BYTES} "
            "bytes of UTF-8.",
            param="tools",
        )
    places = {"schemas.text": param} | {
        f"schemas.arguments_{number}": tool.path for number, tool in enumerate(use.callable)
    }
    return Constraint(Grammar("lark_schemas", source), param, tuple(places.items()))


def _arguments(tool: Tool) -> dict[str, Any]:
    return _NO_ARGUMENTS if tool.parameters is None else {"type": "object", **tool.parameters}


def _said(text: str, added: Mapping[str, int]) -> str:
    """Literal text as Lark writes it, the marks of tool calls as their tokens, where they have some."""
    cut = _MARK.split(text)
    parts = [f"<[{added[part]}]>" if part in added else json.dumps(part) for part in cut if part]
    return " ".join(parts)
