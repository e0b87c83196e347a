"""The parameters of /v1/responses as a table, as in openai/parameters.py; docs/http-api.md is held to it by a test.

What the Responses API calls as chats do is taken from their table, the extensions among it.
"""

from __future__ import annotations

from typing import Final

from gateway.api.fields import (
    Parameter,
    anything,
    array_of,
    boolean,
    choice,
    closed_record,
    in_url,
    integer,
    made,
    no_effect,
    record,
    refused,
    string_map,
    table,
    text,
    used,
)
from gateway.api.openai.formats import text_format
from gateway.api.openai.parameters import CHAT, EFFORTS, MAX_TOKENS, TIERS
from gateway.api.openai.responses.items import parse_input
from gateway.api.openai.responses.tools import tool_choice, tools

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
_summary = choice("auto", "concise", "detailed")


include = made(array_of(choice(*INCLUDABLE), what="an array of strings"), lambda names, _: frozenset(names))
_text = record(format=text_format, verbosity=choice("low", "medium", "high"))
check_text = made(_text, lambda given, _: given.get("format"))
"""What `text.format` asks for. The verbosity is checked, and has no effect."""

check_options = closed_record(
    mode=choice("implicit", "explicit"), ttl=_string, prewarm=boolean, comparison_response_id=_string
)
check_reasoning = record(
    effort=choice(*EFFORTS),
    summary=_summary,
    generate_summary=_summary,
    context=choice("auto", "current_turn", "all_turns"),
    mode=_string,
)


def _as_chat(*names: str) -> tuple[Parameter, ...]:
    return tuple(CHAT[name] for name in names)


_INPUT = (
    *_as_chat("model"),
    used("input", parse_input, "string, or array of items", "What is answered."),
    used("instructions", _string, "string", "A system message before all; not kept for the next response."),
    used(
        "previous_response_id",
        _string,
        "id of a kept response",
        "Its input and output are put before `input`; its instructions are not.",
    ),
    used(
        "truncation",
        choice("auto", "disabled"),
        "`auto` or `disabled`, the default",
        "`auto`: an input that does not fit loses its oldest turns, instructions aside, until it does.",
    ),
    used("tools", tools, "array of up to 128 tools that the client runs", "What the model may call."),
    used(
        "tool_choice",
        tool_choice,
        "`none`, `auto` or `required`; object: one tool, or `allowed_tools`",
        "Default `auto`; `required` makes the model call, and one tool makes it call that one, once.",
    ),
    used("parallel_tool_calls", boolean, "boolean, default true", "Whether there may be more than one call."),
    used("text", check_text, "object: `format`, `verbosity`", "What the answer has to be."),
    refused("conversation", "Conversations are not supported; use `previous_response_id`."),
    used(
        "reasoning",
        check_reasoning,
        "object: `effort`, `summary`, `generate_summary`, `context`, `mode`",
        "As in chats.",
    ),
)

RESPONSE: Final = table(
    *_INPUT,
    *_as_chat("stream"),
    used(
        "stream_options",
        record(include_obfuscation=boolean),
        "object, only with `stream`",
        "`include_obfuscation` has no effect: nothing is padded.",
    ),
    used(
        "max_output_tokens",
        integer(MIN_OUTPUT_TOKENS, MAX_TOKENS),
        "integer from 16, default: up to the context's end",
        "Tokens to generate at most; with fewer than the answer needs it is `incomplete`.",
    ),
    *_as_chat("temperature", "top_p"),
    used(
        "top_logprobs",
        integer(0, 20),
        "integer 0 to 20, default 0",
        "Log probabilities of the answer's tokens, and of so many likeliest ones for each; 0: only if `include` asks.",
    ),
    used(
        "include",
        include,
        "array of names",
        "`message.output_text.logprobs`: log probabilities of the answer's tokens. Other names have no effect.",
    ),
    used(
        "metadata",
        string_map(16, 64, 512),
        "up to 16 pairs, key up to 64, value up to 512 characters",
        "Returned with the response.",
    ),
    used(
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
    used(
        "service_tier",
        choice(*TIERS, "ultrafast"),
        "",
        "Priority among waiting requests, as in chats; the answer has the tier that was served.",
    ),
    no_effect("max_tool_calls", integer(1, MAX_TOKENS), "integer from 1", "It limits built-in tools; there are none."),
    used(
        "store",
        boolean,
        "boolean, default true",
        "Stores the response, which has `store: false` where that was not possible.",
    ),
    used(
        "background",
        boolean,
        "boolean, default false; not with `stream` or `store: false`",
        "Answers at once that the response is `in_progress`.",
    ),
    refused("background_options", "There is one speed in the background, and no priority."),
    refused("context_management", "Conversations are not compacted.", anything, "-; only `[]`", []),
    refused("prompt", "Prompt templates are not kept here; send `instructions` and `input`."),
    refused("moderation", "Moderation is not supported."),
    refused("image", "Images are not supported."),
    refused("access_programs", "There are no access programs."),
)

TOKENS: Final = table(*_INPUT, refused("personality", "There are no personalities.", _string))

IN_RESPONSE_URL: Final = table(
    refused("stream", "A kept response is not streamed.", in_url(boolean), "boolean; only `false`", False),
    refused("starting_after", "A kept response is not streamed.", in_url(integer(0, MAX_TOKENS))),
    no_effect("include_obfuscation", in_url(boolean), "", "Nothing is padded."),
)
IN_ITEMS_URL: Final = table(
    used("limit", in_url(integer(1, 100)), ", default 20", "Items at most."),
    used("order", choice("asc", "desc"), "`asc` or `desc`, the default", "Latest first is `desc`."),
    used("after", _string, "id of an item", "Only those that come after this one, in the order."),
)
