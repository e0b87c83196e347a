"""Clients of all four forms that ask the same thing in their own words, by the real SDKs, and what they hear."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import openai
import orjson
from google.genai import errors as google_errors
from google.genai import types as google

from tests.fakes.gemini import gemini

Call = tuple[str, dict[str, Any]]
CLIENTS: Final = ("openai", "responses", "anthropic", "gemini")
SYSTEM, QUESTION, REST = "Be brief.", "Hi ✓", "What is it?"
IMAGE: Final = b"\x89PNG\r\n\x1a\n\xfb\xff\xbe"
"""Whose base64 the SDK of Gemini writes with `-` and `_`."""
_BASE64: Final = base64.b64encode(IMAGE).decode()
PLACES: Final = ({"place": "Oslo ✓"}, {"place": "Rome"})
"""Of two calls at once, earlier in a conversation with tools."""
RESULTS: Final = ("snow ❄", "sun")
PARAMETERS: Final = {
    "type": "object",
    "properties": {"place": {"type": "string"}},
    "required": ["place"],
    "additionalProperties": False,
}
TOOL: Final = {"name": "get_weather", "description": "The weather of a place.", "parameters": PARAMETERS}
OTHER: Final = {"name": "clock", "description": "The time.", "parameters": PARAMETERS}
SCHEMA: Final = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Wish:
    """What a client asks for: the answer to QUESTION behind SYSTEM, and more.

    tools   two are declared, and the conversation has two calls at once with their results
    forced  get_weather has to be called, strictly by its schema, and once
    schema  the answer follows SCHEMA
    image   IMAGE is behind the question, and REST behind that; without tools
    """

    stream: bool = False
    tools: bool = False
    forced: bool = False
    schema: bool = False
    image: bool = False


@dataclass
class Heard:
    """What a client's SDK made of an answer."""

    text: str
    calls: list[Call]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ended: str = field(default="", compare=False)  # in the words of its API


@dataclass
class Failed:
    """`retry_after` is the header, where there is one."""

    status: int
    message: str
    retry_after: str | None = None


class Sdks:
    """One client of each SDK, for one gateway."""

    def __init__(self, url: str) -> None:
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        self._gemini = gemini(url)

    async def close(self) -> None:
        await self._openai.close()
        await self._anthropic.close()
        await self._gemini.aio.aclose()
        self._gemini.close()

    async def ask(self, client: str, model: str, wish: Wish) -> Heard | Failed:
        """Raises what the SDK raises, but for the errors that an API answers."""
        forms = {
            "openai": self._chat,
            "responses": self._response,
            "anthropic": self._message,
            "gemini": self._content,
        }
        try:
            return await forms[client](model, wish)
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return Failed(error.status_code, str(error), error.response.headers.get("retry-after"))
        except google_errors.APIError as error:
            headers: Mapping[str, str] = getattr(error.response, "headers", {})
            return Failed(error.code, str(error), headers.get("retry-after"))

    async def _chat(self, model: str, wish: Wish) -> Heard:
        given: dict[str, Any] = {"model": model, "messages": chat_messages(wish)}
        if wish.tools:
            strict = {"strict": True} if wish.forced else {}
            given["tools"] = [{"type": "function", "function": {**tool, **strict}} for tool in (TOOL, OTHER)]
        if wish.forced:
            given["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
            given["parallel_tool_calls"] = False
        if wish.schema:
            form = {"name": "city", "schema": SCHEMA, "strict": True}
            given["response_format"] = {"type": "json_schema", "json_schema": form}
        create: Any = self._openai.chat.completions.create
        if not wish.stream:
            answer = await create(**given)
            (choice,) = answer.choices
            calls = [(one.function.name, _object(one.function.arguments)) for one in choice.message.tool_calls or ()]
            return _heard(choice.message.content or "", calls, answer.usage, choice.finish_reason)
        text, made, usage, ended = "", dict[int, list[str]](), None, ""
        async for chunk in await create(stream=True, stream_options={"include_usage": True}, **given):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text, ended = text + (choice.delta.content or ""), choice.finish_reason or ended
                for call in choice.delta.tool_calls or ():
                    own = made.setdefault(call.index, ["", ""])
                    own[0] += call.function.name or ""
                    own[1] += call.function.arguments or ""
        return _heard(text, [(name, _object(arguments)) for name, arguments in made.values()], usage, ended)

    async def _response(self, model: str, wish: Wish) -> Heard:
        given: dict[str, Any] = {"model": model, "instructions": SYSTEM, "input": response_items(wish), "store": False}
        if wish.tools:
            given["tools"] = [{"type": "function", **tool, "strict": wish.forced} for tool in (TOOL, OTHER)]
        if wish.forced:
            given |= {"tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False}
        if wish.schema:
            given["text"] = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
        create: Any = self._openai.responses.create
        answer: Any = None
        if wish.stream:
            async for event in await create(stream=True, **given):
                if event.type == "response.completed":
                    answer = event.response
                elif event.type in ("error", "response.failed", "response.incomplete"):
                    raise RuntimeError(f"the response ended with {event.type}")
            assert answer is not None
        else:
            answer = await create(**given)
        calls = [(item.name, _object(item.arguments)) for item in answer.output if item.type == "function_call"]
        usage = answer.usage
        cached = usage.input_tokens_details.cached_tokens
        return Heard(answer.output_text, calls, usage.input_tokens, cached, usage.output_tokens, answer.status)

    async def _message(self, model: str, wish: Wish) -> Heard:
        given: dict[str, Any] = {"model": model, "system": SYSTEM, "max_tokens": 50, "messages": claude_messages(wish)}
        if wish.tools:
            strict = {"strict": True} if wish.forced else {}
            given["tools"] = [
                {"name": one["name"], "description": one["description"], "input_schema": one["parameters"], **strict}
                for one in (TOOL, OTHER)
            ]
        if wish.forced:
            given["tool_choice"] = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
        if wish.schema:
            given["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        if wish.stream:
            async with self._anthropic.messages.stream(**given) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await self._anthropic.messages.create(**given)
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls: list[Call] = [(block.name, dict(block.input)) for block in answer.content if block.type == "tool_use"]
        usage, cached = answer.usage, answer.usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        return Heard(text, calls, prompt, cached, usage.output_tokens, answer.stop_reason)

    async def _content(self, model: str, wish: Wish) -> Heard:
        config: dict[str, Any] = {"system_instruction": SYSTEM}
        if wish.tools:
            declared = [
                google.FunctionDeclaration(
                    name=one["name"], description=one["description"], parameters_json_schema=one["parameters"]
                )
                for one in (TOOL, OTHER)
            ]
            config["tools"] = [google.Tool(function_declarations=declared)]
        if wish.forced:
            calling = google.FunctionCallingConfig(
                mode=google.FunctionCallingConfigMode.ANY, allowed_function_names=["get_weather"]
            )
            config["tool_config"] = google.ToolConfig(function_calling_config=calling)
        if wish.schema:
            config |= {"response_mime_type": "application/json", "response_json_schema": SCHEMA}
        config["automatic_function_calling"] = google.AutomaticFunctionCallingConfig(disable=True)
        given: dict[str, Any] = {"model": model, "contents": gemini_contents(wish)}
        given["config"] = google.GenerateContentConfig(**config)
        models = self._gemini.aio.models
        if wish.stream:
            parts = [one async for one in await models.generate_content_stream(**given)]
        else:
            parts = [await models.generate_content(**given)]
        text, calls, ended = "", list[Call](), ""
        for one in parts:
            for candidate in one.candidates or ():
                ended = candidate.finish_reason.value if candidate.finish_reason else ended
                for part in (candidate.content.parts if candidate.content else None) or ():
                    text += part.text or ""
                    if part.function_call is not None:
                        calls.append((part.function_call.name or "", dict(part.function_call.args or {})))
        usage = parts[-1].usage_metadata
        assert usage is not None
        cached = usage.cached_content_token_count or 0
        return Heard(text, calls, usage.prompt_token_count or 0, cached, usage.candidates_token_count or 0, ended)


@asynccontextmanager
async def sdks(url: str) -> AsyncIterator[Sdks]:
    found = Sdks(url)
    try:
        yield found
    finally:
        await found.close()


async def ask(client: str, url: str, *, stream: bool, tools: bool = False, model: str = "up-1") -> Heard | Failed:
    """The same for one question."""
    async with sdks(url) as found:
        return await found.ask(client, model, Wish(stream=stream, tools=tools))


# -- conversations ----------------------------------------------------------------------------------------------------


def chat_messages(wish: Wish) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    if wish.tools:
        calls = [
            {"id": f"call_{number}", "type": "function", "function": {"name": "get_weather", "arguments": _json(place)}}
            for number, place in enumerate(PLACES)
        ]
        messages += [{"role": "user", "content": "Where is it warm?"}]
        messages += [{"role": "assistant", "content": None, "tool_calls": calls}]
        messages += [
            {"role": "tool", "tool_call_id": f"call_{number}", "content": text} for number, text in enumerate(RESULTS)
        ]
        messages += [{"role": "assistant", "content": "In Rome."}]
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_BASE64}"}}
    return [*messages, {"role": "user", "content": _with_image("text", picture) if wish.image else QUESTION}]


def _with_image(kind: str, picture: dict[str, Any]) -> list[Any]:
    return [{"type": kind, "text": QUESTION}, picture, {"type": kind, "text": REST}]


def response_items(wish: Wish) -> Any:
    if wish.image:
        picture = {"type": "input_image", "image_url": f"data:image/png;base64,{_BASE64}", "detail": "auto"}
        return [{"role": "user", "content": _with_image("input_text", picture)}]
    if not wish.tools:
        return QUESTION
    called = [
        {"type": "function_call", "call_id": f"call_{number}", "name": "get_weather", "arguments": _json(place)}
        for number, place in enumerate(PLACES)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{number}", "output": text}
        for number, text in enumerate(RESULTS)
    ]
    return [
        {"role": "user", "content": "Where is it warm?"},
        *called,
        *outputs,
        {"role": "assistant", "content": "In Rome."},
        {"role": "user", "content": QUESTION},
    ]


def claude_messages(wish: Wish) -> list[Any]:
    if wish.image:
        source = {"type": "base64", "media_type": "image/png", "data": _BASE64}
        return [{"role": "user", "content": _with_image("text", {"type": "image", "source": source})}]
    if not wish.tools:
        return [{"role": "user", "content": QUESTION}]
    uses = [
        {"type": "tool_use", "id": f"toolu_{number}", "name": "get_weather", "input": place}
        for number, place in enumerate(PLACES)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}
        for number, text in enumerate(RESULTS)
    ]
    return [
        {"role": "user", "content": "Where is it warm?"},
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
        {"role": "assistant", "content": "In Rome."},
        {"role": "user", "content": QUESTION},
    ]


def gemini_contents(wish: Wish) -> Any:
    if wish.image:
        return [QUESTION, google.Part.from_bytes(data=IMAGE, mime_type="image/png"), REST]
    if not wish.tools:
        return QUESTION
    calls = [google.Part(function_call=google.FunctionCall(name="get_weather", args=dict(one))) for one in PLACES]
    results = [
        google.Part(function_response=google.FunctionResponse(name="get_weather", response={"output": text}))
        for text in RESULTS
    ]
    return [
        google.Content(role="user", parts=[google.Part(text="Where is it warm?")]),
        google.Content(role="model", parts=calls),
        google.Content(role="user", parts=results),
        google.Content(role="model", parts=[google.Part(text="In Rome.")]),
        google.Content(role="user", parts=[google.Part(text=QUESTION)]),
    ]


def _heard(text: str, calls: list[Call], usage: Any, ended: str) -> Heard:
    cached = usage.prompt_tokens_details.cached_tokens
    return Heard(text, calls, usage.prompt_tokens, cached, usage.completion_tokens, ended)


def _object(text: str) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(text)
    return found


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()
