"""Bodies of the Responses API, checked, into a Call. Pure: handlers.py brings what is kept of earlier responses.

One turn of a model is several items there (a message and the calls behind it), and one message to a template:
they are put together again, so that a history renders to what the model wrote. Reasoning is no part of it; what it has
for the API that made it goes before the message or the call that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from engine.protocol.frozen import dataclass
from gateway.api.call import Call, take_thoughts
from gateway.api.fields import Table, array_too_long, empty_array, read
from gateway.api.openai.caching import Parts, join_parts, place_markers
from gateway.api.openai.messages import Message, read_arguments
from gateway.api.openai.request import read_call
from gateway.api.openai.responses.parameters import LOGPROBS, RESPONSE
from gateway.api.openai.responses.tools import CALLS, OUTPUTS, Item, Tools, call_of
from gateway.api.openai.responses.tools import tools as read_declared
from gateway.api.openai.tools import read_tools
from gateway.api.tools import MAX_TOOLS
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One POST to /v1/responses, checked.

    body    as received, for fields that are only returned
    values  checked, by parameter
    """

    body: dict[str, Any]
    values: dict[str, Any]

    @property
    def items(self) -> list[Item]:
        """Of this request alone, without ids; references are not resolved."""
        items: list[Item] = self.values.get("input", [])
        return items


def parse(body: dict[str, Any], table: Table = RESPONSE) -> ResponsesRequest:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""
    required = ("model", "input") if body.get("previous_response_id") is None else ("model",)
    values = read(body, table, required)
    for name, wanted in (("stream", False), ("store", True)):
        if values.get("background") and values.get(name, wanted) is not wanted:
            raise BadRequestError(
                f"Invalid 'background': a response that runs in the background is kept, and asked for with GET; "
                f"'{name}' has to be {str(wanted).lower()}.",
                param="background",
                code="invalid_parameter_combination",
            )
    return ResponsesRequest(body, values)


def with_tools(query: ResponsesRequest, items: Sequence[Item]) -> ResponsesRequest:
    """With the tools that items add to the conversation, which a model is offered like all others: the last one of a
    name. The response object has those of the request alone. Raises BadRequestError for too many."""
    added = [
        one
        for item in items
        if item["type"] == "additional_tools"
        for one in read_declared(item["tools"], "tools").declared
    ]
    if not added:
        return query
    own = query.values.get("tools", Tools())
    declared = tuple({one.tool.name: one for one in (*own.declared, *added)}.values())
    if len(declared) > MAX_TOOLS:
        raise array_too_long("tools", MAX_TOOLS, len(declared))
    return replace(query, values={**query.values, "tools": own._replace(declared=declared)})


def to_call(query: ResponsesRequest, items: Sequence[Item], leases: LeaseSettings) -> Call:
    """`items` are those of earlier responses and the request's own, at the end, without references.

    Raises BadRequestError for items that make no message, for the output of a call that is not there, and for a ttl
    that the operator does not allow.
    """
    values = query.values
    conversation = to_messages(values.get("instructions"), items, new=len(items) - len(query.items))
    if not conversation.messages:
        raise empty_array("input")
    options = values.get("prompt_cache_options", {})
    messages, found = conversation
    caching = place_markers(messages, found, options, leases)
    thoughts = take_thoughts(messages)
    declared = tuple(one.tool for one in values.get("tools", Tools()).declared)
    tools, use = read_tools({**values, "tools": declared})
    top_logprobs = values.get("top_logprobs", 0)
    call = read_call(
        values,
        (ChatPrompt(messages, markers=caching.markers, tools=tools, media=tuple(found.media), thoughts=thoughts),),
        "input",
        max_tokens=values.get("max_output_tokens", 0),
        logprobs=top_logprobs if top_logprobs or LOGPROBS in values.get("include", ()) else None,
        caching=caching,
        tool_use=use,
    )
    if not options.get("prewarm"):
        return call
    return replace(call, sampling=replace(call.sampling, max_tokens=0), prewarm=True, constraint=None, tool_use=None)


class Conversation(NamedTuple):
    """Messages, and what their parts have besides text."""

    messages: list[Message]
    found: Parts


def to_messages(instructions: str | None, items: Sequence[Item], *, new: int = 0) -> Conversation:
    """`items` has no references. Those from `new` on are the request's own, and are named by their path in it.

    Raises BadRequestError for the output of a call that is not there.
    """
    conversation = Conversation([], Parts([], []))
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    called: dict[str, tuple[str, str]] = {}  # id of a call, or of its item -> the former, and the function's name
    turn: Message | None = None  # of the assistant, to which calls are added
    thoughts: list[str] = []  # that nothing came after yet
    for number, item in enumerate(items):
        path = f"input[{number - new}]" if number >= new else "previous_response_id"
        kind = item["type"]
        if kind == "message":
            turn = _add_message(conversation, item, path)
            _add_thoughts(turn, thoughts, -1)
        elif kind == "reasoning":
            thoughts += [item["encrypted_content"]] if "encrypted_content" in item else []
        elif kind in CALLS:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                conversation.messages.append(turn)
            name, arguments = call_of(item)
            call_id = item["call_id"]
            called[call_id] = called[item.get("id") or call_id] = (call_id, name)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            calls = turn.get("tool_calls", ())
            _add_thoughts(turn, thoughts, len(calls) if calls or turn["content"] else -1)
            turn.setdefault("tool_calls", []).append(call)
        elif kind in OUTPUTS:
            turn = None
            thoughts.clear()
            _add_output(conversation, item, called, path)
    read_arguments(conversation.messages)
    return conversation


def _add_thoughts(turn: Message | None, thoughts: list[str], call: int) -> None:
    """Before this call of a message of the assistant; -1: before its text. Those before anything else are dropped."""
    if turn is not None and thoughts:
        turn.setdefault("thoughts", []).extend((call, one) for one in thoughts)
    thoughts.clear()


def _add_message(conversation: Conversation, item: Item, path: str) -> Message | None:
    """Returns it if it is the assistant's."""
    messages, found = conversation
    role = "system" if item["role"] == "developer" else item["role"]
    messages.append({"role": role, "content": join_parts(item["content"], len(messages), f"{path}.content", found)})
    return messages[-1] if role == "assistant" else None


def _add_output(conversation: Conversation, item: Item, called: dict[str, tuple[str, str]], path: str) -> None:
    (messages, found), call_id = conversation, item["call_id"]
    if call_id not in called:
        raise BadRequestError(
            f"No tool call found for function call output with call_id {call_id[:64]!r}.",
            param=f"{path}.call_id",
            code="invalid_value",
        )
    output: Any = item.get("output", item["status"])  # a patch may have no other output
    if type(output) is str:
        content = output
    elif item["type"] in ("function_call_output", "custom_tool_call_output"):
        content = join_parts(output, len(messages), f"{path}.output", found)
    else:
        content = orjson.dumps(output).decode()
    call_id, name = called[call_id]
    messages.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})


def turns(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin when it has to be shorter: at its first item, or at a message of the user."""
    return [index for index, item in enumerate(items) if not index or item.get("role") == "user"]


def shortened(items: Sequence[Item], start: int) -> list[Item]:
    """From `start` on, with the instructions among the items before it."""
    kept = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    return [*kept, *items[start:]]
