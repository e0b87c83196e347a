"""Functions of the Responses API: what they become, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from gateway.api.openai.responses.parameters import TOKENS
from gateway.api.openai.responses.request import parse, to_call
from gateway.api.openai.responses.tools import tool_choice, tools
from gateway.config import LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import CallDelta, ChatPrompt, Tool, ToolUse
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
LOOSE: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city.", "parameters": STRICT}
TIME = {"type": "function", "name": "time"}


def used(**fields: Any) -> tuple[tuple[Tool, ...], ToolUse | None]:
    asked = parse({"model": "demo", "input": "hi", **fields})
    call = to_call(asked, asked.items, LeaseSettings())
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt.tools, call.tool_use


def names(use: ToolUse | None) -> list[str]:
    assert use is not None
    return [tool.name for tool in use.callable]


def test_functions_are_flat_and_strict_where_they_can_be() -> None:
    given = [WEATHER, TIME, WEATHER | {"name": "loose", "parameters": LOOSE}, WEATHER | {"name": "no", "strict": False}]
    declared, use = used(tools=given)
    assert declared == (
        Tool("weather", "Of a city.", STRICT, True, "tools[0].parameters"),
        Tool("time", None, None, False, "tools[1].parameters"),
        Tool("loose", "Of a city.", LOOSE, False, "tools[2].parameters"),
        Tool("no", "Of a city.", STRICT, False, "tools[3].parameters"),
    )
    assert use == ToolUse(declared)


@pytest.mark.parametrize(
    ("choice", "mode", "called"),
    [
        ("auto", "auto", ["weather", "time"]),
        ("required", "required", ["weather", "time"]),
        ({"type": "function", "name": "time"}, "required", ["time"]),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
            "auto",
            ["time"],
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
            "required",
            ["weather"],
        ),
    ],
    ids=str,
)
def test_a_choice_says_which_may_be_called_and_whether_one_must(choice: Any, mode: str, called: list[str]) -> None:
    declared, use = used(tools=[WEATHER, TIME], tool_choice=choice, parallel_tool_calls=False)
    assert len(declared) == 2
    assert names(use) == called
    assert use is not None
    assert (use.mode, use.parallel) == (mode, False)
    for check, value in ((tools, [WEATHER, TIME]), (tool_choice, choice)):
        jsonschema.Draft202012Validator(check.schema).validate(value)


def test_none_shows_the_tools_and_lets_none_be_called() -> None:
    declared, use = used(tools=[WEATHER], tool_choice="none")
    assert (len(declared), use) == (1, None)
    assert used(tool_choice="auto") == used(tool_choice="none") == used() == ((), None)


def test_a_prewarmed_prompt_has_its_tools_and_calls_none() -> None:
    declared, use = used(tools=[WEATHER], tool_choice="required", prompt_cache_options={"prewarm": True})
    assert (len(declared), use) == (1, None)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
    ({"tools": [TIME | {"name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [TIME | {"function": {"name": "f"}}]}, "tools[0].function", "unknown_parameter"),
    ({"tools": [WEATHER | {"parameters": LOOSE, "strict": True}]}, "tools[0].parameters", "invalid_json_schema"),
    ({"tools": [TIME, TIME]}, "tools[1].name", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name", "invalid_value"),
    ({"tools": [TIME], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported_parameter"),
    ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.name", "missing_required_parameter"),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}},
        "tool_choice.mode",
        "invalid_value",
    ),
    (
        {"tools": [TIME], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
        "empty_array",
    ),
    ({"tools": [TIME], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "invalid_parameter_combination"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named_by_its_path(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        used(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_counting_looks_at_tools_as_well() -> None:
    asked = parse({"model": "demo", "input": "hi", "tool_choice": "required"}, TOKENS)
    with pytest.raises(BadRequestError):
        to_call(asked, asked.items, LeaseSettings())


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: str


async def test_a_call_is_parsed_by_the_sdk_and_its_tools_are_told_again() -> None:
    pipeline = FakePipeline(pieces=[CallDelta(0, "Weather"), CallDelta(0, "", '{"city": "Oslo"}')], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        declared = [openai.pydantic_function_tool(Weather)["function"]]
        tool: Any = {"type": "function", **declared[0]}
        for streamed in (False, True):
            if streamed:
                async with client.responses.stream(model="demo", input="hi", tools=[tool]) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await client.responses.parse(model="demo", input="hi", tools=[tool])
            (call,) = answer.output
            assert json.loads(call.arguments) == call.parsed_arguments == {"city": "Oslo"}
            assert (answer.status, answer.output_text, answer.tool_choice) == ("completed", "", "auto")
            (told,) = answer.tools
            assert (told.name, told.strict, told.parameters["required"]) == ("Weather", True, ["city"])
        assert names(pipeline.requests[0].tool_use) == ["Weather"]


async def test_tools_that_an_item_adds_are_offered_also_in_the_next_response() -> None:
    """Codex sends its tools so, for models that it knows."""
    added: Any = {
        "type": "additional_tools",
        "role": "developer",
        "tools": [WEATHER, {"type": "namespace", "name": "mcp", "description": "", "tools": [TIME]}],
    }
    asks: Any = {"role": "user", "content": "hi"}
    pipeline = FakePipeline([CallDelta(0, "mcp__time", "{}")], reason="tool_calls")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input=[added, asks], tools=[TIME])  # type: ignore[list-item]
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, call.namespace, len(first.tools)) == ("time", "mcp", 1)
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        await client.responses.create(model="demo", input=[result], previous_response_id=first.id)
        kept = [item.type async for item in await client.responses.input_items.list(first.id)]
        assert sorted(kept) == ["additional_tools", "message"]
        for more, param in (
            ({**added, "tools": [{"type": "telepathy"}]}, "input[0].tools[0].type"),
            ({**added, "tools": [{**TIME, "name": f"t{number}"} for number in range(128)]}, "tools"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="demo", input=[more, added, asks])
            assert refused.value.param == param
    offered = [names(request.tool_use) for request in pipeline.requests]
    assert offered == [["time", "weather", "mcp__time"], ["weather", "mcp__time"]]
