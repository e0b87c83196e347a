"""Bodies of the Responses API, checked, into a Call. Pure: handlers.py brings what is kept of earlier responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.protocol.frozen import dataclass
from gateway.api.cache_control import from_body
from gateway.api.call import Call
from gateway.api.fields import empty_array, read
from gateway.api.openai.caching import place_markers
from gateway.api.openai.request import check_min_tokens, read_sampling
from gateway.api.openai.responses.parameters import LOGPROBS, RESPONSE, TOKENS
from gateway.api.openai.responses.prompt import to_messages
from gateway.api.openai.responses.tools import Item, Tools
from gateway.api.openai.tools import read_tools
from gateway.api.tiers import OPENAI_TIERS
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Tool, ToolUse


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


def parse(body: dict[str, Any]) -> ResponsesRequest:
    """Raises BadRequestError with the path of what is wrong, UnsupportedError for what is not carried out."""
    values = read(body, RESPONSE, required=_required(body))
    if values.get("stream_options") is not None and not values.get("stream"):
        raise BadRequestError(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            param="stream_options",
            code="invalid_value",
        )
    _, use = _tools(values)
    constrained = "text.format" if values.get("text") else "tool_choice" if use and use.mode == "required" else None
    if constrained and values.get("ignore_eos"):
        raise BadRequestError(
            f"Setting '{constrained}' and 'ignore_eos' at the same time is not supported.",
            param="ignore_eos",
            code="invalid_parameter_combination",
        )
    for name, wanted in (("stream", False), ("store", True)):
        if values.get("background") and values.get(name, wanted) is not wanted:
            raise BadRequestError(
                f"Invalid 'background': a response that runs in the background is kept, and asked for with GET; "
                f"'{name}' has to be {str(wanted).lower()}.",
                param="background",
                code="invalid_parameter_combination",
            )
    check_min_tokens(values, values.get("max_output_tokens", 0), unlimited=True)
    return ResponsesRequest(body, values)


def parse_count(body: dict[str, Any]) -> ResponsesRequest:
    """Of a request that only asks how many tokens its input has. As `parse`."""
    values = read(body, TOKENS, required=_required(body))
    _tools(values)
    return ResponsesRequest(body, values)


def _required(body: dict[str, Any]) -> tuple[str, ...]:
    return ("model", "input") if body.get("previous_response_id") is None else ("model",)


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
    prewarm = options.get("prewarm", False)
    tools, use = _tools(values)
    return Call(
        model=values["model"],
        prompts=(ChatPrompt(conversation.messages, markers=caching.markers, tools=tools),),
        prompt_param="input",
        sampling=read_sampling(values, 0 if prewarm else values.get("max_output_tokens", 0), _logprobs(values)),
        stop=values.get("stop", ()),
        stream=values.get("stream", False),
        prewarm=prewarm,
        constraint=None if prewarm else values.get("text"),
        tool_use=None if prewarm else use,
        use_cache=caching.use_cache,
        only_leased=caching.only_leased,
        cache_key=values.get("prompt_cache_key", ""),
        cache_salt=values.get("cache_salt", ""),
        tier=OPENAI_TIERS[values.get("service_tier", "auto")],
        reuse=from_body(values.get("cache", {})),
    )


def _tools(values: dict[str, Any]) -> tuple[tuple[Tool, ...], ToolUse | None]:
    declared = tuple(one.tool for one in values.get("tools", Tools()).declared)
    return read_tools({**values, "tools": declared})


def turns(items: Sequence[Item]) -> list[int]:
    """Where a conversation may begin when it has to be shorter: at its first item, or at a message of the user."""
    return [index for index, item in enumerate(items) if not index or item.get("role") == "user"]


def shortened(items: Sequence[Item], start: int) -> list[Item]:
    """From `start` on, with the instructions among the items before it."""
    kept = [item for item in items[:start] if item.get("role") in ("system", "developer")]
    return [*kept, *items[start:]]


def _logprobs(values: dict[str, Any]) -> int | None:
    top: int = values.get("top_logprobs", 0)
    return top if top or LOGPROBS in values.get("include", ()) else None
