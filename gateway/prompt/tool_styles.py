"""How a model writes tool calls: a table of styles, and which of them a chat template has.

A model writes calls as its template wrote those that it was trained on. So a conversation with a call is rendered, and
what stands in the place of the model's answer is compared with the table. What is not in the table is not guessed at:
tools are refused with such a model. The neighbours are tool_calls.py, which reads calls, and tool_grammar.py, which
makes a model write them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

import xxhash

from gateway.errors import BadRequestError
from gateway.prompt.template import ChatTemplate
from gateway.types import Tool


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
        asked = template.render([question], tools=(PROBE,), add_generation_prompt=True)
        shown = template.render(messages, tools=(PROBE,), add_generation_prompt=False)
    except BadRequestError:
        return ()
    return shown, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, shown, strict=False)))


def _find(style: ToolStyle, shown: str, at: int) -> re.Match[str] | None:
    opener, listed = re.escape(style.opener), r"\[" if style.listed else ""
    call = rf'\{{"name": ?"{PROBE.name}", ?"{style.key}": ?\{{'
    if style.bare:  # nothing but the call: what stands before it may be a marker that we do not know
        return re.compile(rf"\s*(?:{opener})?{call}").match(shown, at)
    # "<tool_call>" begins like the "<think>" in its place.
    return re.compile(rf"{opener}(?P<before>\s*){listed}{call}").search(shown, max(0, at - len(style.opener)))
