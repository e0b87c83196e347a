from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.api.call import Call
from gateway.api.gemini.request import model_name, parse_count, parse_generate, to_call
from gateway.errors import BadRequestError, NotFoundError, UnsupportedError
from gateway.types import ChatPrompt, Tool, ToolUse

HI = [{"role": "user", "parts": [{"text": "hi"}]}]
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}, "required": ["city"]}
TOOLS = [{"functionDeclarations": [{"name": "f", "description": "of f", "parameters": SCHEMA}, {"name": "g"}]}]
F = Tool(
    "f",
    "of f",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False},
    path="tools[0].functionDeclarations[0].parameters",
)
G = Tool("g", path="tools[0].functionDeclarations[1].parameters")


def generate(config: Any = None, **fields: Any) -> Call:
    body = {"contents": HI, **fields} | ({} if config is None else {"generationConfig": config})
    return to_call("demo", parse_generate(body), max_answers=16)


def count(body: dict[str, Any]) -> Call:
    return to_call("demo", parse_count(body), max_answers=16)


def refusal(config: Any = None, **fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as refused:
        generate(config, **fields)
    return refused.value


def test_a_plain_request_has_the_defaults_of_the_api() -> None:
    call = generate()
    assert call.prompts == (ChatPrompt(MESSAGES),)
    assert (call.model, call.prompt_param, call.stream, call.stop) == ("demo", "contents", False, ())
    assert (call.constraint, call.tool_use, call.choices.n) == (None, None, 1)
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1.0, 1.0, 0)
    assert (sampling.seed, sampling.logprobs) == (None, None)


def test_what_has_no_effect_changes_nothing() -> None:
    plain = generate()
    assert plain == generate(
        {"responseModalities": ["TEXT"]},
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        model="models/demo",
    )


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"temperature": 2.5}, "generationConfig.temperature"),
        ({"topP": "NaN"}, "generationConfig.topP"),
        ({"maxOutputTokens": 0}, "generationConfig.maxOutputTokens"),
        ({"stopSequences": ["a"] * 6}, "generationConfig.stopSequences"),
        ({"stopSequences": ["a", ""]}, "generationConfig.stopSequences[1]"),
        ({"candidateCount": 17}, "generationConfig.candidateCount"),
        ({"logprobs": 3}, "generationConfig.logprobs"),
        ({"responseMimeType": "image/png"}, "generationConfig.responseMimeType"),
        ({"responseSchema": SCHEMA}, "generationConfig.responseMimeType"),
        (
            {"responseMimeType": "application/json", "responseSchema": SCHEMA, "responseJsonSchema": {}},
            "generationConfig.responseJsonSchema",
        ),
        ({"responseMimeType": "text/x.enum", "responseSchema": SCHEMA}, "generationConfig.responseSchema"),
        ({"responseMimeType": "application/json", "responseJsonSchema": 3}, "generationConfig.responseJsonSchema"),
        ({"thinkingConfig": {"budget": 3}}, "generationConfig.thinkingConfig.budget"),
        ([], "generationConfig"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(config: Any, path: str) -> None:
    assert refusal(config).param == path


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"generationConfig": {"responseModalities": ["TEXT", "AUDIO"]}}, "generationConfig.responseModalities"),
        ({"generationConfig": {"speechConfig": {}}}, "generationConfig.speechConfig"),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        ({"tools": [{"code_execution": {}}]}, "tools[0].codeExecution"),
    ],
)
def test_what_is_not_carried_out_is_refused_and_never_ignored(fields: Any, path: str) -> None:
    with pytest.raises(UnsupportedError) as refused:
        generate(**fields)
    assert refused.value.param == path


def test_contents_are_needed() -> None:
    assert refusal(contents=[]).param == "contents"
    assert refusal(contents=None).param == "contents"


def test_schemas_become_what_the_text_has_to_be() -> None:
    call = generate({"responseMimeType": "application/json", "responseSchema": SCHEMA})
    assert call.constraint is not None
    assert call.constraint.grammar.kind == "json_schema"
    assert orjson.loads(call.constraint.grammar.text) == F.parameters
    assert call.constraint.param == "generationConfig.responseSchema"
    call = generate({"responseMimeType": "application/json", "responseJsonSchema": {"type": "integer"}})
    assert call.constraint is not None
    assert orjson.loads(call.constraint.grammar.text) == {"type": "integer"}
    call = generate({"responseMimeType": "application/json"})
    assert call.constraint is not None
    assert orjson.loads(call.constraint.grammar.text) == {"anyOf": [{"type": "object"}, {"type": "array"}]}
    assert generate({"responseMimeType": "text/plain"}).constraint is None


def test_an_enum_is_one_of_its_values_as_plain_text() -> None:
    kinds = {"type": "STRING", "enum": ["a.b", "c"]}
    call = generate({"responseMimeType": "text/x.enum", "responseSchema": kinds})
    assert call.constraint is not None
    assert (call.constraint.grammar.kind, call.constraint.grammar.text) == ("regex", r"a\.b|c")


def test_functions_become_tools() -> None:
    call = generate(tools=TOOLS)
    assert call.prompts == (ChatPrompt(MESSAGES, tools=(F, G)),)
    assert call.tool_use == ToolUse((F, G))
    plain: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    path = "tools[0].functionDeclarations[0].parametersJsonSchema"
    for given, meant in ((plain, False), ({**plain, "additionalProperties": True}, True)):
        call = generate(tools={"function_declarations": {"name": "h", "parameters_json_schema": given}})
        assert call.tool_use == ToolUse((Tool("h", None, {**plain, "additionalProperties": meant}, path=path),))


def calling(mode: str | None = None, *names: str) -> dict[str, Any]:
    told: dict[str, Any] = {"mode": mode} if mode else {}
    return {"functionCallingConfig": told | ({"allowedFunctionNames": list(names)} if names else {})}


@pytest.mark.parametrize(
    ("config", "use"),
    [
        (calling(), ToolUse((F, G))),
        (calling("AUTO"), ToolUse((F, G))),
        (calling("MODE_UNSPECIFIED"), ToolUse((F, G))),
        (calling("ANY"), ToolUse((F, G), "required")),
        (calling("any", "g"), ToolUse((G,), "required", parallel=True)),  # one name, and yet several calls
        (calling("NONE"), None),
    ],
)
def test_the_mode_says_what_may_be_called(config: Any, use: ToolUse | None) -> None:
    call = generate(tools=TOOLS, toolConfig=config)
    assert call.tool_use == use
    assert call.prompts == (ChatPrompt(MESSAGES, tools=(F, G)),)


def test_validated_calls_are_held_to_their_schemas() -> None:
    call = generate(tools=TOOLS, toolConfig=calling("VALIDATED", "f"))
    assert call.tool_use is not None
    assert (call.tool_use.mode, [(tool.name, tool.strict) for tool in call.tool_use.callable]) == (
        "auto",
        [("f", True)],
    )


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"toolConfig": calling("ANY")}, "toolConfig.functionCallingConfig.mode"),
        (
            {"tools": TOOLS, "toolConfig": calling("AUTO", "f")},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        (
            {"tools": TOOLS, "toolConfig": calling("ANY", "f", "h")},
            "toolConfig.functionCallingConfig.allowedFunctionNames[1]",
        ),
        ({"tools": TOOLS + TOOLS}, "tools[1].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "THING"}}]}]},
            "tools[0].functionDeclarations[0].parameters.type",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA, "parametersJsonSchema": {}}]}]},
            "tools[0].functionDeclarations[0].parametersJsonSchema",
        ),
        (
            {"tools": TOOLS, "generationConfig": {"responseMimeType": "application/json"}},
            "generationConfig.responseMimeType",
        ),
    ],
)
def test_functions_that_make_no_sense_are_refused(fields: Any, path: str) -> None:
    assert refusal(**fields).param == path


def test_counting_takes_contents_or_a_whole_request() -> None:
    assert count({"contents": HI}).prompts == (ChatPrompt(MESSAGES),)
    whole = {"model": "models/demo", "contents": HI, "systemInstruction": {"parts": [{"text": "s"}]}}
    (prompt,) = count({"generateContentRequest": whole}).prompts
    assert prompt == ChatPrompt([{"role": "system", "content": "s"}, *MESSAGES])
    for body in ({}, {"contents": HI, "generateContentRequest": whole}):
        with pytest.raises(BadRequestError) as refused:
            count(body)
        assert refused.value.param == "contents"


def test_a_wrong_field_of_a_whole_request_to_count_has_the_whole_path() -> None:
    whole = {"contents": HI, "generationConfig": {"topP": 2}}
    with pytest.raises(BadRequestError) as refused:
        count({"generateContentRequest": whole})
    assert refused.value.param == "generateContentRequest.generationConfig.topP"


def test_names_of_models() -> None:
    assert model_name("models/org/demo") == model_name("org/demo") == "org/demo"
    with pytest.raises(NotFoundError):
        model_name("tunedModels/mine")
