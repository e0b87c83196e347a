"""Hosted APIs as translated requests meet them: answers made of the official SDKs' own models. Clients that ask are in
sdk_clients.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from anthropic import types as claude
from google.genai import types as google
from openai.types import chat, responses

from tests.fakes.upstream import SSE, Told, events, named

Call = tuple[str, dict[str, Any]]
UPSTREAMS: Final = ("openai", "responses", "anthropic", "gemini")
CLIENTS: Final = ("openai", "responses", "anthropic", "gemini")
PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS = 100, 64, 7
TOOL: Final = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}


# -- what an upstream answers -----------------------------------------------------------------------------------------


def answers(dialect: str, texts: Sequence[str], calls: Sequence[Call] = (), *, stream: bool, thought: str = "") -> Told:
    """An answer of a thought, these texts (chunks of one) and calls."""
    told = {"openai": _openai, "responses": _responses, "anthropic": _anthropic, "gemini": _gemini}[dialect]
    return told(texts, calls, stream, thought)


THOUGHT_TOKENS: Final = 3
SIGNATURE: Final = "c2lnMQ=="
"""Of every thought; base64, as Gemini's are."""


def refuses(dialect: str, status: int, message: str, **headers: str) -> Told:
    body: dict[str, Any] = {
        "openai": {"error": {"message": message, "type": "t", "param": None, "code": "c"}},
        "anthropic": {"type": "error", "error": {"type": "t", "message": message}, "request_id": "req_1"},
        "gemini": {"error": {"code": status, "message": message, "status": "T"}},
    }["openai" if dialect == "responses" else dialect]
    return Told(
        [orjson.dumps(body)], status, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def _openai(texts: Sequence[str], calls: Sequence[Call], stream: bool, thought: str) -> Told:
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": ANSWER_TOKENS,
        "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        **({"completion_tokens_details": {"reasoning_tokens": THOUGHT_TOKENS}} if thought else {}),
    }
    signed = {"extra_content": {"google": {"thought_signature": SIGNATURE}}} if thought else {}
    base: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "up-1"}
    reason = "tool_calls" if calls else "stop"
    if not stream:
        made = [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": _json(arguments)}}
            | ({} if number else signed)
            for number, (name, arguments) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": "".join(texts) or None} | ({"tool_calls": made} if made else {})
        message |= {"reasoning_content": thought} if thought else {}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole = chat.ChatCompletion.model_validate(
            {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
        )
        return Told([whole.model_dump_json().encode()])
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": part} for part in (thought[:2], thought[2:]) if part]
    deltas += [{"content": text} for text in texts]
    for number, (name, arguments) in enumerate(calls):
        head = {
            "index": number,
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
            **({} if number else signed),
        }
        deltas.append({"tool_calls": [head]})
        written = _json(arguments)
        parts = [{"index": number, "function": {"arguments": part}} for part in (written[:5], written[5:])]
        deltas += [{"tool_calls": [part]} for part in parts]
    choices = [[{"index": 0, "delta": delta, "finish_reason": None}] for delta in deltas]
    choices.append([{"index": 0, "delta": {}, "finish_reason": reason}])
    chunks = [{**base, "object": "chat.completion.chunk", "choices": one} for one in choices]
    chunks.append({**base, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    told = [chat.ChatCompletionChunk.model_validate(one).model_dump_json(exclude_none=True).encode() for one in chunks]
    return Told([*events(*told), b"data: [DONE]\n\n"], media=SSE)


def _responses(texts: Sequence[str], calls: Sequence[Call], stream: bool, thought: str) -> Told:
    usage = {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
        "output_tokens": ANSWER_TOKENS,
        "output_tokens_details": {"reasoning_tokens": THOUGHT_TOKENS if thought else 0},
        "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
    }
    part = {"type": "output_text", "text": "".join(texts), "annotations": [], "logprobs": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    called = [
        {
            "id": f"fc_{number}",
            "type": "function_call",
            "call_id": f"call_{number}",
            "name": name,
            "arguments": _json(arguments),
            "status": "completed",
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    summary = [{"type": "summary_text", "text": thought}]
    reasoning = {"id": "rs_1", "type": "reasoning", "summary": summary, "encrypted_content": SIGNATURE}
    items = [*([reasoning] if thought else []), *([message] if texts else []), *called]
    base = {"id": "resp_1", "object": "response", "created_at": 1, "model": "up-1", "parallel_tool_calls": True}
    ended = {**base, "tool_choice": "auto", "tools": [], "status": "completed", "output": items, "usage": usage}
    whole = responses.Response.model_validate(ended).model_dump(mode="json", exclude_none=True)
    if not stream:
        return Told([orjson.dumps(whole)])
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": {**whole, "status": "in_progress", "output": []}}
    ]
    for index, item in enumerate(items):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "reasoning":
            begun = {"id": "rs_1", "type": "reasoning", "summary": []}
            told.append({"type": "response.output_item.added", "output_index": index, "item": begun})
            at["summary_index"] = 0
            told.append({"type": "response.reasoning_summary_part.added", **at, "part": {**summary[0], "text": ""}})
            told += [
                {"type": "response.reasoning_summary_text.delta", **at, "delta": piece}
                for piece in (thought[:2], thought[2:])
            ]
            told.append({"type": "response.reasoning_summary_text.done", **at, "text": thought})
            told.append({"type": "response.reasoning_summary_part.done", **at, "part": summary[0]})
        elif item["type"] == "message":
            told.append({"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}})
            at["content_index"] = 0
            told += [{"type": "response.output_text.delta", **at, "delta": text, "logprobs": []} for text in texts]
            told.append({"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []})
        else:
            told.append(
                {"type": "response.output_item.added", "output_index": index, "item": {**item, "arguments": ""}}
            )
            written = item["arguments"]
            told += [
                {"type": "response.function_call_arguments.delta", **at, "delta": piece}
                for piece in (written[:5], written[5:])
            ]
            told.append({"type": "response.function_call_arguments.done", **at, "arguments": written})
        told.append({"type": "response.output_item.done", "output_index": index, "item": item})
    told.append({"type": "response.completed", "response": whole})
    return Told(named(*({**one, "sequence_number": number} for number, one in enumerate(told))), media=SSE)


def _anthropic(texts: Sequence[str], calls: Sequence[Call], stream: bool, thought: str) -> Told:
    usage = {
        "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
        "cache_read_input_tokens": CACHED_TOKENS,
        "cache_creation_input_tokens": 0,
        "output_tokens": ANSWER_TOKENS,
        **({"output_tokens_details": {"thinking_tokens": THOUGHT_TOKENS}} if thought else {}),
    }
    reason = "tool_use" if calls else "end_turn"
    base: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "up-1"}
    blocks: list[dict[str, Any]] = []
    blocks += [{"type": "thinking", "thinking": thought, "signature": SIGNATURE}] if thought else []
    blocks += [{"type": "text", "text": "".join(texts)}] if texts else []
    blocks += [
        {"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]
    ended = {"content": blocks, "stop_reason": reason, "stop_sequence": None, "usage": usage}
    if not stream:
        return Told([claude.Message.model_validate(base | ended).model_dump_json().encode()])
    begun = {**base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 1}}
    told: list[dict[str, Any]] = [{"type": "message_start", "message": begun}, {"type": "ping"}]
    for index, block in enumerate(blocks):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        if block["type"] == "thinking":
            empty = {**block, "thinking": "", "signature": ""}
        told.append({"type": "content_block_start", "index": index, "content_block": empty})
        if is_text:
            parts = [{"type": "text_delta", "text": text} for text in texts]
        elif block["type"] == "thinking":
            parts = [{"type": "thinking_delta", "thinking": part} for part in (thought[:2], thought[2:])]
            parts.append({"type": "signature_delta", "signature": SIGNATURE})
        else:
            written = _json(block["input"])
            parts = [{"type": "input_json_delta", "partial_json": part} for part in (written[:5], written[5:])]
        told += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
        told.append({"type": "content_block_stop", "index": index})
    told.append({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage})
    told.append({"type": "message_stop"})
    return Told(named(*told), media=SSE)


def _gemini(texts: Sequence[str], calls: Sequence[Call], stream: bool, thought: str) -> Told:
    usage = {
        "promptTokenCount": PROMPT_TOKENS,
        "cachedContentTokenCount": CACHED_TOKENS,
        "candidatesTokenCount": ANSWER_TOKENS - (THOUGHT_TOKENS if thought else 0),
        **({"thoughtsTokenCount": THOUGHT_TOKENS} if thought else {}),
        "totalTokenCount": PROMPT_TOKENS + ANSWER_TOKENS,
    }
    called: list[dict[str, Any]] = [{"functionCall": {"name": name, "args": arguments}} for name, arguments in calls]
    thoughts = [{"text": thought, "thought": True}] if thought else []
    if called and thought:
        called[0]["thoughtSignature"] = SIGNATURE

    def content(parts: list[dict[str, Any]], **more: Any) -> bytes:
        value = {
            "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0, **more}],
            "modelVersion": "up-1",
        }
        made = google.GenerateContentResponse.model_validate(value | {"usageMetadata": usage})
        return made.model_dump_json(by_alias=True, exclude_none=True).encode()

    if not stream:
        return Told([content([*thoughts, *({"text": text} for text in texts), *called], finishReason="STOP")])
    told = [content([part]) for part in (*thoughts, *({"text": text} for text in texts))]
    told.append(content([*called, {"text": ""}], finishReason="STOP"))
    return Told(events(*told), media=SSE)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
