"""Clients of all four forms that ask a model to think, call the tools that it calls, and go on with the conversation as
their SDKs keep it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai
from google.genai import types as google

from tests.fakes.gemini import gemini
from tests.fakes.hosted import TOOL

QUESTION = "Where is it warm?"
RESULT = "sunny"


@dataclass
class Thought:
    """What a client had of the first answer, and said in the second turn was answered to it."""

    text: str
    tokens: int
    said: str = ""
    kinds: list[str] = field(default_factory=list)
    """Of the parts of the first answer."""


async def think(client: str, url: str, *, stream: bool, asks: bool = True) -> Thought:
    """Two turns, the second with the results of the calls of the first. `asks` for thoughts."""
    return await {"openai": _openai, "responses": _responses, "anthropic": _anthropic, "gemini": _gemini}[client](
        url, stream, asks
    )


async def _openai(url: str, stream: bool, asks: bool) -> Thought:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        given: dict[str, Any] = {"model": "up-1", "tools": [{"type": "function", "function": TOOL}]}
        given |= {"reasoning_effort": "medium"} if asks else {}

        async def turn() -> Any:
            if not stream:
                return await sdk.chat.completions.create(messages=messages, **given)
            async with sdk.chat.completions.stream(
                messages=messages, stream_options={"include_usage": True}, **given
            ) as events:
                return await events.get_final_completion()

        answer = await turn()
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in messages[-1].get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
        second = await turn()
        extra = message.model_extra or {}
        kinds = [name for name in ("reasoning_content", "reasoning_details") if extra.get(name)]
        kinds += ["extra_content"] if any((call.model_extra or {}) for call in message.tool_calls or ()) else []
        tokens = answer.usage.completion_tokens_details.reasoning_tokens
        return Thought(extra.get("reasoning_content") or "", tokens, second.choices[0].message.content or "", kinds)


async def _responses(url: str, stream: bool, asks: bool) -> Thought:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        given: dict[str, Any] = {
            "model": "up-1",
            "store": False,
            "tools": [{"type": "function", **TOOL, "strict": False}],
        }
        given |= {"reasoning": {"effort": "medium", "summary": "auto"}} if asks else {}
        given["include"] = ["reasoning.encrypted_content"]

        async def turn() -> Any:
            if not stream:
                return await sdk.responses.create(input=items, **given)
            async with sdk.responses.stream(input=items, **given) as events:
                return await events.get_final_response()

        answer = await turn()
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
            for item in answer.output
            if item.type == "function_call"
        ]
        second = await turn()
        summaries = [part.text for item in answer.output if item.type == "reasoning" for part in item.summary]
        kinds = [item.type for item in answer.output]
        tokens = answer.usage.output_tokens_details.reasoning_tokens
        return Thought("".join(summaries), tokens, second.output_text, kinds)


async def _anthropic(url: str, stream: bool, asks: bool) -> Thought:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as sdk:
        tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        given: dict[str, Any] = {"model": "up-1", "max_tokens": 16_000, "tools": [tool]}
        given |= {"thinking": {"type": "enabled", "budget_tokens": 8192}} if asks else {}

        async def turn() -> Any:
            if not stream:
                return await sdk.messages.create(messages=messages, **given)
            async with sdk.messages.stream(messages=messages, **given) as events:
                return await events.get_final_message()

        answer = await turn()
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": RESULT}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})
        second = await turn()
        texts = [block.thinking for block in answer.content if block.type == "thinking"]
        details = answer.usage.output_tokens_details
        said = "".join(block.text for block in second.content if block.type == "text")
        kinds = [block.type for block in answer.content]
        return Thought("".join(texts), details.thinking_tokens if details else 0, said, kinds)


async def _gemini(url: str, stream: bool, asks: bool) -> Thought:
    declared = google.FunctionDeclaration(name=TOOL["name"], parameters_json_schema=TOOL["parameters"])
    config = google.GenerateContentConfig(
        tools=[google.Tool(function_declarations=[declared])],
        automatic_function_calling=google.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=google.ThinkingConfig(thinking_budget=8192, include_thoughts=True) if asks else None,
    )
    contents: list[Any] = [google.Content(role="user", parts=[google.Part(text=QUESTION)])]
    models = gemini(url).aio.models

    async def turn() -> tuple[list[google.Part], Any]:
        if stream:
            stream_of = await models.generate_content_stream(model="up-1", contents=contents, config=config)
            answers = [one async for one in stream_of]
        else:
            answers = [await models.generate_content(model="up-1", contents=contents, config=config)]
        found = [one.candidates[0].content for one in answers if one.candidates]
        return [part for one in found if one for part in one.parts or ()], answers[-1].usage_metadata

    parts, usage = await turn()
    calls = [part.function_call for part in parts if part.function_call]
    contents.append(google.Content(role="model", parts=parts))
    contents.append(
        google.Content(
            role="user",
            parts=[google.Part.from_function_response(name=call.name, response={"is": RESULT}) for call in calls],
        )
    )
    second, _ = await turn()
    text = "".join(part.text or "" for part in parts if part.thought)
    kinds = ["thought" if part.thought else "call" if part.function_call else "text" for part in parts]
    said = "".join(part.text or "" for part in second if not part.thought)
    return Thought(text, usage.thoughts_token_count or 0, said, kinds)
