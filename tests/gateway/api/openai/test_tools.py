"""`tools` and `tool_choice` of the chat API: what is read, what is refused, and how calls are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.call import Call
from gateway.api.openai.request import parse_chat
from gateway.api.tools import MAX_TOOLS
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import CallDelta, ChatPrompt, TextDelta, Tool, ToolUse
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
STRICT = {**SCHEMA, "required": ["city"], "additionalProperties": False}
HI: Any = [{"role": "user", "content": "hi"}]


def declared(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def note(**more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "note", **more}}


WEATHER = declared("weather", description="Weather.", parameters=SCHEMA)
TOOLS = [WEATHER, declared("now")]
ONE = Tool("weather", "Weather.", SCHEMA, path="tools[0].function.parameters")
TWO = Tool("now", path="tools[1].function.parameters")


def chat(**fields: Any) -> Call:
    return parse_chat({"model": "demo", "messages": HI, **fields}, LeaseSettings())


@pytest.mark.parametrize(
    ("fields", "use"),
    [
        ({}, ToolUse((ONE, TWO))),
        ({"tool_choice": "auto"}, ToolUse((ONE, TWO))),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "required"}, ToolUse((ONE, TWO), "required")),
        ({"tool_choice": named("now")}, ToolUse((TWO,), "required", parallel=False)),
        ({"tool_choice": allowed("auto", "now", "now")}, ToolUse((TWO,))),
        ({"tool_choice": allowed("required", "now", "weather")}, ToolUse((TWO, ONE), "required")),
        ({"parallel_tool_calls": False}, ToolUse((ONE, TWO), parallel=False)),
    ],
)
def test_a_choice_says_which_tools_may_be_called_and_how(fields: dict[str, Any], use: ToolUse | None) -> None:
    call = chat(tools=TOOLS, **fields)
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == (ONE, TWO)  # all of them, whatever the choice: the prefix stays the same
    assert call.tool_use == use


def test_the_deprecated_functions_are_tools_of_which_at_most_one_is_called() -> None:
    functions = [{"name": "weather", "parameters": SCHEMA}, {"name": "now", "description": "Now."}]
    tools = (
        Tool("weather", None, SCHEMA, path="functions[0].parameters"),
        Tool("now", "Now.", path="functions[1].parameters"),
    )
    assert chat(functions=functions).tool_use == ToolUse(tools, parallel=False)
    assert chat(functions=functions, function_call="none").tool_use is None
    assert chat(functions=functions, function_call={"name": "now"}).tool_use == ToolUse(tools[1:], "required", False)


def test_strict_is_kept_and_holds_the_schema_to_its_subset() -> None:
    use = chat(tools=[declared("weather", parameters=STRICT, strict=True)]).tool_use
    assert use is not None
    assert use.callable[0].strict
    with pytest.raises(BadRequestError) as caught:
        chat(tools=[declared("weather", parameters=SCHEMA, strict=True)])
    assert (caught.value.param, caught.value.code) == ("tools[0].function.parameters", "invalid_json_schema")


AT = "tools[0].function"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_required_parameter"),
    ({"tools": [{"type": "custom"}]}, "tools[0].custom", "missing_required_parameter"),
    ({"tools": [note(), note()]}, "tools[1].custom.name", "invalid_value"),
    ({"tools": [note(name="f g")]}, "tools[0].custom.name", "invalid_value"),
    ({"tools": [note(description=1)]}, "tools[0].custom.description", "invalid_type"),
    ({"tools": [note(format={"type": "xml"})]}, "tools[0].custom.format.type", "invalid_value"),
    ({"tools": [note(format={"type": "grammar"})]}, "tools[0].custom.format.grammar", "missing_required_parameter"),
    (
        {"tools": [note(format={"type": "grammar", "grammar": {"syntax": "lark"}})]},
        "tools[0].custom.format.grammar.definition",
        "missing_required_parameter",
    ),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, AT, "missing_required_parameter"),
    ({"tools": [{**WEATHER, "more": 1}]}, "tools[0].more", "unknown_parameter"),
    ({"tools": [declared("f", more=1)]}, f"{AT}.more", "unknown_parameter"),
    ({"tools": [{"type": "function", "function": {}}]}, f"{AT}.name", "missing_required_parameter"),
    ({"tools": [declared("f g")]}, f"{AT}.name", "invalid_value"),
    ({"tools": [declared("f\n")]}, f"{AT}.name", "invalid_value"),
    ({"tools": [declared("f", parameters=[])]}, f"{AT}.parameters", "invalid_type"),
    ({"tools": [declared("f", parameters={"type": "array"})]}, f"{AT}.parameters.type", "invalid_function_parameters"),
    ({"tools": [declared("f", strict="yes")]}, f"{AT}.strict", "invalid_type"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [declared(f"f{n}") for n in range(MAX_TOOLS + 1)]}, "tools", "array_above_max_length"),
    ({"tool_choice": named("f")}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.type", "missing_required_parameter"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.custom", "missing_required_parameter"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
    ({"tools": TOOLS, "tool_choice": named("f")}, "tool_choice.function.name", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": allowed("none", "now")}, "tool_choice.allowed_tools.mode", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "empty_array"),
    (
        {"tools": TOOLS, "tool_choice": allowed("auto", "now", "f")},
        "tool_choice.allowed_tools.tools[1].function.name",
        "invalid_value",
    ),
    ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "invalid_parameter_combination"),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name", "invalid_value"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name", "invalid_value"),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", "invalid_value"),
    ({"function_call": {"name": "f"}}, "function_call", "invalid_value"),
    ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions", "invalid_parameter_combination"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named_by_its_path_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        chat(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert len(refused.value.message) < 400


# -- answers ----------------------------------------------------------------------------------------------------------

CALLS = [CallDelta(0, "weather"), CallDelta(0, "", '{"city": '), CallDelta(0, "", '"Oslo"}'), CallDelta(1, "now", "{}")]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("auto", "tool_calls"), ("required", "tool_calls"), (named("weather"), "stop"), (allowed("auto", "now"), None)],
)
async def test_streamed_and_whole_calls_are_the_same_for_the_sdk(choice: Any, reason: str | None) -> None:
    pipeline = FakePipeline(pieces=CALLS, reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        asking: Any = {"model": "demo", "messages": HI, "tools": TOOLS, "tool_choice": choice}
        whole = (await client.chat.completions.create(**asking)).choices[0]
        async with client.chat.completions.stream(**asking) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for told in (whole, streamed):
        assert (told.finish_reason, told.message.content) == (reason or "tool_calls", None)
        calls: Any = told.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"city": "Oslo"}),
            ("now", {}),
        ]
        assert all(call.id.startswith("call_") and call.type == "function" for call in calls)
        assert len({call.id for call in calls}) == 2


async def test_text_before_a_call_is_content_and_running_out_of_tokens_is_length() -> None:
    pipeline = FakePipeline(pieces=["Let me ", TextDelta("see."), *CALLS[:2]], reason="length")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        asking: Any = {"model": "demo", "messages": HI, "tools": TOOLS}
        whole = (await client.chat.completions.create(**asking)).choices[0]
        stream = await client.chat.completions.create(**asking, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert (whole.finish_reason, whole.message.content) == ("length", "Let me see.")
    assert whole.message.tool_calls is not None
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert chunks[-1].finish_reason == "length"
    deltas = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert [delta.index for delta in deltas] == [0, 0]
    assert [delta.function and delta.function.name for delta in deltas] == ["weather", None]
    assert [delta.id is None for delta in deltas] == [False, True]


async def test_text_without_a_call_is_what_it_always_was() -> None:
    async with running() as gateway, gateway.sdk() as client:
        asking: Any = {"model": "demo", "messages": HI, "tools": TOOLS}
        whole = (await client.chat.completions.create(**asking)).choices[0]
        async with client.chat.completions.stream(**asking) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
    for told in (whole, streamed):
        assert (told.finish_reason, told.message.content) == ("stop", "Hello world")
        assert not told.message.tool_calls


@pytest.mark.parametrize(("choice", "reason"), [("auto", "function_call"), ({"name": "weather"}, "stop")])
async def test_the_deprecated_form_is_answered_in_its_own(choice: Any, reason: str) -> None:
    pipeline = FakePipeline(pieces=CALLS[:3], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        asking: Any = {"model": "demo", "messages": HI, "functions": [{"name": "weather"}], "function_call": choice}
        whole = (await client.chat.completions.create(**asking)).choices[0]
        stream = await client.chat.completions.create(**asking, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    call = whole.message.function_call
    assert call is not None
    assert (call.name, call.arguments, whole.finish_reason) == ("weather", '{"city": "Oslo"}', reason)
    assert whole.message.tool_calls is None
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert [delta.name for delta in deltas] == ["weather", None, None]
    assert "".join(delta.arguments or "" for delta in deltas) == '{"city": "Oslo"}'
    assert chunks[-1].finish_reason == reason
