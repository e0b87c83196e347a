"""Items of the Responses API into the messages that a chat template takes, with the places of their breakpoints.

What a model says in one turn is several items there (a message and the calls behind it), and one message to a template:
they are put together again, so that a history renders to what the model wrote. Reasoning is left out. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from gateway.api.openai.caching import Point, join_parts
from gateway.api.openai.messages import Message, read_arguments
from gateway.api.openai.responses.tools import CALLS, OUTPUTS, Item, call_of
from gateway.errors import BadRequestError


class Conversation(NamedTuple):
    """`points` are the breakpoints on parts, in their order."""

    messages: list[Message]
    points: list[Point]


def to_messages(instructions: str | None, items: Sequence[Item], *, new: int = 0) -> Conversation:
    """`items` has no references. Those from `new` on are the request's own, and are named by their path in it.

    Raises BadRequestError for the output of a call that is not there.
    """
    conversation = Conversation([], [])
    if instructions is not None:
        conversation.messages.append({"role": "system", "content": instructions})
    called: dict[str, tuple[str, str]] = {}  # id of a call, or of its item -> the former, and the function's name
    turn: Message | None = None  # of the assistant, to which calls are added
    for number, item in enumerate(items):
        path = f"input[{number - new}]" if number >= new else "previous_response_id"
        kind = item["type"]
        if kind == "message":
            turn = _add_message(conversation, item, path)
        elif kind in CALLS:
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                conversation.messages.append(turn)
            name, arguments = call_of(item)
            call_id = item["call_id"]
            called[call_id] = called[item.get("id") or call_id] = (call_id, name)
            call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            turn.setdefault("tool_calls", []).append(call)
        elif kind in OUTPUTS:
            turn = None
            _add_output(conversation, item, called, path)
    read_arguments(conversation.messages)
    return conversation


def _add_message(conversation: Conversation, item: Item, path: str) -> Message | None:
    """Returns it if it is the assistant's."""
    messages, points = conversation
    role = "system" if item["role"] == "developer" else item["role"]
    messages.append({"role": role, "content": join_parts(item["content"], len(messages), f"{path}.content", points)})
    return messages[-1] if role == "assistant" else None


def _add_output(conversation: Conversation, item: Item, called: dict[str, tuple[str, str]], path: str) -> None:
    (messages, points), call_id = conversation, item["call_id"]
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
        content = join_parts(output, len(messages), f"{path}.output", points)
    else:
        content = orjson.dumps(output).decode()
    call_id, name = called[call_id]
    messages.append({"role": "tool", "content": content, "tool_call_id": call_id, "name": name})
