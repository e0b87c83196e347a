"""The parameters of /v1/chat/completions and /v1/completions as tables: what each may be, and whether it is carried
out, accepted without effect, or refused. docs/http-api.md is held to these tables by a test.
"""

from __future__ import annotations

from typing import Any

from gateway.api.cache_control import check_cache
from gateway.api.fields import (
    INT64,
    MAX_STOP_CHARS,
    Check,
    Parameter,
    an_array,
    an_object,
    anything,
    array_too_long,
    boolean,
    choice,
    empty_text,
    integer,
    number,
    record,
    string_map,
    takes,
    text,
    too_many_properties,
    wrong_type,
)
from gateway.api.openai.caching import check_options
from gateway.api.openai.formats import guided, response_format, structured_outputs
from gateway.api.openai.messages import parse_messages
from gateway.api.openai.tools import function_call, functions, tool_choice, tools
from gateway.errors import BadRequestError

MAX_TOKENS = 2**31 - 1
PRIORITY_MAX = 2**31 - 1
MAX_N = 128
MAX_STOPS = 4
MAX_STOP_IDS = 64
MAX_BIASES = 10_000
REPETITION_MIN, REPETITION_MAX = 0.01, 10.0
TOKEN_ID_MAX = 2**32 - 1

_token_id = integer(0, TOKEN_ID_MAX)
_bias = number(-100, 100)
_string = text()
_stop = text(MAX_STOP_CHARS)
_salt = text(128)


@takes(
    {
        "anyOf": [
            {**_stop.schema, "minLength": 1},
            {"type": "array", "items": {**_stop.schema, "minLength": 1}, "maxItems": MAX_STOPS},
        ]
    }
)
def stop(value: Any, path: str) -> tuple[str, ...]:
    """One string or up to four, none of them empty or longer than MAX_STOP_CHARS."""
    if type(value) is str:
        value = [value]
        paths = [path]
    elif type(value) is list:
        paths = [f"{path}[{index}]" for index in range(len(value))]
    else:
        raise wrong_type(path, "a string or an array of strings", value)
    if len(value) > MAX_STOPS:
        raise array_too_long(path, MAX_STOPS, len(value))
    for item, where in zip(value, paths, strict=True):
        _not_empty(_stop(item, where), where)
    return tuple(value)


@takes({"type": "array", "items": _token_id.schema, "minItems": 1, "maxItems": MAX_STOP_IDS})
def stop_token_ids(value: Any, path: str) -> tuple[int, ...]:
    """Token ids; those outside of the vocabulary are found when the model is known."""
    if len(an_array(value, path)) > MAX_STOP_IDS:
        raise array_too_long(path, MAX_STOP_IDS, len(value))
    return tuple(_token_id(item, f"{path}[{index}]") for index, item in enumerate(value))


@takes({**_salt.schema, "minLength": 1})
def cache_salt(value: Any, path: str) -> str:
    """vLLM refuses an empty one, which looks like a secret that was forgotten."""
    return _not_empty(_salt(value, path), path)


def _not_empty(value: str, path: str) -> str:
    if not value:
        raise empty_text(path)
    return value


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
    pairs = []
    if len(an_object(value, path)) > MAX_BIASES:
        raise too_many_properties(path, MAX_BIASES, len(value))
    for key, item in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequestError(
                f"Invalid key in '{path}': every key must be a token id, written as a string of digits.",
                param=path,
                code="invalid_value",
            )
        pairs.append((int(key), _bias(item, f"{path}.{key}")))
    return tuple(pairs)


@takes({"type": "array", "items": {"enum": ["text", "audio"]}, "minItems": 1})
def _text_modalities(value: Any, path: str) -> tuple[str, ...]:
    kinds = an_array(value, path)
    return tuple(choice("text", "audio")(item, f"{path}[{index}]") for index, item in enumerate(kinds))


_ids = {"type": "array", "items": _token_id.schema, "minItems": 1}


@takes(
    {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            _ids,
            {"type": "array", "items": _ids, "minItems": 1},
        ]
    }
)
def _prompt(value: Any, path: str) -> Any:
    """Looked at where it becomes prompts, request.py."""
    return value


def _table(*parameters: Parameter) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in parameters}


def _used(name: str, check: Check[Any], accepts: str, does: str) -> Parameter:
    return Parameter(name, check, accepts, does)


def _no_effect(name: str, check: Check[Any], accepts: str, does: str) -> Parameter:
    return Parameter(name, check, accepts, does, "none")


def _refused(name: str, check: Check[Any], accepts: str, does: str, *harmless: Any) -> Parameter:
    return Parameter(name, check, accepts, does, "refused", harmless)


_SHARED = (
    _used("model", _string, "string, required", "Name of a served model, as in `GET /v1/models`."),
    _used("stream", boolean, "boolean, default false", "Answer as server-sent events."),
    _used(
        "stream_options",
        record(include_usage=boolean, include_obfuscation=boolean),
        "object, only with `stream`",
        "`include_usage`: one more chunk with the usage before `[DONE]`. `include_obfuscation` has no effect.",
    ),
    _used(
        "stop",
        stop,
        "string, or array of up to 4 strings, of up to 1024 characters",
        "Ends the answer; the string itself is never returned.",
    ),
    _used("temperature", number(0, 2), "number 0 to 2, default 1", "0 takes the likeliest token."),
    _used("top_p", number(0, 1), "number 0 to 1, default 1", "Samples from the likeliest tokens of this total."),
    _used(
        "top_k",
        integer(-1, MAX_TOKENS),
        "integer, default 0",
        "Extension: samples from that many likeliest tokens; 0 or -1 from all.",
    ),
    _used(
        "min_p",
        number(0, 1),
        "number 0 to 1, default 0",
        "Extension: leaves out tokens less likely than this share of the likeliest one.",
    ),
    _used("seed", integer(-INT64, INT64 - 1), "64-bit integer", "The same seed gives the same answer."),
    _used("presence_penalty", number(-2, 2), "number -2 to 2, default 0", "Lowers tokens that were generated before."),
    _used("frequency_penalty", number(-2, 2), "number -2 to 2, default 0", "Lowers them by how often they were."),
    _used(
        "repetition_penalty",
        number(REPETITION_MIN, REPETITION_MAX),
        "number 0.01 to 10, default 1",
        "Extension: divides the logits of tokens of prompt and answer, as in transformers; multiplies those below 0.",
    ),
    _used(
        "logit_bias",
        logit_bias,
        "object of token id to number, -100 to 100; up to 10,000 of them",
        "Added to the logits; ids must be in the model's vocabulary.",
    ),
    _used(
        "stop_token_ids",
        stop_token_ids,
        "array of up to 64 integers",
        "Extension: token ids that end the answer and are not returned.",
    ),
    _used("ignore_eos", boolean, "boolean, default false", "Extension: generates on past the end-of-text token."),
    _used(
        "min_tokens",
        integer(0, MAX_TOKENS),
        "integer, default 0",
        "Extension: no end of text and no stop token comes before so many. Stop strings end the answer at any time.",
    ),
    _used(
        "response_format",
        response_format,
        "object: `type` `text`, `json_object` or `json_schema`",
        "What the answer has to be.",
    ),
    _used(
        "structured_outputs",
        structured_outputs,
        "object with one of `json`, `json_object`, `regex`, `choice`, `grammar`",
        "Extension, as in vLLM: the same, and regular expressions, choices and Lark grammars.",
    ),
    *(
        _used(
            f"guided_{kind}",
            guided(kind),
            f"as `structured_outputs.{kind}`",
            "Extension, as in vLLM: an older form of `structured_outputs`.",
        )
        for kind in ("json", "regex", "choice", "grammar")
    ),
    _used(
        "prompt_cache_key",
        text(512),
        "string of up to 512 characters",
        'Separates: only requests of the tenant with the same key share prefixes. With `cache_key = "hint"` '
        "it only chooses among engines.",
    ),
    _used(
        "cache_salt",
        cache_salt,
        "string of 1 to 128 characters",
        "Extension, as in vLLM: separates in the same way, beside `prompt_cache_key`.",
    ),
    _used(
        "priority",
        integer(-PRIORITY_MAX, PRIORITY_MAX),
        "integer -2147483647 to 2147483647, default 0",
        "Extension, as in vLLM and SGLang: among the tenant's own requests that wait, the lowest goes first; see "
        "Service tiers.",
    ),
    _used(
        "cache",
        check_cache,
        "object: `ttl`, `s-maxage`, `no-cache`, `no-store`, `use-cache`, `only-if-cached`, `namespace`, `semantic`, "
        "`similarity`",
        "Extension, as in other gateways: what may be done with earlier answers; see The response cache.",
    ),
    *(
        _refused(name, anything, "-", "Other servers know it; ask with `structured_outputs`.")
        for name in ("regex", "ebnf", "grammar", "json_schema", "format")
    ),
    _no_effect("user", anything, "string, or an object as Open WebUI sends it", "The key decides who asks."),
    _used(
        "n", integer(1, MAX_N), "integer 1 to 128, default 1", "Answers to each prompt; the prompt is computed once."
    ),
)

CHAT = _table(
    *_SHARED,
    _used("messages", parse_messages, "array of 1 or more messages, required", "The conversation."),
    _used(
        "max_completion_tokens",
        integer(1, MAX_TOKENS),
        "integer from 1, default: up to the context's end",
        "Tokens to generate at most.",
    ),
    _used(
        "prompt_cache_options",
        check_options,
        "object: `mode` `implicit` or `explicit`, `ttl` one of `leases.ttls`",
        "Which prefixes are kept, and for how long at least.",
    ),
    _used("max_tokens", integer(1, MAX_TOKENS), "integer from 1", "The older name; not together with the newer."),
    _used("logprobs", boolean, "boolean, default false", "Log probabilities of the answer's tokens."),
    _used(
        "top_logprobs",
        integer(0, 20),
        "integer 0 to 20, default 0; only with `logprobs`",
        "And of so many of the likeliest tokens in the place of each.",
    ),
    _used("tools", tools, "array of up to 128 functions and custom tools", "What the model may call."),
    _used(
        "tool_choice",
        tool_choice,
        "`none`, `auto` or `required`; object: a `function` by name, or `allowed_tools`",
        "Default `auto`, where there are tools; `required` makes the model call, and a function by name makes it call "
        "that one, once.",
    ),
    _used("parallel_tool_calls", boolean, "boolean, default true", "Whether there may be more than one call."),
    _used("functions", functions, "array of up to 128 functions", "Deprecated: the older form of `tools`."),
    _used(
        "function_call",
        function_call,
        "`none` or `auto`; object: `name`",
        "Deprecated: the older form of `tool_choice`; at most one call, which the answer has as `function_call`.",
    ),
    _no_effect("safety_identifier", text(128), "string of up to 128 characters", "The key decides who asks."),
    _no_effect(
        "metadata", string_map(16, 64, 512), "up to 16 pairs, key up to 64, value up to 512 characters", "Not kept."
    ),
    _no_effect("store", boolean, "boolean", "Nothing is stored."),
    _used(
        "service_tier",
        choice("auto", "default", "flex", "scale", "priority", "fast"),
        "`auto`, `default`, `flex`, `scale`, `priority` or `fast`",
        "Who goes first where requests wait; the answer says which it was.",
    ),
    _no_effect(
        "reasoning_effort",
        choice("none", "minimal", "low", "medium", "high", "xhigh", "max"),
        "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`",
        "The model reasons as it was made to.",
    ),
    _no_effect("verbosity", choice("low", "medium", "high"), "`low`, `medium` or `high`", "As the model likes it."),
    _no_effect(
        "prompt_cache_retention",
        choice("in_memory", "24h"),
        "`in_memory` or `24h`",
        "Deprecated: a maximum, which promises nothing. Ask with `prompt_cache_options`.",
    ),
    _refused("modalities", _text_modalities, 'array; only `["text"]`', "Only text is generated.", ("text",)),
    _refused("audio", anything, "-", "Only text is generated."),
    _refused("prediction", anything, "-", "Predicted outputs are not supported."),
    _refused("moderation", anything, "-", "Moderation is not supported."),
    _refused("web_search_options", anything, "-", "Web search is not supported."),
)

COMPLETION = _table(
    *_SHARED,
    _used(
        "prompt",
        _prompt,
        "string, array of strings, array of token ids, or array of arrays of token ids",
        "What is continued; not given, the beginning of a new document. Several prompts run side by side.",
    ),
    _used(
        "max_tokens",
        integer(0, MAX_TOKENS),
        "integer from 0, default 16",
        "Tokens to generate at most; 0 computes the prompt, so that it is cached, and returns no text.",
    ),
    _used("echo", boolean, "boolean, default false", "Puts the prompt in front of the answer."),
    _used(
        "logprobs",
        integer(0, 5),
        "integer 0 to 5",
        "Log probabilities of the tokens, and of so many likeliest ones; with `echo` of the prompt, too.",
    ),
    _used(
        "best_of",
        integer(1, 20),
        "integer 1 to 20, default `n`",
        "Generates so many answers and tells the `n` likeliest, by the mean log probability of their tokens.",
    ),
    _refused("suffix", _string, "-", "Filling in before a suffix is not supported."),
)
