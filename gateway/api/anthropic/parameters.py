"""The parameters of /v1/messages and /v1/messages/count_tokens as tables: what each may be, and whether it is carried
out, accepted without effect, or refused. docs/http-api.md is held to these tables by a test.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.api.anthropic.blocks import check_control, only
from gateway.api.anthropic.messages import read_system, read_turns
from gateway.api.anthropic.structured import check_format, check_output_config
from gateway.api.anthropic.tools import read_choice, read_tools
from gateway.api.anthropic.wire import NO_THREADS
from gateway.api.cache_control import check_cache
from gateway.api.fields import (
    MAX_STOP_CHARS,
    Parameter,
    a_list,
    an_object,
    anything,
    array_too_long,
    boolean,
    choice,
    integer,
    invalid,
    missing,
    number,
    object_schema,
    record,
    required_text,
    takes,
    text,
    wrong_type,
)
from gateway.errors import UnsupportedError

MAX_TOKENS: Final = 2**31 - 1
MAX_STOPS: Final = 64
MIN_THINKING: Final = 1024

SAMPLING: Final = ("temperature", "top_p", "top_k")
"""Parameters that version 2026-10-21 does not have."""

_string = text()
_stop = text(MAX_STOP_CHARS)
_display = choice("summarized", "omitted")
_budget = integer(MIN_THINKING, MAX_TOKENS)
_message_id = text(256)
_thinking: Final = {
    "enabled": record(type=_string, budget_tokens=_budget, display=_display),
    "adaptive": record(type=_string, display=_display),
    "between_tools": record(type=_string),
    "disabled": record(type=_string),
}


@takes({"type": "array", "items": {**_stop.schema, "minLength": 1}, "maxItems": MAX_STOPS})
def stop_sequences(value: Any, path: str) -> tuple[str, ...]:
    """Strings that are not blank."""
    if type(value) is not list:
        raise wrong_type(path, "an array of strings", value)
    if len(value) > MAX_STOPS:
        raise array_too_long(path, MAX_STOPS, len(value))
    for index, item in enumerate(value):
        if not _stop(item, f"{path}[{index}]").strip():
            raise invalid(f"{path}[{index}]", "each stop sequence must contain non-whitespace")
    return tuple(value)


@takes(
    {
        "anyOf": [
            object_schema({"type": {"const": "enabled"}, "budget_tokens": _budget.schema, "display": _display.schema})
            | {"required": ["type", "budget_tokens"]},
            object_schema({"type": {"const": "adaptive"}, "display": _display.schema}, "type"),
            object_schema({"type": {"enum": ["between_tools", "disabled"]}}, "type"),
        ]
    }
)
def thinking(value: Any, path: str) -> dict[str, Any]:
    """One of the four kinds, with what belongs to it."""
    kind = an_object(value, path).get("type")
    if kind is None:
        raise missing(f"{path}.type")
    checked: dict[str, Any] = _thinking[choice(*_thinking)(kind, f"{path}.type")](value, path)
    if kind == "enabled" and "budget_tokens" not in checked:
        raise missing(f"{path}.budget_tokens")
    return checked


@takes(object_schema({"previous_message_id": _message_id.schema}))
def diagnostics(value: Any, path: str) -> str | None:
    """The id of the answer to compare with; None on the first turn."""
    only(an_object(value, path), path, "previous_message_id")
    previous = value.get("previous_message_id")
    return None if previous is None else _message_id(previous, f"{path}.previous_message_id")


@takes({"type": "object", "properties": {"edits": {"anyOf": [{"type": "array"}, {"type": "null"}]}}})
def context_management(value: Any, path: str) -> None:
    """Nothing, where all edits are those that have no effect here. Raises UnsupportedError for any other."""
    edits = an_object(value, path).get("edits")
    for index, edit in enumerate(() if edits is None else a_list(edits, f"{path}.edits")):
        where = f"{path}.edits[{index}]"
        if not required_text(an_object(edit, where), "type", where).startswith("clear_thinking_"):
            why = "Of a conversation nothing is removed or summarised here."
            raise UnsupportedError(why, param=f"{where}.type", reason=why)


@takes({})
def no_threads(value: Any, path: str) -> None:
    """Raises UnsupportedError with the code by which the SDK's tool runner goes on without threads."""
    why = "No threads are kept: send the whole conversation."
    raise UnsupportedError(why, param=path, reason=why, code=NO_THREADS)


def _table(*parameters: Parameter) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}


MESSAGES: Final = _table(
    Parameter("model", _string, "string, required", "Name of a served model, as in `GET /v1/models`."),
    Parameter("messages", read_turns, "array of 1 to 10,000 messages, required", "The conversation."),
    Parameter(
        "max_tokens",
        integer(0, MAX_TOKENS),
        "integer from 0, required",
        "Tokens to generate at most; fewer where the context ends. 0 computes the prompt, so that it is cached, and "
        "generates nothing.",
    ),
    Parameter("system", read_system, "string, or array of text blocks", "Instructions that come before everything."),
    Parameter("stream", boolean, "boolean, default false", "Answer as server-sent events."),
    Parameter(
        "stop_sequences",
        stop_sequences,
        "array of up to 64 strings of up to 1024 characters, none of them blank",
        "Each ends the answer, is told in `stop_sequence`, and is not part of the text.",
    ),
    Parameter(
        "temperature",
        number(0, 1),
        "number 0 to 1, default 1; only in version 2023-06-01",
        "0 takes the likeliest token.",
    ),
    Parameter(
        "top_p",
        number(0, 1),
        "number 0 to 1, default 1; only in version 2023-06-01",
        "Samples from the likeliest tokens of this total.",
    ),
    Parameter(
        "top_k",
        integer(0, MAX_TOKENS),
        "integer, default 0; only in version 2023-06-01",
        "Samples from that many likeliest tokens; 0 from all.",
    ),
    Parameter(
        "output_config",
        check_output_config,
        "object: `format` of type `json_schema`, `effort`",
        "`format`: what the answer has to be. `effort` has no effect: the model works as it was made to.",
    ),
    Parameter(
        "output_format",
        check_format,
        "object: `type` `json_schema`, `schema`",
        "The older form of `output_config.format`.",
    ),
    Parameter(
        "thinking",
        thinking,
        "object: `type` `enabled` with `budget_tokens`, `adaptive`, `between_tools` or `disabled`",
        "Checked, and held against other parameters as upstream. The model thinks as it was made to, in its text.",
    ),
    Parameter(
        "metadata",
        record(user_id=text(512)),
        "object: `user_id` of up to 512 characters",
        "The key decides who asks.",
        "none",
    ),
    Parameter(
        "service_tier",
        choice("auto", "standard_only"),
        "`auto` or `standard_only`",
        "`auto` is `priority` for tenants who have it; `usage.service_tier` says which it was.",
    ),
    Parameter(
        "speed", choice("standard", "fast"), "`standard` or `fast`", "There is one speed, and it is `standard`.", "none"
    ),
    Parameter(
        "cache_control",
        check_control,
        "object: `type` `ephemeral`, `ttl` `5m` or `1h`",
        "Marks the last block that can be cached.",
    ),
    Parameter(
        "cache",
        check_cache,
        "object: `ttl`, `s-maxage`, `no-cache`, `no-store`, `use-cache`, `only-if-cached`, `namespace`, `semantic`, "
        "`similarity`",
        "Extension, as in other gateways: what may be done with earlier answers; see The response cache.",
    ),
    Parameter(
        "diagnostics",
        diagnostics,
        "object: `previous_message_id`, a string or null",
        "Why less was read than the message with this id left in the cache.",
    ),
    Parameter(
        "tools",
        read_tools,
        "array of up to 512 tools of type `custom`, `bash_*`, `text_editor_*` or `memory_*`",
        "What the model may call. Tools that Anthropic runs are left out.",
    ),
    Parameter(
        "tool_choice",
        read_choice,
        "object: `type` `auto`, `any`, `tool` with `name`, or `none`; `disable_parallel_tool_use`",
        "Whether it may, or has to, and which.",
    ),
    Parameter(
        "inference_geo",
        _string,
        "string; only `global`",
        "Where the models run is for the operator to say.",
        "refused",
        ("global",),
    ),
    Parameter(
        "context_management",
        context_management,
        "object: `edits` of the type `clear_thinking_*`",
        "Which thoughts of earlier turns stay is for the chat template to say. Other edits are refused.",
        "none",
    ),
    Parameter(
        "mcp_servers", anything, "array; only `[]`", "No tools of other servers are called from here.", "refused", ([],)
    ),
    Parameter(
        "thread",
        no_threads,
        "-",
        "No threads are kept. SDKs know the error, and send the whole conversation.",
        "refused",
    ),
    Parameter("container", anything, "-", "There are no containers.", "refused"),
)

COUNT: Final = {
    name: MESSAGES[name]
    for name in (
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "output_format",
        "cache_control",
        "context_management",
        "mcp_servers",
        "speed",
    )
}
