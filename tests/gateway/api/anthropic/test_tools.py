from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gateway.api.anthropic.parameters import MESSAGES
from gateway.api.anthropic.request import parse_count, parse_message
from gateway.api.anthropic.wire import error_json
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt, Tool, ToolUse

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
CLOCK: dict[str, Any] = {"type": "custom", "name": "clock", "input_schema": {"type": "object"}}
TOOLS = (
    Tool("weather", "Tells it.", SCHEMA, path="tools[0].input_schema"),
    Tool("clock", None, {"type": "object"}, path="tools[1].input_schema"),
)


def message(**fields: Any) -> Any:
    body = {"model": "demo", "max_tokens": 7, "messages": [USER], **fields}
    return parse_message(body, "2026-10-21", AnthropicSettings(), LeaseSettings()).call


def refusal(**fields: Any) -> str:
    with pytest.raises(BadRequestError) as refused:
        message(**fields)
    return str(error_json(refused.value, "")["error"]["message"])


def test_tools_are_part_of_the_prompt_and_may_be_called() -> None:
    call = message(tools=[WEATHER, CLOCK])
    assert call.prompts == (ChatPrompt([USER], tools=TOOLS),)
    assert call.tool_use == ToolUse(TOOLS)
    body = {"model": "demo", "messages": [USER], "tools": [WEATHER, CLOCK]}
    counted = parse_count(body, AnthropicSettings(), LeaseSettings())
    assert (counted.prompts, counted.tool_use) == (call.prompts, call.tool_use)


@pytest.mark.parametrize(
    ("chosen", "use"),
    [
        ({"type": "auto"}, ToolUse(TOOLS)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse(TOOLS, parallel=False)),
        ({"type": "any"}, ToolUse(TOOLS, "required")),
        ({"type": "tool", "name": "clock"}, ToolUse(TOOLS[1:], "required", parallel=False)),
        ({"type": "none"}, None),
    ],
)
def test_a_choice_says_what_may_be_called(chosen: Any, use: ToolUse | None) -> None:
    call = message(tools=[WEATHER, CLOCK], tool_choice=chosen)
    assert call.tool_use == use
    assert call.prompts[0].tools == TOOLS, "the prompt is the same whatever is chosen"


def test_a_strict_tool_is_in_the_subset_with_required_properties_first() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    call = message(tools=[{**WEATHER, "strict": True, "input_schema": schema}])
    (tool,) = call.prompts[0].tools
    assert tool.strict
    assert list(tool.parameters["properties"]) == ["b", "a"]
    assert refusal(tools=[{**WEATHER, "strict": True}]).startswith(
        "tools.0.input_schema.additionalProperties: for 'object' type"
    )


STRICT = {**CLOCK, "strict": True, "input_schema": {"type": "object", "additionalProperties": False}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tools": [{}]}, "tools.0.name: Field required"),
        ({"tools": [{"name": "a b", "input_schema": SCHEMA}]}, "tools.0.name: 1 to 128 letters"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{"name": "a", "input_schema": {}}]}, "tools.0.input_schema.type: the root has to be"),
        ({"tools": [WEATHER, WEATHER]}, "tools.1.name: there is another tool named 'weather'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type: Tools of the type 'web"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0.defer_loading: Tools cannot be loaded later: all"),
        ({"tools": [{**WEATHER, "input_examples": [{}]}]}, "tools.0.input_examples: Chat templates take no examples"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code"]}]}, "tools.0.allowed_callers.0: 'code' is not one of"),
        ({"tools": [{**WEATHER, "parameters": {}}]}, "tools.0.parameters: Extra inputs are not permitted"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: it may only be specified while providing `tools`"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name: Field required"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: there is no tool named"),
        ({"tools": [CLOCK], "tool_choice": {"type": "required"}}, "tool_choice.type: 'required' is not one of"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "none", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use: Extra inputs are not permitted",
        ),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "any"}, "max_tokens": 0},
            "tool_choice: it is not possible together with `max_tokens` 0",
        ),
    ],
)  # fmt: skip
def test_tools_that_are_wrong_are_told_behind_their_path(fields: dict[str, Any], told: str) -> None:
    assert refusal(**fields).startswith(told)


def test_tools_that_are_taken_are_in_the_schema() -> None:
    tools = [
        {**WEATHER, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
        CLOCK,
        STRICT | {"name": "s"},
    ]
    message(tools=tools)
    jsonschema.Draft202012Validator(MESSAGES["tools"].check.schema).validate(tools)
