"""What each client form writes for each field of a request, by the names of FIELDS of the forms of upstreams: the rows
of docs/translation.md, and a sample of each.

A client has the fields of its API, which are in the table of the form of that API, and what the gateway takes besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.anthropic.parameters import MESSAGES
from gateway.api.anthropic.request import parse_message
from gateway.api.call import Call
from gateway.api.fields import Table
from gateway.api.gemini import request as gemini
from gateway.api.gemini.parameters import GENERATE, GENERATION
from gateway.api.openai.parameters import CHAT
from gateway.api.openai.request import parse_chat
from gateway.api.openai.responses import request as responses
from gateway.api.openai.responses.parameters import RESPONSE
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.types import Marker, Request, Tenant
from gateway.upstreams.translation.base import FIELDS, Form
from gateway.upstreams.translation.forms import FORMS

Json = dict[str, Any]
CLIENTS: Final[Mapping[str, Form]] = dict(zip(("openai", "responses", "anthropic", "gemini"), FORMS, strict=True))
EXTENSIONS: Final = {
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "breakpoints": "prompt_cache_breakpoint",
}
MORE: Final[Mapping[str, Mapping[str, str]]] = {
    "openai": {**EXTENSIONS, "grammar": "structured_outputs"},
    "responses": {
        **EXTENSIONS,
        **{name: name for name in ("stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias")},
    },
    "anthropic": {},
    "gemini": {
        "video": "inlineData",
        "grammar": "text/x.enum",
        "logprobs": "logprobs",
        "breakpoints": "cachedContent",
    },
}
"""What the gateway takes of a client, and the form of its API has no field for."""

NOT_TAKEN: Final = {("responses", "names"), ("gemini", "one call")}
TABLES: Final[Mapping[str, Table]] = {
    "openai": CHAT,
    "responses": RESPONSE,
    "anthropic": MESSAGES,
    "gemini": GENERATE | GENERATION,
}


def field_of(client: str, name: str) -> str:
    """What a client writes; empty where it has nothing for that."""
    if (client, name) in NOT_TAKEN:
        return ""
    own = CLIENTS[client].table.get(name)
    return MORE[client].get(name, "") or (own.name if own else "")


def written_by(client: str) -> list[str]:
    return [name for name in FIELDS if field_of(client, name)]


SCHEMA: Final = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
CLOSED: Final = {**SCHEMA, "additionalProperties": False}
FORMAT: Final = {"type": "json_schema", "name": "x", "schema": CLOSED}


def _openai(name: str = "f", **more: Any) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": CLOSED, **more}}


def _flat(name: str = "f", strict: bool = False) -> Json:
    return {"type": "function", "name": name, "parameters": CLOSED, "strict": strict}


def _claude(name: str = "f", **more: Any) -> Json:
    return {"name": name, "input_schema": CLOSED, **more}


_CALL: Final = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":"b"}'}}
_PLAIN_OPENAI: Final = {
    "seed": 7,
    "top_p": 0.5,
    "temperature": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -100},
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "stop_token_ids": [5],
    "ignore_eos": True,
    "min_tokens": 5,
    "stop": ["a"],
}
_HI: Final = {"role": "user", "content": "Hi"}
_CHAT_CALLS: Final = [_HI, {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
_ITEM_CALL: Final = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":"b"}'}
_USED: Final = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}}]}
_ANSWERED: Final = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sun"}]}
_CONTENT: Final = {"role": "user", "parts": [{"text": "Hi"}]}
_FUNCTION_CALL: Final = {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"a": "b"}}}]}
_RESPONSE: Final = {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"a": "b"}}}]}
_DECLARED: Final = [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": CLOSED}]}]


def _calling(**config: Any) -> Json:
    return {"tools": _DECLARED, "toolConfig": {"functionCallingConfig": config}}


def _marked(kind: str, control: str, value: Json) -> Json:
    return {"role": "user", "content": [{"type": kind, "text": "Hi", control: value}]}


PNG: Final = "iVBORw0KGgo="
PDF: Final = "JVBERi0xLjcK"
PICTURE: Final = "https://example.org/a.png"
PAPER: Final = "https://example.org/a.pdf"
_OPENAI_MEDIA: Final[Mapping[str, Json]] = {
    "image": {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    "image URL": {"type": "image_url", "image_url": {"url": PICTURE}},
    "file": {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
}
_INPUT_MEDIA: Final[Mapping[str, Json]] = {
    "image": {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"},
    "image URL": {"type": "input_image", "image_url": PICTURE},
    "file": {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"},
    "file URL": {"type": "input_file", "file_url": PAPER},
}
_CLAUDE_MEDIA: Final[Mapping[str, Json]] = {
    "image": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    "image URL": {"type": "image", "source": {"type": "url", "url": PICTURE}},
    "file": {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}},
    "file URL": {"type": "document", "source": {"type": "url", "url": PAPER}},
}
_GEMINI_MEDIA: Final[Mapping[str, Json]] = {
    "image": {"inlineData": {"mimeType": "image/png", "data": PNG}},
    "image URL": {"fileData": {"mimeType": "image/png", "fileUri": PICTURE}},
    "file": {"inlineData": {"mimeType": "application/pdf", "data": PDF}},
    "file URL": {"fileData": {"mimeType": "application/pdf", "fileUri": PAPER}},
    "audio": {"inlineData": {"mimeType": "audio/wav", "data": "UklGRg=="}},
    "video": {"inlineData": {"mimeType": "video/mp4", "data": "AAAA"}},
}
MEDIA: Final[Mapping[str, Mapping[str, Json]]] = {
    "openai": _OPENAI_MEDIA,
    "responses": _INPUT_MEDIA,
    "anthropic": _CLAUDE_MEDIA,
    "gemini": _GEMINI_MEDIA,
}
"""Parts of a user's turn."""


def with_parts(client: str, *parts: Json) -> Json:
    """Fields of a body with one turn of a user."""
    name, of_turn = {"responses": ("input", "content"), "gemini": ("contents", "parts")}.get(
        client, ("messages", "content")
    )
    return {name: [{"role": "user", of_turn: list(parts)}]}


def result_with(client: str, *parts: Json) -> Json:
    """Fields of a body whose last turn is a result with such parts; text of it is "sun" where it is apart."""
    if client == "responses":
        return {"input": [_HI, _ITEM_CALL, {"type": "function_call_output", "call_id": "c1", "output": list(parts)}]}
    if client == "anthropic":
        result = {"type": "tool_result", "tool_use_id": "c1", "content": list(parts)}
        return {"messages": [_HI, _USED, {"role": "user", "content": [result]}], "tools": [_claude()]}
    response = {"name": "f", "response": {"output": "sun"}, "parts": list(parts)}
    return {"contents": [_CONTENT, _FUNCTION_CALL, {"role": "user", "parts": [{"functionResponse": response}]}]}


SAMPLES: Final[Mapping[str, Mapping[str, Json]]] = {
    "openai": {
        "system": {"messages": [{"role": "system", "content": "Be brief."}, _HI]},
        "messages": {"messages": [_HI, {"role": "assistant", "content": "Hey"}, _HI]},
        "calls": {"messages": [*_CHAT_CALLS, {"role": "tool", "tool_call_id": "c1", "content": "sun"}]},
        "results": {"messages": [*_CHAT_CALLS, {"role": "tool", "tool_call_id": "c1", "content": "sun"}]},
        "names": {"messages": [{**_HI, "name": "ann"}]},
        "tools": {"tools": [_openai()]},
        "tool_choice": {"tools": [_openai()], "tool_choice": "required"},
        "one call": {"tools": [_openai()], "parallel_tool_calls": False},
        "strict": {"tools": [_openai(strict=True)]},
        "json_object": {"response_format": {"type": "json_object"}},
        "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOSED}}},
        "grammar": {"structured_outputs": {"regex": "a+"}},
        "thinking": {"reasoning_effort": "low"},
        "max_tokens": {"max_completion_tokens": 50},
        "logprobs": {"logprobs": True, "top_logprobs": 2},
        "breakpoints": {"messages": [_marked("text", "prompt_cache_breakpoint", {"mode": "explicit"})]},
    },
    "responses": {
        "system": {"instructions": "Be brief."},
        "messages": {"input": [_HI, {"role": "assistant", "content": "Hey"}, _HI]},
        "calls": {"input": [_HI, _ITEM_CALL, {"type": "function_call_output", "call_id": "c1", "output": "sun"}]},
        "results": {"input": [_HI, _ITEM_CALL, {"type": "function_call_output", "call_id": "c1", "output": "sun"}]},
        "tools": {"tools": [_flat()]},
        "tool_choice": {"tools": [_flat()], "tool_choice": "required"},
        "one call": {"tools": [_flat()], "parallel_tool_calls": False},
        "strict": {"tools": [_flat(strict=True)]},
        "json_object": {"text": {"format": {"type": "json_object"}}},
        "json_schema": {"text": {"format": FORMAT}},
        "thinking": {"reasoning": {"effort": "low"}},
        "max_tokens": {"max_output_tokens": 50},
        "logprobs": {"top_logprobs": 2},
        "prewarm": {"prompt_cache_options": {"prewarm": True}},
        "breakpoints": {"input": [_marked("input_text", "prompt_cache_breakpoint", {"mode": "explicit"})]},
    },
    "anthropic": {
        "system": {"system": "Be brief."},
        "messages": {"messages": [_HI, {"role": "assistant", "content": "Hey"}, _HI]},
        "calls": {"messages": [_HI, _USED, _ANSWERED], "tools": [_claude()]},
        "results": {"messages": [_HI, _USED, _ANSWERED], "tools": [_claude()]},
        "tools": {"tools": [_claude()]},
        "tool_choice": {"tools": [_claude()], "tool_choice": {"type": "any"}},
        "one call": {"tools": [_claude()], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "strict": {"tools": [_claude(strict=True)]},
        "json_schema": {"output_config": {"format": {"type": "json_schema", "schema": CLOSED}}},
        "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        "max_tokens": {"max_tokens": 50},
        "stop": {"stop_sequences": ["a"]},
        "temperature": {"temperature": 0.5},
        "top_p": {"top_p": 0.5},
        "top_k": {"top_k": 5},
        "prewarm": {"max_tokens": 0},
        "prefill": {"messages": [_HI, {"role": "assistant", "content": "Hey"}]},
        "breakpoints": {"messages": [_marked("text", "cache_control", {"type": "ephemeral"})]},
    },
    "gemini": {
        "system": {"systemInstruction": {"parts": [{"text": "Be brief."}]}},
        "messages": {"contents": [_CONTENT, {"role": "model", "parts": [{"text": "Hey"}]}, _CONTENT]},
        "calls": {"contents": [_CONTENT, _FUNCTION_CALL, _RESPONSE]},
        "results": {"contents": [_CONTENT, _FUNCTION_CALL, _RESPONSE]},
        "tools": {"tools": _DECLARED},
        "tool_choice": _calling(mode="ANY"),
        "strict": _calling(mode="VALIDATED"),
        "json_object": {"generationConfig": {"responseMimeType": "application/json"}},
        "json_schema": {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": CLOSED}},
        "grammar": {
            "generationConfig": {"responseMimeType": "text/x.enum", "responseJsonSchema": {"enum": ["a", "b"]}}
        },
        "logprobs": {"generationConfig": {"responseLogprobs": True, "logprobs": 2}},
        **{
            name: {"generationConfig": {field: value}}
            for name, field, value in (
                ("thinking", "thinkingConfig", {"thinkingBudget": 1024}),
                ("max_tokens", "maxOutputTokens", 50),
                ("stop", "stopSequences", ["a"]),
                ("temperature", "temperature", 0.5),
                ("top_p", "topP", 0.5),
                ("top_k", "topK", 5),
                ("seed", "seed", 7),
                ("presence_penalty", "presencePenalty", 0.5),
                ("frequency_penalty", "frequencyPenalty", 0.5),
            )
        },
        "breakpoints": {"cachedContent": "cachedContents/x"},
    },
}
"""By client and name. Those of OpenAI's that are called as the field are in `sample` alone."""


def sample(client: str, name: str) -> Json:
    """Fields of a body that ask for it."""
    found = SAMPLES[client].get(name)
    if name == "result image":
        return result_with(client, MEDIA[client]["image"])
    if name in MEDIA[client]:
        return with_parts(client, MEDIA[client][name])
    if found is None:
        field = field_of(client, name)
        found = {field: _PLAIN_OPENAI[field]}
    return found


def without(client: str, name: str) -> Json:
    """The same request, but for that."""
    body = sample(client, name)
    if name in ("tool_choice", "one call"):
        return {"tools": body["tools"]}
    if name == "strict":
        return sample(client, "tools")
    if name == "result image":
        return result_with(client, *([{"type": "input_text", "text": "s"}] if client == "responses" else ()))
    return {}


def request_of(client: str, body: Json) -> Request:
    """The request that the client's dialect makes of a body with these fields."""
    call = _call(client, body)
    return Request(
        request_id="r",
        tenant=Tenant("t"),
        model="m",
        prompt=call.prompts[0],
        sampling=call.sampling,
        received_s=0.0,
        deadline_s=60.0,
        stop=call.stop,
        prompt_param=call.prompt_param,
        prewarm=call.prewarm,
        fit=call.fit,
        constraint=call.constraint,
        tool_use=call.tool_use,
        thinking=call.thinking,
    )


def _call(client: str, body: Json) -> Call:
    leases = LeaseSettings()
    if client == "openai":
        return parse_chat({"model": "m", "messages": [_HI], **body}, leases)
    if client == "responses":
        query = responses.parse({"model": "m", "input": [_HI], "store": False, **body})
        return responses.to_call(query, query.items, leases)
    if client == "anthropic":
        whole = {"model": "m", "max_tokens": 4096, "messages": [_HI], **body}
        return parse_message(whole, "2023-06-01", AnthropicSettings(), leases).call
    body = dict(body)
    cached = gemini.CachedPrefix({"contents": []}, Marker(0, 2, 300.0)) if body.pop("cachedContent", None) else None
    return gemini.to_call("m", gemini.parse_generate({"contents": [_CONTENT], **body}), cached)
