"""Hosted APIs as translated requests meet them: answers made of the official SDKs' own models, and clients of all four
forms that ask the same thing in their own words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import anthropic
import openai
import orjson
from anthropic import types as claude
from google.genai import errors as google_errors
from google.genai import types as google
from openai.types import chat, responses

from tests.fakes.gemini import gemini
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


def answers(dialect: str, texts: Sequence[str], calls: Sequence[Call] = (), *, stream: bool) -> Told:
    """An answer of these texts (chunks of one) and calls."""
    told = {"openai": _openai, "responses": _responses, "anthropic": _anthropic, "gemini": _gemini}[dialect]
    return told(texts, calls, stream)


def refuses(dialect: str, status: int, message: str, **headers: str) -> Told:
    body: dict[str, Any] = {
        "openai": {"error": {"message": message, "type": "t", "param": None, "code": "c"}},
        "anthropic": {"type": "error", "error": {"type": "t", "message": message}, "request_id": "req_1"},
        "gemini": {"error": {"code": status, "message": message, "status": "T"}},
    }["openai" if dialect == "responses" else dialect]
    return Told(
        [orjson.dumps(body)], status, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def _openai(texts: Sequence[str], calls: Sequence[Call], stream: bool) -> Told:
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": ANSWER_TOKENS,
        "total_tokens": PROMPT_TOKENS + ANSWER_TOKENS,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
    base: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": "up-1"}
    reason = "tool_calls" if calls else "stop"
    if not stream:
        made = [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": _json(arguments)}}
            for number, (name, arguments) in enumerate(calls)
        ]
        message = {"role": "assistant", "content": "".join(texts) or None} | ({"tool_calls": made} if made else {})
        choice = {"index": 0, "message": message, "finish_reason": reason}
        whole = chat.ChatCompletion.model_validate(
            {**base, "object": "chat.completion", "choices": [choice], "usage": usage}
        )
        return Told([whole.model_dump_json().encode()])
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]
    for number, (name, arguments) in enumerate(calls):
        head = {
            "index": number,
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
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


def _responses(texts: Sequence[str], calls: Sequence[Call], stream: bool) -> Told:
    usage = {
        "input_tokens": PROMPT_TOKENS,
        "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cache_write_tokens": 0},
        "output_tokens": ANSWER_TOKENS,
        "output_tokens_details": {"reasoning_tokens": 0},
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
    items = [*([message] if texts else []), *called]
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
        if item["type"] == "message":
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


def _anthropic(texts: Sequence[str], calls: Sequence[Call], stream: bool) -> Told:
    usage = {
        "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
        "cache_read_input_tokens": CACHED_TOKENS,
        "cache_creation_input_tokens": 0,
        "output_tokens": ANSWER_TOKENS,
    }
    reason = "tool_use" if calls else "end_turn"
    base: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": "up-1"}
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "".join(texts)}] if texts else []
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
        told.append({"type": "content_block_start", "index": index, "content_block": empty})
        if is_text:
            parts = [{"type": "text_delta", "text": text} for text in texts]
        else:
            written = _json(block["input"])
            parts = [{"type": "input_json_delta", "partial_json": part} for part in (written[:5], written[5:])]
        told += [{"type": "content_block_delta", "index": index, "delta": part} for part in parts]
        told.append({"type": "content_block_stop", "index": index})
    told.append({"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage})
    told.append({"type": "message_stop"})
    return Told(named(*told), media=SSE)


def _gemini(texts: Sequence[str], calls: Sequence[Call], stream: bool) -> Told:
    usage = {
        "promptTokenCount": PROMPT_TOKENS,
        "cachedContentTokenCount": CACHED_TOKENS,
        "candidatesTokenCount": ANSWER_TOKENS,
        "totalTokenCount": PROMPT_TOKENS + ANSWER_TOKENS,
    }
    called = [{"functionCall": {"name": name, "args": arguments}} for name, arguments in calls]

    def content(parts: list[dict[str, Any]], **more: Any) -> bytes:
        value = {
            "candidates": [{"content": {"role": "model", "parts": parts}, "index": 0, **more}],
            "modelVersion": "up-1",
        }
        made = google.GenerateContentResponse.model_validate(value | {"usageMetadata": usage})
        return made.model_dump_json(by_alias=True, exclude_none=True).encode()

    if not stream:
        return Told([content([*({"text": text} for text in texts), *called], finishReason="STOP")])
    told = [content([{"text": text}]) for text in texts]
    told.append(content([*called, {"text": ""}], finishReason="STOP"))
    return Told(events(*told), media=SSE)


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


# -- clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Heard:
    """What a client's SDK made of an answer."""

    text: str
    calls: list[Call]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass
class Failed:
    status: int
    message: str


async def ask(client: str, url: str, *, stream: bool, tools: bool = False) -> Heard | Failed:
    """The same question, "Hi ✓" behind a system prompt, by the SDK of a client."""
    try:
        return await {
            "openai": _ask_openai,
            "responses": _ask_responses,
            "anthropic": _ask_anthropic,
            "gemini": _ask_gemini,
        }[client](url, stream, tools)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return Failed(error.status_code, str(error))
    except google_errors.APIError as error:
        return Failed(error.code, str(error))


SYSTEM, QUESTION = "Be brief.", "Hi ✓"


async def _ask_openai(url: str, stream: bool, tools: bool) -> Heard:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        options: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL}]} if tools else {}
        messages: Any = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
        create: Any = sdk.chat.completions.create
        if not stream:
            answer = await create(model="up-1", messages=messages, **options)
            message = answer.choices[0].message
            calls = [(call.function.name, orjson.loads(call.function.arguments)) for call in message.tool_calls or ()]
            return _heard(message.content or "", calls, answer.usage)
        text, made, usage = "", dict[int, list[str]](), None
        more = {"stream_options": {"include_usage": True}}
        async for chunk in await create(model="up-1", messages=messages, stream=True, **more, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    own = made.setdefault(call.index, ["", ""])
                    own[0] += call.function.name or ""
                    own[1] += call.function.arguments or ""
        return _heard(text, [(name, orjson.loads(arguments)) for name, arguments in made.values()], usage)


def _heard(text: str, calls: list[Call], usage: Any) -> Heard:
    return Heard(text, calls, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


async def _ask_responses(url: str, stream: bool, tools: bool) -> Heard:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        options: dict[str, Any] = {"tools": [{"type": "function", **TOOL, "strict": False}]} if tools else {}
        given = {"model": "up-1", "instructions": SYSTEM, "input": QUESTION, "store": False, **options}
        create: Any = sdk.responses.create
        if stream:
            answer = None
            async for event in await create(stream=True, **given):
                if event.type == "response.completed":
                    answer = event.response
                elif event.type in ("error", "response.failed", "response.incomplete"):
                    raise RuntimeError(f"the response ended with {event.type}")
            assert answer is not None
        else:
            answer = await create(**given)
        calls = [(item.name, orjson.loads(item.arguments)) for item in answer.output if item.type == "function_call"]
        usage = answer.usage
        cached = usage.input_tokens_details.cached_tokens
        return Heard(answer.output_text, calls, usage.input_tokens, cached, usage.output_tokens)


async def _ask_anthropic(url: str, stream: bool, tools: bool) -> Heard:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as sdk:
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        given: dict[str, Any] = {"model": "up-1", "system": SYSTEM, "max_tokens": 50}
        given["messages"] = [{"role": "user", "content": QUESTION}]
        given |= {"tools": [tool]} if tools else {}
        if stream:
            async with sdk.messages.stream(**given) as events:
                answer = await events.get_final_message()
        else:
            answer = await sdk.messages.create(**given)
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls: list[Call] = [(block.name, dict(block.input)) for block in answer.content if block.type == "tool_use"]
        usage, cached = answer.usage, answer.usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        return Heard(text, calls, prompt, cached, usage.output_tokens)


async def _ask_gemini(url: str, stream: bool, tools: bool) -> Heard:
    declared = google.FunctionDeclaration(
        name="get_weather", description="The weather of a place.", parameters_json_schema=TOOL["parameters"]
    )
    config = google.GenerateContentConfig(
        system_instruction=SYSTEM,
        tools=[google.Tool(function_declarations=[declared])] if tools else None,
        automatic_function_calling=google.AutomaticFunctionCallingConfig(disable=True),
    )
    models = gemini(url).aio.models
    if stream:
        parts = [
            one async for one in await models.generate_content_stream(model="up-1", contents=QUESTION, config=config)
        ]
    else:
        parts = [await models.generate_content(model="up-1", contents=QUESTION, config=config)]
    text, calls = "", list[Call]()
    for one in parts:
        for part in (
            (one.candidates or [])[0].content.parts or () if one.candidates and one.candidates[0].content else ()
        ):
            text += part.text or ""
            if part.function_call is not None:
                calls.append((part.function_call.name or "", dict(part.function_call.args or {})))
    usage = parts[-1].usage_metadata
    assert usage is not None
    cached = usage.cached_content_token_count or 0
    return Heard(text, calls, usage.prompt_token_count or 0, cached, usage.candidates_token_count or 0)
