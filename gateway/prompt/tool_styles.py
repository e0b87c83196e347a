"""How a model writes tool calls: a table of styles, and which of them a chat template has.

A model writes calls as its template wrote those that it was trained on. So a conversation with a call is rendered, and
what stands in the place of the model's answer is compared with the table. What is not in the table is not guessed at:
tools are refused with such a model. tool_calls.py reads calls.

Where a call has to be made, the opener of the style goes into the prompt, as the template would write it, and behind it
the engine allows nothing but calls in that style, with the arguments that each tool's schema allows. Every schema is a
grammar of its own, so references in it stay what they are; an error of the engine names the tool's own path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

import xxhash

from engine.protocol import MAX_GRAMMAR_BYTES, Grammar
from gateway.errors import BadRequestError
from gateway.prompt.template import ChatTemplate
from gateway.types import Constraint, Tool, ToolUse


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """A call is a JSON object with "name", and under `key` an object of arguments.

    opener   stands before each call, or before the list of all; a model may leave it out where `bare`
    before   what the template puts between the opener and the first call's "{" or the list's "["
    between  what it puts between two calls, openers and closers included
    closer   stands behind each call, after the same blanks as `before`; empty for none
    listed   the calls are a JSON array
    bare     what looks like a call of a tool that may be called is one, where a line begins
    single   the template has no way to write several calls into one answer
    short_ids  it wants ids of calls of SHORT_ID characters, letters and digits
    """

    name: str
    key: str
    opener: str = ""
    before: str = ""
    between: str = ""
    closer: str = ""
    listed: bool = False
    bare: bool = False
    single: bool = False
    short_ids: bool = False

    @property
    def forced_opener(self) -> str:
        """What a prompt ends with when the answer has to be a call."""
        return "" if self.bare else self.opener

    @property
    def marks(self) -> frozenset[str]:
        """What stands around calls, and has a token of its own in most models."""
        return frozenset((self.opener, self.closer)) - {""}


HERMES: Final = ToolStyle(
    "hermes",
    "arguments",
    opener="<tool_call>",
    before="\n",
    between="\n</tool_call>\n<tool_call>\n",
    closer="</tool_call>",
)
MISTRAL: Final = ToolStyle("mistral", "arguments", opener="[TOOL_CALLS]", between=", ", listed=True)
LLAMA3: Final = ToolStyle("llama3", "parameters", opener="<|python_tag|>", between="; ", bare=True)
JSON: Final = ToolStyle("json", "arguments", between="\n", bare=True)

STYLES: Final = (HERMES, MISTRAL, LLAMA3, JSON)

SHORT_ID: Final = 9
"""Characters of a call's id in Mistral's templates."""

UNKNOWN: Final = "its chat template writes tool calls in a form that is not known here"

PROBE: Final = Tool("find_probe", "Finds.", {"type": "object", "properties": {"of": {"type": "string"}}})


def find_style(template: ChatTemplate) -> ToolStyle | str:
    """The style, or why there is none."""
    if not template.takes_tools:
        return "its chat template takes no tools"
    for answered in (False, True):  # some templates want a result behind each call
        shown = _show(template, 1, answered=answered)
        for style in STYLES if shown else ():
            if (found := _find(style, *shown)) is not None:
                return replace(
                    style,
                    before=found["before"] if style.listed else style.before,
                    single=not _show(template, 2, answered=answered),
                    short_ids=not _show(template, 1, answered=answered, call_id="call_0123456789abcdef01234567"),
                )
    return UNKNOWN


def shorten_ids(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages with short ids of calls, the same for the same id. Those that are short already stay."""
    changed: list[Mapping[str, Any]] = []
    for message in messages:
        if type(message.get("tool_call_id")) is str:
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        if message.get("tool_calls"):
            calls = [{**call, "id": _short(str(call.get("id", "")))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        changed.append(message)
    return changed


def _short(call_id: str) -> str:
    if len(call_id) == SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return xxhash.xxh3_64_hexdigest(call_id.encode())[:SHORT_ID]


def _show(template: ChatTemplate, calls: int, *, answered: bool, call_id: str = "probe") -> tuple[str, int] | tuple[()]:
    """A conversation in which the model has called a tool, and where in it the model's own words begin, or something
    that would have been put before them. Empty where the template refuses that."""
    question = {"role": "user", "content": "Where?"}
    function = {"name": PROBE.name, "arguments": {"of": "it"}}
    made = [
        {"id": f"{call_id}{number:0{SHORT_ID - len('probe')}}", "type": "function", "function": function}
        for number in range(calls)
    ]
    messages: list[dict[str, Any]] = [question, {"role": "assistant", "content": "", "tool_calls": made}]
    if answered:
        messages += [
            {"role": "tool", "name": PROBE.name, "tool_call_id": call["id"], "content": "There."} for call in made
        ]
    try:
        rendered = template.render([question], tools=(PROBE,), add_generation_prompt=True)
        shown = template.render(messages, tools=(PROBE,), add_generation_prompt=False)
    except BadRequestError:
        return ()
    return shown, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(rendered, shown, strict=False)))


def _find(style: ToolStyle, shown: str, at: int) -> re.Match[str] | None:
    opener, listed = re.escape(style.opener), r"\[" if style.listed else ""
    call = rf'\{{"name": ?"{PROBE.name}", ?"{style.key}": ?\{{'
    if style.bare:  # nothing but the call: what stands before it may be a marker that we do not know
        return re.compile(rf"\s*(?:{opener})?{call}").match(shown, at)
    # "<tool_call>" begins like the "<think>" in its place.
    return re.compile(rf"{opener}(?P<before>\s*){listed}{call}").search(shown, max(0, at - len(style.opener)))


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
