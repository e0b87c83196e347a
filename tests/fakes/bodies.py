"""Bodies as real applications send them, with much in each: what a fuzzer begins with to get below the surface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.api.dialect import EXAMPLE_MODEL

_PERSON: Any = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$"},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        "next": {"$ref": "#/$defs/n"},
    },
    "required": ["name", "kind", "tags", "next"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "number"}},
}
_PARAMETERS: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "Of a city.", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}, {"type": "function", "function": {"name": "now"}}]
_STRICT = {"name": "weather", "parameters": {**_PARAMETERS, "additionalProperties": False}, "strict": True}
_USER = {"role": "user", "content": "And in Oslo?"}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
_MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
_CHAT = {"model": EXAMPLE_MODEL, "messages": [_USER]}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON, "strict": True}}

_CHATS = (
    {
        **_CHAT,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", **_MARK}]},
            {"role": "user", "content": "What weather is it?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
            _USER,
        ],
        "tools": _TOOLS,
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "prompt_cache_options": {"mode": "explicit"},
    },
    {**_CHAT, "tools": _TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}},
    {**_CHAT, "tools": [{"type": "function", "function": _STRICT}], "tool_choice": "required", "n": 2},
    {**_CHAT, "functions": [_FUNCTION], "function_call": {"name": "weather"}},
    {**_CHAT, "response_format": _FORMAT, "max_completion_tokens": 20, "stream": True},
    {**_CHAT, "structured_outputs": {"choice": ["yes", "no"]}, "logprobs": True, "top_logprobs": 3},
    {**_CHAT, "n": 3, "stream": True, "logprobs": True, "seed": 1, "temperature": 0.5, "stop": ["x", "yy"]},
    {**_CHAT, "logit_bias": {"5": 1.5}, "stop_token_ids": [7], "min_tokens": 1, "prompt_cache_key": "k"},
)
_COMPLETIONS = (
    {"model": EXAMPLE_MODEL, "prompt": ["a", "b"], "n": 2, "best_of": 3, "logprobs": 2, "max_tokens": 3},
    {"model": EXAMPLE_MODEL, "prompt": [[1, 2, 3], [4]], "echo": True, "logprobs": 1, "max_tokens": 0},
    {"model": EXAMPLE_MODEL, "prompt": "a", "stream": True, "echo": True, "stream_options": {"include_usage": True}},
    {"model": EXAMPLE_MODEL, "prompt": "a", "structured_outputs": {"regex": "[ab]{3}"}, "top_k": 5, "min_p": 0.1},
)
_FLAT = {"type": "function", "name": "weather", "parameters": _PARAMETERS, "strict": False}
_ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?", **_MARK}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Rain.", "annotations": []}]},
    {"role": "user", "content": "And now?"},
]
_RESPONSES = (
    {"model": EXAMPLE_MODEL, "input": _ITEMS, "instructions": "In verse.", "stream": True, "store": False},
    {"model": EXAMPLE_MODEL, "input": _ITEMS, "tools": [_FLAT], "tool_choice": "auto", "metadata": {"a": "b"}},
    {"model": EXAMPLE_MODEL, "input": "x", "tools": [_FLAT], "tool_choice": {"type": "function", "name": "weather"}},
    {
        "model": EXAMPLE_MODEL,
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "p", "schema": _PERSON, "strict": True}},
        "max_output_tokens": 16,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "stream": True,
    },
    {"model": EXAMPLE_MODEL, "input": "x", "stream": True, "tools": [_FLAT], "prompt_cache_options": {"ttl": "30m"}},
)
_MARKED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_MESSAGE: Any = {"model": EXAMPLE_MODEL, "max_tokens": 20, "messages": [_USER]}
_ANTHROPIC_TOOL = {"name": "weather", "description": "Of a city.", "input_schema": _PARAMETERS}
_MESSAGES = (
    {
        **_MESSAGE,
        "system": [{"type": "text", "text": "Be brief.", **_MARKED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?", **_MARKED}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": [{**_ANTHROPIC_TOOL, **_MARKED}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stream": True,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    },
    {**_MESSAGE, "tools": [_ANTHROPIC_TOOL], "tool_choice": {"type": "tool", "name": "weather"}, "stream": True},
    {**_MESSAGE, "stream": True},
    {**_MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": _PERSON}}},
    {**_MESSAGE, "max_tokens": 0},
)
_GEMINI: Any = {"contents": [{"role": "user", "parts": [{"text": "Weather?"}]}]}
_GEMINI_TOOLS = [
    {"functionDeclarations": [{"name": "weather", "description": "Of a city.", "parameters": _PARAMETERS}]}
]
_SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}, "required": ["a"]}
_CONTENTS = (
    {
        "contents": [
            {"role": "user", "parts": [{"text": "Weather?"}, {"text": " Say."}]},
            {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"output": "Rain."}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": _GEMINI_TOOLS,
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 3, "maxOutputTokens": 9, "stopSequences": ["x"]},
    },
    {**_GEMINI, "tools": _GEMINI_TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}},
    {**_GEMINI, "generationConfig": {"responseMimeType": "application/json", "responseSchema": _SCHEMA}},
    {**_GEMINI, "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": _PERSON}},
    {**_GEMINI, "generationConfig": {"candidateCount": 2, "seed": 1, "presencePenalty": 0.5}},
)

BODIES: Mapping[str, Sequence[Any]] = {
    "/v1/chat/completions": _CHATS,
    "/v1/completions": _COMPLETIONS,
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
    "/v1/messages/batches": [
        {
            "requests": [
                *({"custom_id": f"m{number}", "params": body} for number, body in enumerate(_MESSAGES)),
                {"custom_id": "any-thing_", "params": {"stream": True, "\u2028": [None, 1.5, -0.0, "\\ud83d 😀"]}},
            ]
        }
    ],
    "/v1/messages/count_tokens": [
        {name: value for name, value in _MESSAGES[0].items() if name in ("model", "messages", "system", "tools")}
    ],
    "/v1beta/models/{model}:generateContent": _CONTENTS,
    "/v1beta/models/{model}:streamGenerateContent": _CONTENTS,
    "/v1/models/{model}:countTokens": [{"generateContentRequest": {"model": "models/demo", **_CONTENTS[0]}}],
    "/v1beta/cachedContents": [{"model": "models/demo", "ttl": "300s", "displayName": "d", **_GEMINI}],
}
"""By the path of the document."""
