"""The parameters of /v1/chat/completions and /v1/completions as tables: what each may be, and whether it is carried
out, accepted without effect, or refused. docs/http-api.md is held to these tables by a test.
"""

from __future__ import annotations

from typing import Any

from gateway.api.cache_control import check_cache
from gateway.api.call import MAX_PROMPTS
from gateway.api.fields import (
    INT64,
    MAX_STOP_CHARS,
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
    string_map,
    table,
    takes,
    text,
    too_many_properties,
    used,
)
from gateway.api.openai.caching import check_options
from gateway.api.openai.formats import STRUCTURED, response_format, structured_outputs
from gateway.api.openai.inputs import texts_or_ids, token_id
from gateway.api.openai.messages import parse_messages
from gateway.api.openai.tools import function_call, functions, tool_choice, tools

MAX_TOKENS = 2**31 - 1
PRIORITY_MAX = 2**31 - 1
MAX_N = 128
MAX_STOPS = 4
MAX_STOP_IDS = 64
MAX_BIASES = 10_000
REPETITION_MIN, REPETITION_MAX = 0.01, 10.0

TIERS = ("auto", "default", "flex", "scale", "priority", "fast")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_bias = number(-100, 100)
_string = text()
_stop = text(MAX_STOP_CHARS, 1)
_stops = array_of(_stop, most=MAX_STOPS, what="a string or an array of strings")


@takes({"anyOf": [_stop.schema, _stops.schema]})
def stop(value: Any, path: str) -> tuple[str, ...]:
    """One string or up to four, none of them empty or longer than MAX_STOP_CHARS."""
    return (_stop(value, path),) if type(value) is str else tuple(_stops(value, path))


@takes(
    {
        "type": "object",
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": _bias.schema,
    }
)
def logit_bias(value: Any, path: str) -> tuple[tuple[int, float], ...]:
    """Token id, as a string, to -100..100; up to MAX_BIASES of them."""
    if len(an_object(value, path)) > MAX_BIASES:
        raise too_many_properties(path, MAX_BIASES, len(value))
    if not all(key.isascii() and key.isdigit() and len(key) <= 10 for key in value):
        raise invalid(path, "every key must be a token id, written as a string of digits")
    return tuple((int(key), _bias(item, f"{path}.{key}")) for key, item in value.items())


_SHARED = (
    used("model", _string, ", required", "Name of a served model, as in `GET /v1/models`."),
    used("stream", boolean, ", default false", "Answer as server-sent events."),
    used(
        "stream_options",
        record(include_usage=boolean, include_obfuscation=boolean),
        "object, only with `stream`",
        "`include_usage`: one more chunk with the usage before `[DONE]`. `include_obfuscation` has no effect.",
    ),
    used(
        "stop",
        stop,
        "string, or array of up to 4 strings, of up to 1024 characters",
        "Ends the answer; the string itself is never returned.",
    ),
    used("temperature", number(0, 2), ", default 1", "0 takes the likeliest token."),
    used("top_p", number(0, 1), ", default 1", "Samples from the likeliest tokens of this total."),
    used(
        "top_k",
        integer(-1, MAX_TOKENS),
        ", default 0",
        "Extension: samples from that many likeliest tokens; 0 or -1 from all.",
    ),
    used(
        "min_p",
        number(0, 1),
        ", default 0",
        "Extension: leaves out tokens less likely than this share of the likeliest one.",
    ),
    used("seed", integer(-INT64, INT64 - 1), "64-bit integer", "The same seed gives the same answer."),
    used("presence_penalty", number(-2, 2), ", default 0", "Lowers tokens that were generated before."),
    used("frequency_penalty", number(-2, 2), ", default 0", "Lowers them by how often they were."),
    used(
        "repetition_penalty",
        number(REPETITION_MIN, REPETITION_MAX),
        ", default 1",
        "Extension: divides the logits of tokens of prompt and answer, as in transformers; multiplies those below 0.",
    ),
    used(
        "logit_bias",
        logit_bias,
        "object of token id to number, -100 to 100; up to 10,000 of them",
        "Added to the logits; ids must be in the model's vocabulary.",
    ),
    used(
        "stop_token_ids",
        made(array_of(token_id, 1, MAX_STOP_IDS), lambda ids, _: tuple(ids)),
        "array of up to 64 integers",
        "Extension: token ids that end the answer and are not returned.",
    ),
    used("ignore_eos", boolean, ", default false", "Extension: generates on past the end-of-text token."),
    used(
        "min_tokens",
        integer(0, MAX_TOKENS),
        "integer, default 0",
        "Extension: no end of text and no stop token comes before so many. Stop strings end the answer at any time.",
    ),
    used(
        "response_format",
        response_format,
        "object: `type` `text`, `json_object` or `json_schema`",
        "What the answer has to be.",
    ),
    used(
        "structured_outputs",
        structured_outputs,
        "object with one of `json`, `json_object`, `regex`, `choice`, `grammar`",
        "Extension, as in vLLM: the same, and regular expressions, choices and Lark grammars.",
    ),
    *(
        used(
            f"guided_{kind}",
            STRUCTURED[kind],
            f"as `structured_outputs.{kind}`",
            "Extension, as in vLLM: an older form of `structured_outputs`.",
        )
        for kind in ("json", "regex", "choice", "grammar")
    ),
    used(
        "prompt_cache_key",
        text(512),
        "",
        'Separates: only requests of the tenant with the same key share prefixes. With `cache_key = "hint"` '
        "it only chooses among engines.",
    ),
    used(
        "cache_salt",
        text(128, 1),  # vLLM refuses an empty one, which looks like a secret that was forgotten
        "",
        "Extension, as in vLLM: separates in the same way, beside `prompt_cache_key`.",
    ),
    used(
        "priority",
        integer(-PRIORITY_MAX, PRIORITY_MAX),
        "integer -2147483647 to 2147483647, default 0",
        "Extension, as in vLLM and SGLang: among the tenant's own requests that wait, the lowest goes first; see "
        "Service tiers.",
    ),
    used(
        "cache",
        check_cache,
        "object: `ttl`, `s-maxage`, `no-cache`, `no-store`, `use-cache`, `only-if-cached`, `namespace`, `semantic`, "
        "`similarity`",
        "Extension, as in other gateways: what may be done with earlier answers; see The response cache.",
    ),
    *(
        refused(name, "Other servers know it; ask with `structured_outputs`.")
        for name in ("regex", "ebnf", "grammar", "json_schema", "format")
    ),
    no_effect("user", anything, "string, or an object as Open WebUI sends it", "The key decides who asks."),
    used("n", integer(1, MAX_N), ", default 1", "Answers to each prompt; the prompt is computed once."),
)

CHAT = table(
    *_SHARED,
    used("messages", parse_messages, "array of 1 or more messages, required", "The conversation."),
    used(
        "max_completion_tokens",
        integer(1, MAX_TOKENS),
        ", default: up to the context's end",
        "Tokens to generate at most.",
    ),
    used(
        "prompt_cache_options",
        check_options,
        "object: `mode` `implicit` or `explicit`, `ttl` one of `leases.ttls`",
        "Which prefixes are kept, and for how long at least.",
    ),
    used("max_tokens", integer(1, MAX_TOKENS), "", "The older name; not together with the newer."),
    used("logprobs", boolean, ", default false", "Log probabilities of the answer's tokens."),
    used(
        "top_logprobs",
        integer(0, 20),
        ", default 0; only with `logprobs`",
        "And of so many of the likeliest tokens in the place of each.",
    ),
    used("tools", tools, "array of up to 128 functions and custom tools", "What the model may call."),
    used(
        "tool_choice",
        tool_choice,
        "`none`, `auto` or `required`; object: a `function` by name, or `allowed_tools`",
        "Default `auto`, where there are tools; `required` makes the model call, and a function by name makes it call "
        "that one, once.",
    ),
    used("parallel_tool_calls", boolean, ", default true", "Whether there may be more than one call."),
    used("functions", functions, "array of up to 128 functions", "Deprecated: the older form of `tools`."),
    used(
        "function_call",
        function_call,
        "`none` or `auto`; object: `name`",
        "Deprecated: the older form of `tool_choice`; at most one call, which the answer has as `function_call`.",
    ),
    no_effect("safety_identifier", text(128), "", "The key decides who asks."),
    no_effect(
        "metadata", string_map(16, 64, 512), "up to 16 pairs, key up to 64, value up to 512 characters", "Not kept."
    ),
    no_effect("store", boolean, "", "Nothing is stored."),
    used(
        "service_tier", choice(*TIERS), "", "Priority among waiting requests; the answer has the tier that was served."
    ),
    used(
        "reasoning_effort",
        choice(*EFFORTS),
        "",
        "For translated requests; engines' models reason as made.",
    ),
    no_effect("verbosity", choice("low", "medium", "high"), "", "As the model likes it."),
    no_effect(
        "prompt_cache_retention",
        choice("in_memory", "24h"),
        "",
        "Deprecated: a maximum, which promises nothing. Ask with `prompt_cache_options`.",
    ),
    refused(
        "modalities",
        "Only text is generated.",
        array_of(choice("text", "audio"), 1),
        'array; only `["text"]`',
        ["text"],
    ),
    refused("audio", "Only text is generated."),
    refused("prediction", "Predicted outputs are not supported."),
    refused("moderation", "Moderation is not supported."),
    refused("web_search_options", "Web search is not supported."),
)

COMPLETION = table(
    *_SHARED,
    used(
        "prompt",
        texts_or_ids(MAX_PROMPTS),
        "string, array of strings, array of token ids, or array of arrays of token ids",
        "What is continued; not given, the beginning of a new document. Several prompts run side by side.",
    ),
    used(
        "max_tokens",
        integer(0, MAX_TOKENS),
        ", default 16",
        "Tokens to generate at most; 0 computes the prompt, so that it is cached, and returns no text.",
    ),
    used("echo", boolean, ", default false", "Puts the prompt in front of the answer."),
    used(
        "logprobs",
        integer(0, 5),
        "",
        "Log probabilities of the tokens, and of so many likeliest ones; with `echo` of the prompt, too.",
    ),
    used(
        "best_of",
        integer(1, 20),
        ", default `n`",
        "Generates so many answers and returns the `n` likeliest, by the mean log probability of their tokens.",
    ),
    refused("suffix", "Filling in before a suffix is not supported.", _string),
)
