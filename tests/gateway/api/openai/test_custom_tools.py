"""Custom tools of the chat API, with the real SDK: offered as functions, called and given back in their own form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.types import CallDelta, ChatPrompt
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

HI: Any = [{"role": "user", "content": "hi"}]
NOTE: Any = {
    "type": "custom",
    "custom": {
        "name": "note",
        "description": "Writes a note.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /x+/"}},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
INPUT = 'print("é")\n'
CALLS = [
    CallDelta(0, "note"),
    CallDelta(0, "", '{"input": '),
    CallDelta(0, "", json.dumps(INPUT) + "}"),
    CallDelta(1, "now", "{}"),
    CallDelta(2, "note", '{"input": "second"}'),
]
ASKING: Any = {"model": "demo", "messages": HI, "tools": [NOTE, NOW]}


def prompt_of(pipeline: FakePipeline) -> ChatPrompt:
    prompt = pipeline.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


async def test_a_custom_tool_is_offered_as_a_function_of_one_text_with_its_grammar() -> None:
    pipeline = FakePipeline(pieces=["Hello"])
    async with running(pipeline) as gateway, gateway.sdk() as client:
        await client.chat.completions.create(**ASKING)
    note, now = prompt_of(pipeline).tools
    assert (note.name, now.name, note.strict) == ("note", "now", True)
    assert note.description == "Writes a note.\n\nThe input is a text of this grammar:\nstart: /x+/"
    assert note.parameters is not None
    assert note.parameters["properties"] == {"input": {"type": "string"}}


async def test_calls_come_back_in_their_own_form_whole_and_streamed() -> None:
    pipeline = FakePipeline(pieces=CALLS, reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        whole: Any = (await client.chat.completions.create(**ASKING)).choices[0]
        stream = await client.chat.completions.create(**ASKING, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert whole.finish_reason == chunks[-1].finish_reason == "tool_calls"
    first, second, third = whole.message.tool_calls
    assert [call.type for call in (first, second, third)] == ["custom", "function", "custom"]
    assert second.function.name == "now"
    assert [(call.custom.name, call.custom.input) for call in (first, third)] == [("note", INPUT), ("note", "second")]
    assert len({first.id, second.id, third.id}) == 3
    deltas = [call.to_dict() for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(delta["index"], delta.get("type")) for delta in deltas] == [
        (0, "custom"),
        (0, None),
        (1, "function"),
        (2, "custom"),
        (2, None),
    ]
    assert deltas[1]["custom"] == {"input": INPUT}


async def test_a_call_of_the_history_is_the_one_that_the_model_made() -> None:
    pipeline = FakePipeline(pieces=CALLS[:3], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        answer = (await client.chat.completions.create(**ASKING)).choices[0].message
        assert answer.tool_calls is not None
        told = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "Written."}
        await client.chat.completions.create(**{**ASKING, "messages": [*HI, answer, told]})
    _, call, result = prompt_of(pipeline).messages
    assert call["tool_calls"][0]["function"] == {"name": "note", "arguments": {"input": INPUT}}
    assert result["content"] == "Written."


async def test_a_custom_tool_that_is_named_is_called_once() -> None:
    pipeline = FakePipeline(pieces=CALLS[:3], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        named: Any = {"type": "custom", "custom": {"name": "note"}}
        answer = (await client.chat.completions.create(**ASKING, tool_choice=named)).choices[0]
    use = pipeline.requests[-1].tool_use
    assert use is not None
    assert ([tool.name for tool in use.callable], use.mode, use.parallel) == (["note"], "required", False)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_was_cut_has_the_input_as_far_as_it_came(stream: bool) -> None:
    cut = [CallDelta(0, "note"), CallDelta(0, "", '{"input": "half of')]
    async with running(FakePipeline(pieces=cut, reason="length")) as gateway, gateway.sdk() as client:
        if stream:
            chunks: Any = [chunk async for chunk in await client.chat.completions.create(**ASKING, stream=True)]
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
            assert calls[-1].to_dict()["custom"] == {"input": "half of"}
            return
        choice: Any = (await client.chat.completions.create(**ASKING)).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls[0].custom.input) == ("length", "half of")
