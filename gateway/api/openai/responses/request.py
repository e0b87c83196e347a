"""Bodies of the Responses API, checked, into a Call. Pure: handlers.py brings what is kept of earlier responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.protocol.frozen import dataclass
from gateway.api.call import Call
from gateway.api.fields import Table, empty_array, read
from gateway.api.openai.caching import place_markers
from gateway.api.openai.request import read_call
from gateway.api.openai.responses.parameters import LOGPROBS, RESPONSE
from gateway.api.openai.responses.prompt import to_messages
from gateway.api.openai.responses.tools import Item, Tools
from gateway.api.openai.tools import read_tools
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """One POST to /v1/responses, checked.

    body    as it came, for what is only told again
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
    caching = place_markers(conversation.messages, conversation.points, options, leases)
    declared = tuple(one.tool for one in values.get("tools", Tools()).declared)
    tools, use = read_tools({**values, "tools": declared})
    top_logprobs = values.get("top_logprobs", 0)
    call = read_call(
        values,
        (ChatPrompt(conversation.messages, markers=caching.markers, tools=tools),),
        "input",
        max_tokens=values.get("max_output_tokens", 0),
        logprobs=top_logprobs if top_logprobs or LOGPROBS in values.get("include", ()) else None,
        caching=caching,
        tool_use=use,
    )
    if not options.get("prewarm"):
        return call
    return replace(call, sampling=replace(call.sampling, max_tokens=0), prewarm=True, constraint=None, tool_use=None)


def turns(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin when it has to be shorter: at its first item, or at a message of the user."""
    return [index for index, item in enumerate(items) if not index or item.get("role") == "user"]


def shortened(items: Sequence[Item], start: int) -> list[Item]:
    """From `start` on, with the instructions among the items before it."""
    kept = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    return [*kept, *items[start:]]
