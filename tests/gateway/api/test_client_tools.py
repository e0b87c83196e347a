"""Tools that the client runs, in their own forms, and tools of the server, which are left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.api.unknown_fields import HEADER
from gateway.config import ApiSettings
from gateway.types import CallDelta, ChatPrompt
from tests.fakes.gateway import Gateway, running
from tests.fakes.pipeline import FakePipeline

VERSION = {"anthropic-version": "2026-10-21"}
USER: dict[str, Any] = {"role": "user", "content": "Go."}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "plain", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "note", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x+/"}},
    {"type": "local_shell"},
    {"type": "shell", "environment": {"type": "local"}},
    {"type": "apply_patch"},
    {
        "type": "namespace",
        "name": "mcp__crm",
        "description": "Customers.",
        "tools": [{"type": "function", "name": "find", "parameters": None}, {"type": "custom", "name": "write"}],
    },
    {"type": "web_search", "external_web_access": False},
    {"type": "shell", "environment": {"type": "container_auto"}},
]
OFFERED = ["plain", "note", "local_shell", "shell", "apply_patch", "mcp__crm__find", "mcp__crm__write"]
EXEC = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
FORMS: list[tuple[str, Any, dict[str, Any], dict[str, Any], str]] = [
    (
        "plain",
        {},
        {"type": "function_call", "name": "plain", "arguments": "{}"},
        {"type": "function_call_output", "output": "ok"},
        "ok",
    ),
    (
        "note",
        {"input": "x\nxé"},
        {"type": "custom_tool_call", "name": "note", "input": "x\nxé"},
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "ok"}]},
        "ok",
    ),
    (
        "local_shell",
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {"type": "local_shell_call", "action": EXEC},
        {"type": "local_shell_call_output", "output": '{"exit": 0}'},
        '{"exit": 0}',
    ),
    (
        "shell",
        {"commands": ["ls", "pwd"]},
        {"type": "shell_call", "action": {"commands": ["ls", "pwd"]}},
        {"type": "shell_call_output", "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "timeout"}}]},
        '[{"stdout":"a","stderr":"","outcome":{"type":"timeout"}}]',
    ),
    (
        "apply_patch",
        {"type": "update_file", "path": "a.py", "diff": "-a\n+b"},
        {"type": "apply_patch_call", "operation": {"type": "update_file", "path": "a.py", "diff": "-a\n+b"}},
        {"type": "apply_patch_call_output", "status": "failed"},
        "failed",
    ),
    (
        "mcp__crm__find",
        {"who": 1},
        {"type": "function_call", "name": "find", "namespace": "mcp__crm", "arguments": '{"who": 1}'},
        {"type": "function_call_output", "output": "ok"},
        "ok",
    ),
    (
        "mcp__crm__write",
        {"input": "y"},
        {"type": "custom_tool_call", "name": "write", "namespace": "mcp__crm", "input": "y"},
        {"type": "custom_tool_call_output", "output": "ok"},
        "ok",
    ),
]


def calling(name: str, arguments: Any) -> FakePipeline:
    """A model that makes one call, in pieces that fall anywhere."""
    written = json.dumps(arguments)
    pieces = [CallDelta(0, "", written[at : at + 3]) for at in range(0, len(written), 3)]
    return FakePipeline(["Well.", CallDelta(0, name), *pieces], reason="tool_calls")


def prompt_of(pipeline: FakePipeline) -> ChatPrompt:
    prompt = pipeline.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def only_call(output: list[Any]) -> Any:
    (call,) = [item for item in output if item.type != "message"]
    return call


@pytest.mark.parametrize(("name", "arguments", "item", "output", "said"), FORMS, ids=[form[0] for form in FORMS])
async def test_a_call_comes_back_in_its_tools_own_form_and_is_accepted_again(
    name: str, arguments: Any, item: dict[str, Any], output: dict[str, Any], said: str
) -> None:
    pipeline = calling(name, arguments)
    async with running(pipeline) as gateway, gateway.sdk() as client:
        asked: Any = {"model": "demo", "input": [USER], "tools": TOOLS}
        raw = await client.responses.with_raw_response.create(**asked)
        assert raw.headers[HEADER] == "tools[].web_search, tools[].shell"
        answer = raw.parse()
        whole = only_call(answer.output).to_dict()
        assert {key: value for key, value in whole.items() if key not in ("id", "call_id", "status")} == item
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = only_call((await stream.get_final_response()).output).to_dict()
        added = [event.item for event in events if event.type == "response.output_item.added"]
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [one.type for one in added] == [one.type for one in done] == ["message", item["type"]]
        ids = ("id", "call_id")
        assert {key: streamed[key] for key in whole if key not in ids} == {
            key: whole[key] for key in whole if key not in ids
        }
        if item["type"] == "custom_tool_call":
            pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
            assert "".join(pieces) == item["input"]
        kinds = [event.type for event in events]
        assert ("response.function_call_arguments.done" in kinds) is (item["type"] == "function_call")

        offered = prompt_of(pipeline).tools
        assert [tool.name for tool in offered] == OFFERED
        history = [USER, whole, {**output, "call_id": whole["call_id"]}]
        await client.responses.create(**{**asked, "input": history})
        _, call, told = prompt_of(pipeline).messages
        assert call["tool_calls"][0]["function"] == {"name": name, "arguments": arguments}
        assert (told["role"], told["name"], told["content"]) == ("tool", name, said)

        kept = await client.responses.create(
            model="demo", previous_response_id=answer.id, input=[{**output, "call_id": whole["call_id"]}], tools=TOOLS
        )
        assert prompt_of(pipeline).messages[-2]["tool_calls"] == call["tool_calls"]
        items = (await client.responses.input_items.list(kept.id)).data
        assert item["type"] in {one.type for one in items}


async def test_a_call_that_was_cut_is_told_as_far_as_it_came() -> None:
    pipeline = FakePipeline([CallDelta(0, "shell"), CallDelta(0, "", '{"commands": ["ls", "pw')], reason="length")
    async with running(pipeline) as gateway, gateway.sdk() as client:
        answer = await client.responses.create(model="demo", input="x", tools=TOOLS)  # type: ignore[arg-type]
        call = only_call(answer.output)
        assert (answer.status, call.status, call.action.commands) == ("incomplete", "incomplete", ["ls", "pw"])


async def test_the_output_of_a_local_shell_may_name_its_call_by_the_id_of_the_item() -> None:
    pipeline = FakePipeline()
    async with running(pipeline) as gateway:
        call = {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_1", "action": EXEC}
        items = [USER, call, {"type": "local_shell_call_output", "id": "lsh_1", "output": "ok"}]
        status, answer, _ = await gateway.post("/v1/responses", {"model": "demo", "input": items})
        assert status == 200, answer
        assert prompt_of(pipeline).messages[-1]["tool_call_id"] == "call_1"


CHOICES: list[tuple[Any, list[str]]] = [
    ({"type": "apply_patch"}, ["apply_patch"]),
    ({"type": "custom", "name": "note"}, ["note"]),
    ({"type": "function", "name": "find", "namespace": "mcp__crm"}, ["mcp__crm__find"]),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "shell"}, {"type": "local_shell"}]}, OFFERED[3:1:-1]),
]


@pytest.mark.parametrize(("choice", "names"), CHOICES)
async def test_a_tool_of_any_form_can_be_chosen_and_one_by_name_is_called_once(choice: Any, names: list[str]) -> None:
    pipeline = FakePipeline()
    async with running(pipeline) as gateway:
        asked = {"model": "demo", "input": "x", "tools": TOOLS, "tool_choice": choice}
        status, answer, _ = await gateway.post("/v1/responses", asked)
        assert status == 200, answer
    use = pipeline.requests[-1].tool_use
    assert use is not None
    assert ([tool.name for tool in use.callable], use.parallel) == (names, choice["type"] == "allowed_tools")


FUNCTION = {"type": "function", "function": {"name": "f"}}
SERVER: list[tuple[str, dict[str, Any], dict[str, str], Any]] = [
    ("/v1/chat/completions", {"messages": [USER], "tools": [FUNCTION, {"type": "web_search"}]}, {}, None),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, {}, {"type": "web_search"}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "mcp", "server_label": "a"}]}, {}, "required"),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 9, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        VERSION,
        {"type": "tool", "name": "web_search"},
    ),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 9, "tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]},
        VERSION,
        {"type": "any"},
    ),
    (
        "/v1beta/models/demo:generateContent",
        {"contents": [{"parts": [{"text": "x"}]}], "tools": [{"googleSearch": {}}, {"urlContext": {}}]},
        {},
        None,
    ),
]


@pytest.mark.parametrize(("path", "body", "headers", "forced"), SERVER)
async def test_tools_that_upstream_runs_are_left_out_and_named(
    path: str, body: dict[str, Any], headers: dict[str, str], forced: Any
) -> None:
    pipeline = FakePipeline()
    async with running(pipeline) as gateway:
        status, answer, told = await gateway.post(path, {"model": "demo", **body}, headers=headers)
        assert status == 200, answer
        assert all(name.startswith("tools[].") for name in told[HEADER].split(", "))
        assert len(prompt_of(pipeline).tools) == (1 if "chat" in path else 0)
        if forced is not None:
            asked = {"model": "demo", **body, "tool_choice": forced}
            assert (await gateway.post(path, asked, headers=headers))[0] == 400
    async with running(api=ApiSettings(unknown_fields="refuse")) as gateway:
        status, answer, _ = await gateway.post(path, {"model": "demo", **body}, headers=headers)
        assert status == 400, answer


async def asked_of_claude(gateway: Gateway, **fields: Any) -> tuple[int, Any, Any]:
    body = {"model": "demo", "messages": [USER], "max_tokens": 9, **fields}
    return await gateway.post("/v1/messages", body, headers=VERSION)


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "/a"}),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/a", "new_path": "/b"}),
    ],
)
async def test_tools_with_published_arguments_are_offered_as_functions(kind: str, name: str, arguments: Any) -> None:
    pipeline = calling(name, arguments)
    async with running(pipeline) as gateway:
        tool = {"type": kind, "name": name, "cache_control": {"type": "ephemeral"}}
        if name.startswith("str_"):
            tool["max_characters"] = 1000
        status, answer, told = await asked_of_claude(gateway, tools=[tool])
        assert (status, told.get(HEADER)) == (200, None), answer
        (offered,) = prompt_of(pipeline).tools
        assert (offered.name, set(arguments) <= set((offered.parameters or {})["properties"])) == (name, True)
        assert offered.description
        block = answer["content"][-1]
        assert (block["type"], block["name"], block["input"]) == ("tool_use", name, arguments)
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}]}
        turns = [USER, {"role": "assistant", "content": answer["content"]}, result]
        assert (await asked_of_claude(gateway, tools=[tool], messages=turns))[0] == 200
        status, answer, _ = await asked_of_claude(gateway, tools=[{"type": "telepathy_20260101", "name": "x"}])
        assert (status, answer["error"]["message"].partition(":")[0]) == (400, "tools.0.type")


async def test_tools_that_would_be_loaded_later_are_offered_at_once() -> None:
    pipeline = FakePipeline()
    later = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True, "input_examples": [{}]}
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    async with running(pipeline) as gateway:
        status, answer, told = await asked_of_claude(gateway, tools=[search, later])
        assert status == 200, answer
        assert set(told[HEADER].split(", ")) == {
            "tools[].tool_search_tool_regex_20251119",
            "tools[].defer_loading",
            "tools[].input_examples",
        }
        assert [tool.name for tool in prompt_of(pipeline).tools] == ["f"]
