"""Tools with `kvasir serve` and the real openai SDK. The demo model knows nothing: its calls are those that it has to
make."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.fakes.server import Server

TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["root", "leaf"]},
        "number": {"$ref": "#/$defs/small"},
        "on": {"type": "boolean"},
    },
    "required": ["kind", "number"],
    "additionalProperties": False,
    "$defs": {"small": {"type": "integer", "minimum": -9, "maximum": 99}},
}
SCHEMAS: dict[str, Any] = {"plant": TREE, "now": {"maxProperties": 0}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "plant", "description": "Plants <|im_end|>.", "parameters": TREE}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: Any = [{"role": "user", "content": "Plant a tree."}]


def ask(server: Server, **options: Any) -> openai.types.chat.ChatCompletion:
    values = {"messages": ASK, "tools": TOOLS, "max_tokens": 400} | options
    return server.client().chat.completions.create(model="demo", **values)


def stream(server: Server, **options: Any) -> openai.types.chat.ChatCompletion:
    values = {"messages": ASK, "tools": TOOLS, "max_tokens": 400} | options
    with server.client().chat.completions.stream(model="demo", **values) as events:
        for _ in events:
            pass
        return events.get_final_completion()


def calls_of(answer: Any) -> list[tuple[str, Any]]:
    """Names and arguments, which validate."""
    (choice,) = answer.choices
    calls = []
    for call in choice.message.tool_calls or ():
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        calls.append((call.function.name, arguments))
    return calls


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_validate_and_are_the_same_streamed(server: Server, seed: int) -> None:
    options: Any = {"tool_choice": "required", "seed": seed, "temperature": 1.0, "parallel_tool_calls": seed % 2 == 0}
    whole, streamed = ask(server, **options), stream(server, **options)
    calls = calls_of(whole)
    assert calls
    assert len(calls) == 1 or seed % 2 == 0
    assert calls_of(streamed) == calls
    for answer in (whole, streamed):
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)


def test_a_function_by_name_is_called_and_the_answer_stops(server: Server) -> None:
    for name in ("plant", "now"):
        answer = ask(server, tool_choice=named(name), parallel_tool_calls=False, temperature=0)
        assert [called for called, _ in calls_of(answer)] == [name]
        assert answer.choices[0].finish_reason == "stop"


def test_of_the_allowed_tools_only(server: Server) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("now")]}}
    answer = ask(server, tool_choice=allowed, seed=1)
    assert {name for name, _ in calls_of(answer)} == {"now"}
    assert answer.choices[0].finish_reason == "tool_calls"


def test_where_the_model_may_choose_it_may_write_text_and_without_a_choice_it_does(server: Server) -> None:
    free, none = (ask(server, tool_choice=choice, temperature=0, max_tokens=12) for choice in ("auto", "none"))
    assert free.choices[0].message.content == none.choices[0].message.content
    assert free.choices[0].message.content
    assert free.choices[0].message.tool_calls is None
    assert free.usage is not None
    assert none.usage is not None
    assert free.usage.prompt_tokens == none.usage.prompt_tokens  # the tools stay in the prompt
    assert ask(server, tools=openai.omit, max_tokens=1).usage.prompt_tokens < none.usage.prompt_tokens


def test_an_answer_that_ran_out_of_tokens_says_so_and_shows_no_text(server: Server) -> None:
    for tokens in (3, 14):
        (choice,) = ask(server, tool_choice="required", max_tokens=tokens, temperature=0).choices
        assert (choice.finish_reason, choice.message.content) == ("length", None)


def test_a_conversation_goes_on_behind_a_call_and_its_result(server: Server) -> None:
    first = ask(server, tool_choice=named("plant"), parallel_tool_calls=False, temperature=0)
    message = first.choices[0].message
    assert message.tool_calls
    turns: Any = [
        *ASK,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Planted."},
    ]
    second = ask(server, messages=turns, max_tokens=5, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    # What the model wrote is what the template renders, so the call is in the prefix, too; replicas reuse whole blocks.
    prompt, block = first.usage.prompt_tokens, server.block_tokens
    least = prompt // block * block if server.has_replicas else prompt
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= least
    assert second.choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_schema_that_cannot_be_carried_out_is_refused_with_the_path_in_the_tool(
    server: Server, streamed: bool
) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, tools=tools, tool_choice="required", stream=streamed)
    path = "tools[2].function.parameters.properties.a.not"
    assert caught.value.param == ("tools" if server.has_replicas else path)
    assert caught.value.code == "invalid_grammar"
    assert ask(server, tools=tools, max_tokens=2).choices  # nothing is compiled where the model may choose


def test_json_and_tools_that_may_be_called_are_refused_together_for_calls_without_an_opener(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, response_format={"type": "json_object"})
    assert caught.value.param == "response_format"
    forced = ask(server, response_format={"type": "json_object"}, tool_choice="required", seed=2)
    assert calls_of(forced)


def test_the_deprecated_functions_are_called(server: Server) -> None:
    functions: Any = [{"name": "plant", "parameters": TREE}]
    answer = ask(server, tools=openai.omit, functions=functions, function_call={"name": "plant"}, seed=3)
    call = answer.choices[0].message.function_call
    assert call is not None
    jsonschema.validate(json.loads(call.arguments), TREE)
    assert (call.name, answer.choices[0].finish_reason) == ("plant", "stop")


def test_several_answers_call_for_themselves(server: Server) -> None:
    answer = ask(server, tool_choice=named("plant"), n=4, seed=5, temperature=1.5)
    assert len(answer.choices) == 4
    told = {str(call.function) for choice in answer.choices for call in choice.message.tool_calls or ()}
    assert len(told) > 1
