"""The parameters of /v1/responses as a table, as in openai/parameters.py; docs/http-api.md is held to it by a test.

What the Responses API calls as chats do is taken from their table, the extensions among it.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.api.fields import (
    MAX_ITEMS,
    Parameter,
    an_object,
    anything,
    at_most,
    boolean,
    choice,
    closed_record,
    in_url,
    integer,
    object_schema,
    record,
    string_map,
    takes,
    text,
    unknown,
    wrong_type,
)
from gateway.api.openai.formats import text_format
from gateway.api.openai.parameters import CHAT, MAX_TOKENS
from gateway.api.openai.responses.items import parse_input
from gateway.api.openai.responses.tools import tool_choice, tools
from gateway.types import Constraint

MIN_OUTPUT_TOKENS: Final = 16
LOGPROBS: Final = "message.output_text.logprobs"
INCLUDABLE: Final = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)

_string = text()
_includable = choice(*INCLUDABLE)
_tiers = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")


@takes({"type": "array", "items": _includable.schema, "maxItems": MAX_ITEMS})
def include(value: Any, path: str) -> frozenset[str]:
    """May be empty."""
    if type(value) is not list:
        raise wrong_type(path, "an array of strings", value)
    several = enumerate(at_most(MAX_ITEMS, value, path))
    return frozenset(_includable(item, f"{path}[{index}]") for index, item in several)


_verbosity = choice("low", "medium", "high")


@takes(object_schema({"format": text_format.schema, "verbosity": _verbosity.schema}))
def text_options(value: Any, path: str) -> Constraint | None:
    """What `text.format` asks for. The verbosity is checked, and has no effect."""
    constraint = None
    for key, item in an_object(value, path).items():
        if item is None:
            continue
        if key == "format":
            constraint = text_format(item, f"{path}.format")
        elif key == "verbosity":
            _verbosity(item, f"{path}.verbosity")
        else:
            unknown(f"{path}.{key}", key, ("format", "verbosity"), value)
    return constraint


check_options = closed_record(
    mode=choice("implicit", "explicit"), ttl=_string, prewarm=boolean, comparison_response_id=_string
)
check_reasoning = record(
    effort=choice("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    summary=choice("auto", "concise", "detailed"),
    generate_summary=choice("auto", "concise", "detailed"),
    context=choice("auto", "current_turn", "all_turns"),
    mode=_string,
)


def _as_chat(*names: str) -> tuple[Parameter, ...]:
    return tuple(CHAT[name] for name in names)


def _used(name: str, check: Any, accepts: str, does: str) -> Parameter:
    return Parameter(name, check, accepts, does)


def _no_effect(name: str, check: Any, accepts: str, does: str) -> Parameter:
    return Parameter(name, check, accepts, does, "none")


def _refused(name: str, check: Any, accepts: str, does: str, *harmless: Any) -> Parameter:
    return Parameter(name, check, accepts, does, "refused", harmless)


_INPUT = (
    *_as_chat("model"),
    _used("input", parse_input, "string, or array of items", "What is answered."),
    _used("instructions", _string, "string", "A system message before all; not kept for the next response."),
    _used(
        "previous_response_id",
        _string,
        "id of a kept response",
        "What it answered and what it said come before `input`; its instructions do not.",
    ),
    _used(
        "truncation",
        choice("auto", "disabled"),
        "`auto` or `disabled`, the default",
        "`auto`: an input that does not fit loses its oldest turns, instructions aside, until it does.",
    ),
    _used("tools", tools, "array of up to 128 tools that the client runs", "What the model may call."),
    _used(
        "tool_choice",
        tool_choice,
        "`none`, `auto` or `required`; object: one tool, or `allowed_tools`",
        "Default `auto`; `required` makes the model call, and one tool makes it call that one, once.",
    ),
    _used("parallel_tool_calls", boolean, "boolean, default true", "Whether there may be more than one call."),
    _used("text", text_options, "object: `format`, `verbosity`", "What the answer has to be."),
    _refused("conversation", anything, "-", "Conversations are not supported; use `previous_response_id`."),
    _no_effect(
        "reasoning",
        check_reasoning,
        "object: `effort`, `summary`, `generate_summary`, `context`, `mode`",
        "The model reasons as it was made to.",
    ),
)

_TABLE = (
    *_INPUT,
    *_as_chat("stream"),
    _used(
        "stream_options",
        record(include_obfuscation=boolean),
        "object, only with `stream`",
        "`include_obfuscation` has no effect: nothing is padded.",
    ),
    _used(
        "max_output_tokens",
        integer(MIN_OUTPUT_TOKENS, MAX_TOKENS),
        "integer from 16, default: up to the context's end",
        "Tokens to generate at most; with fewer than the answer needs it is `incomplete`.",
    ),
    *_as_chat("temperature", "top_p"),
    _used(
        "top_logprobs",
        integer(0, 20),
        "integer 0 to 20, default 0",
        "Log probabilities of the answer's tokens, and of so many likeliest ones for each; 0: only if `include` asks.",
    ),
    _used(
        "include",
        include,
        "array of names",
        "`message.output_text.logprobs`: log probabilities of the answer's tokens. Other names have no effect.",
    ),
    _used(
        "metadata",
        string_map(16, 64, 512),
        "up to 16 pairs, key up to 64, value up to 512 characters",
        "Told again with the response.",
    ),
    _used(
        "prompt_cache_options",
        check_options,
        "object: `mode` `implicit` or `explicit`, `ttl` one of `leases.ttls`, `prewarm` boolean, "
        "`comparison_response_id`",
        "Which prefixes are kept, and for how long at least, as for chats. `prewarm`: the prompt is computed, and "
        "nothing generated. `comparison_response_id`: asks for `prompt_cache_diagnostics`.",
    ),
    *_as_chat(
        "prompt_cache_key",
        "cache_salt",
        "cache",
        "stop",
        "seed",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
    ),
    *_as_chat("user", "safety_identifier", "prompt_cache_retention"),
    _used(
        "service_tier",
        choice(*_tiers),
        "`auto`, `default`, `flex`, `scale`, `priority`, `fast` or `ultrafast`",
        "Who goes first where requests wait, as in chats; the answer says which it was.",
    ),
    _no_effect("max_tool_calls", integer(1, MAX_TOKENS), "integer from 1", "It limits built-in tools; there are none."),
    _used(
        "store",
        boolean,
        "boolean, default true",
        "Keeps the response. It says `store: false` where that was not possible.",
    ),
    _used(
        "background",
        boolean,
        "boolean, default false; not with `stream` or `store: false`",
        "Answers at once that the response is `in_progress`.",
    ),
    _refused("background_options", anything, "-", "There is one speed in the background, and no priority."),
    _refused("context_management", anything, "-; only `[]`", "Conversations are not compacted.", []),
    _refused("prompt", anything, "-", "Prompt templates are not kept here; send `instructions` and `input`."),
    _refused("moderation", anything, "-", "Moderation is not supported."),
    _refused("image", anything, "-", "Images are not supported."),
    _refused("access_programs", anything, "-", "There are no access programs."),
)

_TOKENS_TABLE = (
    *_INPUT,
    _refused("personality", _string, "-", "There are no personalities."),
)

RESPONSE: Final = {parameter.name: parameter for parameter in _TABLE}
TOKENS: Final = {parameter.name: parameter for parameter in _TOKENS_TABLE}

IN_RESPONSE_URL: Final = {
    parameter.name: parameter
    for parameter in (
        _refused("stream", in_url(boolean), "boolean; only `false`", "A kept response is not streamed.", False),
        _refused("starting_after", in_url(integer(0, MAX_TOKENS)), "-", "A kept response is not streamed."),
        _no_effect("include_obfuscation", in_url(boolean), "boolean", "Nothing is padded."),
    )
}
IN_ITEMS_URL: Final = {
    parameter.name: parameter
    for parameter in (
        _used("limit", in_url(integer(1, 100)), "integer 1 to 100, default 20", "Items at most."),
        _used("order", choice("asc", "desc"), "`asc` or `desc`, the default", "Latest first is `desc`."),
        _used("after", _string, "id of an item", "Only those that come after this one, in the order."),
    )
}
