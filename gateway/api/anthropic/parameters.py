"""The parameters of /v1/messages and /v1/messages/count_tokens as tables: what each may be, and whether it is carried
out, accepted without effect, or refused. docs/http-api.md is held to these tables by a test.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.api.anthropic.blocks import check_control
from gateway.api.anthropic.messages import read_system, read_turns
from gateway.api.anthropic.structured import check_format, check_output_config
from gateway.api.anthropic.tools import read_choice, read_tools
from gateway.api.anthropic.wire import NO_THREADS
from gateway.api.cache_control import check_cache
from gateway.api.fields import (
    MAX_STOP_CHARS,
    a_list,
    an_object,
    anything,
    array_of,
    boolean,
    choice,
    integer,
    invalid,
    made,
    no_effect,
    number,
    record,
    refused,
    required_text,
    table,
    tagged,
    takes,
    text,
    unsupported,
    used,
)
from gateway.errors import UnsupportedError

MAX_TOKENS: Final = 2**31 - 1
MAX_STOPS: Final = 64
MIN_THINKING: Final = 1024

SAMPLING: Final = ("temperature", "top_p", "top_k")
"""Parameters that version 2026-10-21 does not have."""

_string = text()
_display = choice("summarized", "omitted")
_budget = integer(MIN_THINKING, MAX_TOKENS)
thinking: Final = tagged(
    "type",
    {
        "enabled": record("budget_tokens", type=_string, budget_tokens=_budget, display=_display),
        "adaptive": record(type=_string, display=_display),
        "between_tools": record(type=_string),
        "disabled": record(type=_string),
    },
)
diagnostics: Final = made(record(previous_message_id=text(256)), lambda given, _: given.get("previous_message_id"))
"""The id of the answer to compare with; None on the first turn."""


def _not_blank(value: str, path: str) -> str:
    if not value.strip():
        raise invalid(path, "each stop sequence must contain non-whitespace")
    return value


stop_sequences: Final = made(
    array_of(made(text(MAX_STOP_CHARS), _not_blank), 0, MAX_STOPS, "an array of strings"), lambda stops, _: tuple(stops)
)


@takes({"type": "object", "properties": {"edits": {"anyOf": [{"type": "array"}, {"type": "null"}]}}})
def context_management(value: Any, path: str) -> None:
    """Nothing, where all edits are those that have no effect here. Raises UnsupportedError for any other."""
    edits = an_object(value, path).get("edits")
    for index, edit in enumerate(() if edits is None else a_list(edits, f"{path}.edits")):
        where = f"{path}.edits[{index}]"
        if not required_text(an_object(edit, where), "type", where).startswith("clear_thinking_"):
            raise unsupported(f"{where}.type", "Of a conversation nothing is removed or summarised here.")


@takes({})
def no_threads(value: Any, path: str) -> None:
    """Raises UnsupportedError with the code by which the SDK's tool runner goes on without threads."""
    why = "No threads are kept: send the whole conversation."
    raise UnsupportedError(why, param=path, reason=why, code=NO_THREADS)


_OLDER: Final = ", default 1; only in version 2023-06-01"

MESSAGES: Final = table(
    used("model", _string, ", required", "Name of a served model, as in `GET /v1/models`."),
    used("messages", read_turns, "array of 1 to 10,000 messages, required", "The conversation."),
    used(
        "max_tokens",
        integer(0, MAX_TOKENS),
        ", required",
        "Tokens to generate at most; fewer where the context ends. 0 computes the prompt, so that it is cached, and "
        "generates nothing.",
    ),
    used("system", read_system, "string, or array of text blocks", "Instructions that come before everything."),
    used("stream", boolean, ", default false", "Answer as server-sent events."),
    used(
        "stop_sequences",
        stop_sequences,
        "array of up to 64 strings of up to 1024 characters, none of them blank",
        "Each ends the answer, is reported in `stop_sequence`, and is not part of the text.",
    ),
    used("temperature", number(0, 1), _OLDER, "0 takes the likeliest token."),
    used("top_p", number(0, 1), _OLDER, "Samples from the likeliest tokens of this total."),
    used(
        "top_k",
        integer(0, MAX_TOKENS),
        "integer, default 0; only in version 2023-06-01",
        "Samples from that many likeliest tokens; 0 from all.",
    ),
    used(
        "output_config",
        check_output_config,
        "object: `format` of type `json_schema`, `effort`",
        "`format`: what the answer has to be. `effort`: as `thinking`.",
    ),
    used("output_format", check_format, "object: `type` `json_schema`, `schema`", "Older: `output_config.format`."),
    used(
        "thinking",
        thinking,
        "object: `type` `enabled` with `budget_tokens`, `adaptive`, `between_tools` or `disabled`",
        "Checked, also against other parameters. For translated requests.",
    ),
    no_effect("metadata", record(user_id=text(512)), "object: `user_id`", "The key says which tenant it is."),
    used(
        "service_tier",
        choice("auto", "standard_only"),
        "",
        "`auto` is `priority` for tenants who have it; `usage.service_tier` says which it was.",
    ),
    no_effect("speed", choice("standard", "fast"), "", "There is one speed, and it is `standard`."),
    used(
        "cache_control", check_control, "object: `type` `ephemeral`, `ttl`", "Marks the last block that can be cached."
    ),
    used(
        "cache",
        check_cache,
        "object: `ttl`, `s-maxage`, `no-cache`, `no-store`, `use-cache`, `only-if-cached`, `namespace`, `semantic`, "
        "`similarity`",
        "Extension, as in other gateways: what may be done with earlier answers; see The response cache.",
    ),
    used(
        "diagnostics",
        diagnostics,
        "object: `previous_message_id`, a string or null",
        "Why less was read than the message with this id left in the cache.",
    ),
    used(
        "tools",
        read_tools,
        "array of up to 512 tools of type `custom`, `bash_*`, `text_editor_*` or `memory_*`",
        "What the model may call. Tools that Anthropic runs are left out.",
    ),
    used(
        "tool_choice",
        read_choice,
        "object: `type` `auto`, `any`, `tool` with `name`, or `none`; `disable_parallel_tool_use`",
        "Whether it may, or has to, and which.",
    ),
    refused("inference_geo", "Where the models run is up to the operator.", _string, "string; only `global`", "global"),
    no_effect(
        "context_management",
        context_management,
        "object: `edits` of the type `clear_thinking_*`",
        "Which thoughts of earlier turns stay is up to the chat template. Other edits are refused.",
    ),
    refused("mcp_servers", "No tools of other servers are called from here.", anything, "array; only `[]`", []),
    refused("thread", "No threads are kept. SDKs know the error, and send the whole conversation.", no_threads),
    refused("container", "There are no containers."),
)
_COUNTED: Final = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("cache_control", "context_management", "mcp_servers", "speed"),
)
COUNT: Final = {name: MESSAGES[name] for name in _COUNTED}
