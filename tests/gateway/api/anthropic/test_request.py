from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from gateway.api.anthropic.parameters import MESSAGES
from gateway.api.anthropic.request import parse_count, parse_message
from gateway.api.anthropic.wire import Version, error_json
from gateway.config import AnthropicSettings, LeaseSettings
from gateway.errors import BadRequestError
from gateway.types import ChatPrompt
from tests.fakes.schemas import closed

USER = {"role": "user", "content": "hi"}


def message(version: Version = "2026-10-21", **fields: Any) -> Any:
    body = {"model": "demo", "max_tokens": 7, "messages": [USER], **fields}
    return parse_message(body, version, AnthropicSettings(), LeaseSettings()).call


def rendered(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """What the template is given."""
    prompt = message(messages=list(messages), **fields).prompts[0]
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def refusal(**fields: Any) -> str:
    """As the client reads it."""
    version = fields.pop("version", "2026-10-21")
    with pytest.raises(BadRequestError) as refused:
        message(version, **fields)
    told = error_json(refused.value, "req_1")
    assert (told["error"]["type"], told["request_id"]) == ("invalid_request_error", "req_1")
    return str(told["error"]["message"])


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


CALL = block("tool_use", id="toolu_1", name="weather", input={"city": "Oslo"})
RESULT = block("tool_result", tool_use_id="toolu_1", content="rain")
RESULTS = {"role": "user", "content": [RESULT]}


def test_a_plain_message_has_the_defaults_of_the_api() -> None:
    call = message()
    assert call.prompts == (ChatPrompt([USER]),)
    assert (call.prompt_param, call.stream, call.stop, call.prewarm, call.fit) == ("messages", False, (), False, True)
    assert (call.sampling.max_tokens, call.sampling.temperature, call.sampling.top_p) == (7, 1.0, 1.0)
    assert call.constraint is None


def test_sampling_parameters_are_of_the_older_version_alone() -> None:
    call = message("2023-06-01", temperature=0, top_p=0.5, top_k=4)
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) == (0.0, 0.5, 4)
    for name in ("temperature", "top_p", "top_k"):
        assert refusal(**{name: 1}).startswith(f"{name}: Extra inputs are not permitted")
        assert refusal(**{name: None}).startswith(f"{name}: Extra inputs are not permitted")
    assert refusal(version="2023-06-01", temperature=1.5).startswith("temperature: decimal above maximum value.")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": None}, "messages: Field required"),
        ({"model": None}, "model: Field required"),
        ({"max_tokens": -1}, "max_tokens: integer below minimum value. Expected a value >= 0, but got -1 instead"),
        ({"max_tokens": "7"}, "max_tokens: expected an integer, but got a string instead"),
        ({"n": 2}, "n: Extra inputs are not permitted"),
        ({"messages": []}, "messages: empty array. Expected an array with minimum length 1, but got an empty array"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role: 'tool' is not one of 'user', 'assistant'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content: user messages must have non-empty"),
        ({"system": " "}, "system: text content blocks must contain non-whitespace text"),
        ({"messages": [{"role": "user", "other": 1}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: user messages must have non-empty"),
        ({"messages": [{**USER, "name": "x"}]}, "messages.0.name: Extra inputs are not permitted"),
        ({"stop_sequences": ["a", " "]}, "stop_sequences.1: each stop sequence must contain non-whitespace"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences: array too long."),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens: integer below minimum"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000},
            "thinking.budget_tokens: `max_tokens` must be greater",
        ),
        ({"thinking": {"type": "always"}}, "thinking.type: 'always' is not one of"),
        ({"max_tokens": 0, "thinking": {"type": "adaptive"}}, "thinking: it is not possible together"),
        ({"inference_geo": "eu"}, "inference_geo: Where the models run is up to the operator."),
        ({"container": "c"}, "container: There are no containers."),
        ({"max_tokens": 0, "stream": True}, "stream: it is not possible together with `max_tokens` 0"),
        (
            {"max_tokens": 0, "output_config": {"format": {"type": "json_schema", "schema": {"type": "string"}}}},
            "output_config.format: it is not possible together",
        ),
    ],
)
def test_what_is_wrong_is_told_behind_its_path(fields: dict[str, Any], told: str) -> None:
    assert refusal(**fields).startswith(told)


@pytest.mark.parametrize(
    ("item", "told"),
    [
        (block("text", text=""), "messages.0.content.0: text content blocks must be non-empty"),
        (block("text", text=" \n"), "messages.0.content.0: text content blocks must contain non-whitespace text"),
        (block("text"), "messages.0.content.0.text: Field required"),
        ({"text": "x"}, "messages.0.content.0.type: Field required"),
        (block("text", text="x", font="y"), "messages.0.content.0.font: Extra inputs are not permitted"),
        (block("image", source={}), "messages.0.content.0.source.type: Field required"),
        (block("search_result"), "messages.0.content.0: Search results as blocks are not supported"),
        (block("web_search_tool_result"), "messages.0.content.0: This server has no tools of its own."),
        (block("video"), "messages.0.content.0.type: 'video' is not one of 'text', 'document', 'image', 'tool_result'"),
        (block("thinking", thinking="hm", signature="s"), "messages.0.content.0.type: 'thinking' is not one of"),
        (block("document", source=block("url", url="a.pdf")), "messages.0.content.0.source.url: a URL with http"),
        (
            block("document", source=block("base64", media_type="text/csv", data="AA==")),
            "messages.0.content.0.source.media_type: 'text/csv' is not one of 'application/pdf'",
        ),
        (
            block("document", source=block("text", media_type="text/plain", data="x"), citations={"enabled": True}),
            "messages.0.content.0.citations: Citations are not supported.",
        ),
    ],
)
def test_a_block_that_is_wrong_is_told_by_its_path(item: Any, told: str) -> None:
    assert refusal(messages=[{"role": "user", "content": [item]}]).startswith(told)


def test_citations_of_texts_change_nothing() -> None:
    cited = {"role": "user", "content": [block("text", text="hi", citations=[{"type": "char_location"}])]}
    body: dict[str, Any] = {"model": "demo", "messages": [cited], "system": [block("text", text="x", citations=[{}])]}
    prompts = message(**body).prompts
    assert prompts == (ChatPrompt([{"role": "system", "content": "x"}, USER]),)
    assert parse_count(body, AnthropicSettings(), LeaseSettings()).prompts == prompts


def test_the_system_prompt_is_the_first_message() -> None:
    assert rendered(USER, system="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]
    blocks = [block("text", text="Be "), block("text", text="brief.")]
    assert rendered(USER, system=blocks)[0] == {"role": "system", "content": "Be brief."}
    assert rendered(USER, system="") == [USER]
    assert refusal(system=[block("text", text="")]) == "system.0: text content blocks must be non-empty"


def test_turns_of_one_role_are_one_message() -> None:
    answer = {"role": "assistant", "content": "A"}
    said = rendered(USER, {"role": "user", "content": [block("text", text="a"), block("text", text="b")]}, answer, USER)
    assert said == [{"role": "user", "content": "hi\n\nab"}, answer, USER]


@pytest.mark.parametrize("blanks", [" ", "\n\n", "\u2028", " \t "])
def test_a_turn_of_blanks_is_refused_like_a_block_of_blanks(blanks: str) -> None:
    told = "text content blocks must contain non-whitespace text"
    assert refusal(messages=[{"role": "user", "content": blanks}]) == f"messages.0.content: {told}"
    assert refusal(messages=[USER, {"role": "user", "content": blanks}]) == f"messages.1.content: {told}"


def test_instructions_in_the_middle_follow_a_user_turn() -> None:
    system, answer = {"role": "system", "content": "Shout."}, {"role": "assistant", "content": "A"}
    assert rendered(USER, system) == [USER, system]
    assert rendered(USER, system, answer, USER) == [USER, system, answer, USER]
    assert refusal(messages=[system, USER]).startswith("messages.0: the first message cannot be a system message")
    assert refusal(messages=[USER, answer, system]) == "messages.2: a system message must follow a user turn"
    assert refusal(messages=[USER, system, USER]).startswith("messages.1: a system message must precede")


def test_an_answer_may_go_on_with_the_last_message() -> None:
    call = message(messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert call.prompts[0].continues
    assert not message().prompts[0].continues
    for content, told in (
        ("It is ", "messages.1.content: final assistant content cannot end with trailing whitespace"),
        ([CALL], "messages.1.content.0: an answer goes on with text"),
        (
            [block("text", text="a"), block("thinking", thinking="b")],
            "messages.1.content.1: an answer goes on with text",
        ),
    ):
        assert refusal(messages=[USER, {"role": "assistant", "content": content}]).startswith(told)
    asked = {"format": {"type": "json_schema", "schema": {"type": "string"}}}
    told = refusal(messages=[USER, {"role": "assistant", "content": "a"}], output_config=asked)
    assert told.startswith("messages: an answer that goes on")


def test_tool_calls_and_their_results_are_as_templates_have_them() -> None:
    said = rendered(
        USER,
        {"role": "assistant", "content": [block("text", text="Let me see."), CALL]},
        {"role": "user", "content": [RESULT, block("text", text="And now?")]},
    )
    assert said[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "toolu_1", "name": "weather"},
        {"role": "user", "content": "And now?"},
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ""),
        ({"content": "rain"}, "rain"),
        ({"content": "rain", "is_error": False}, "rain"),
        ({"content": "no such city", "is_error": True}, "Error: no such city"),
        ({"is_error": True}, "Error"),
        ({"content": [block("text", text="a"), block("text", text="b")]}, "ab"),
        ({"content": [block("document", source=block("text", media_type="text/plain", data="d"), title="T")]}, "T\nd"),
    ],
)
def test_a_result_is_text_and_an_error_says_so(fields: dict[str, Any], said: str) -> None:
    result = block("tool_result", tool_use_id="toolu_1", **fields)
    messages = rendered(USER, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})
    assert messages[-1]["content"] == said


@pytest.mark.parametrize(
    ("answer", "reply", "told"),
    [
        ([CALL], "never mind", "messages.2: `tool_use` ids were found without `tool_result` blocks immediately after"),
        ([block("text", text="x")], [RESULT], "messages.2.content.0: unexpected `tool_use_id` found"),
        ([CALL], [block("text", text="x"), RESULT], "messages.2.content.1: tool_result blocks must come before"),
        ([CALL, CALL], [RESULT], "messages.1.content.1.id: `tool_use` ids must be unique"),
        (
            [CALL],
            [{**RESULT, "content": [block("image", source=block("base64", media_type="image/png", data="?"))]}],
            "messages.2.content.0.content.0.source.data: it is no base64",
        ),
        (
            [CALL],
            [{**RESULT, "content": [block("text", text="x", cache_control=block("ephemeral"))]}],
            "messages.2.content.0.content.0.cache_control: it belongs to the block around this one",
        ),
        ([{**CALL, "input": "{}"}], [RESULT], "messages.1.content.0.input: expected an object"),
    ],
)
def test_calls_and_results_that_do_not_fit_are_refused(answer: Any, reply: Any, told: str) -> None:
    messages = [USER, {"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
    assert refusal(messages=messages).startswith(told)


def test_thoughts_reach_the_template_and_redacted_ones_are_left_out() -> None:
    thoughts = [block("thinking", thinking="Hm.", signature="s"), block("redacted_thinking", data="x")]
    said = rendered(USER, {"role": "assistant", "content": [*thoughts, block("text", text="Yes.")]}, USER)
    assert said[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_a_document_of_plain_text_is_text() -> None:
    source = block("text", media_type="text/plain", data="Once upon a time.")
    parts = block("content", content=[block("text", text="Once "), block("text", text="more.")])
    content = [block("document", source=source, title="Tale", context="Old."), block("document", source=parts)]
    assert rendered({"role": "user", "content": content})[0]["content"] == "Tale\nOld.\nOnce upon a time.Once more."


def test_counting_takes_no_limit_and_has_the_same_prompt() -> None:
    body = {"model": "demo", "messages": [USER], "system": "Be brief."}
    assert parse_count(body, AnthropicSettings(), LeaseSettings()).prompts == message(system="Be brief.").prompts
    with pytest.raises(BadRequestError, match="max_tokens"):
        parse_count({**body, "max_tokens": 1}, AnthropicSettings(), LeaseSettings())


TAKEN: list[Any] = [
    [USER],
    [{"role": "user", "content": [block("text", text="x", cache_control=block("ephemeral", ttl="1h"))]}],
    [USER, {"role": "assistant", "content": [block("thinking", thinking="x", signature="y"), CALL]}, RESULTS],
    [USER, {"role": "assistant", "content": [block("redacted_thinking", data="x")]}, USER],
    [USER, {"role": "system", "content": [block("text", text="x", citations=None)]}],
    [
        {
            "role": "user",
            "content": [block("document", source=block("text", media_type="text/plain", data="d"), title="T")],
        }
    ],
]


@pytest.mark.parametrize("messages", TAKEN, ids=str)
def test_messages_that_are_taken_are_in_the_schema(messages: Any) -> None:
    message(messages=messages)
    jsonschema.Draft202012Validator(MESSAGES["messages"].check.schema).validate(messages)


def schema_refusal(schema: Any) -> str:
    return refusal(output_config={"format": {"type": "json_schema", "schema": schema}})


def test_a_schema_constrains_the_answer_with_required_properties_first() -> None:
    schema = closed(a={"type": "string"}, b={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "integer"}}}
    call = message(output_config={"format": {"type": "json_schema", "schema": schema | {"required": ["b"]}}})
    assert call.constraint.param == "output_config.format.schema"
    assert call.constraint.grammar.text.index('"b"') < call.constraint.grammar.text.index('"a"')


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 3}, "minimum: 'minimum' is not supported in schemas"),
        ({"type": "object", "properties": {}}, "additionalProperties: for 'object' type, 'additionalProperties' must"),
        (closed(a={"type": "array", "minItems": 2}), "properties.a.minItems: only 0 and 1 are supported"),
        (closed(a={"enum": [{}]}), "properties.a.enum: an array of strings"),
        (closed(a={"$ref": "#"}), "properties.a.$ref: recursive schemas are not supported"),
        (closed(a={"$ref": "https://example.org"}), "properties.a.$ref: only references inside"),
        (closed(a={"$ref": "#/$defs/x"}), "properties.a.$ref: there is nothing at '#/$defs/x'"),
        (
            closed(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}]}}},
            "$defs.x.anyOf.0.$ref: recursive schemas are not supported",
        ),
        (closed(a={"allOf": [{"$ref": "#/$defs/x"}]}), "properties.a.allOf: 'allOf' is not supported together"),
        (closed(a={"anyOf": []}), "properties.a.anyOf: an array of schemas is expected"),
        (closed(a={"type": "string"}) | {"required": [[]]}, "required: an array of names of properties is expected"),
        (closed(**{f"p{i}": {} for i in range(25)}) | {"required": []}, " it has 25 optional properties"),
    ],
)
def test_a_schema_outside_of_the_subset_is_refused_with_its_path(schema: Any, told: str) -> None:
    path = "output_config.format.schema" + ("" if told.startswith(" ") else ".")
    assert schema_refusal(schema).startswith(path.removesuffix(" ") + (":" if told.startswith(" ") else "") + told)


def test_references_that_branch_again_and_again_are_followed_once() -> None:
    defs: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = closed(a={"$ref": "#/$defs/d0"}) | {"$defs": {**defs, "d60": {"type": "null"}}}
    assert message(output_config={"format": {"type": "json_schema", "schema": schema}}).constraint is not None


def chained(links: int) -> dict[str, Any]:
    """References that lead from one definition to the next, each inside of an object."""
    definitions = {f"d{link}": closed(a={"$ref": f"#/$defs/d{link + 1}"}) for link in range(links)}
    return closed(a={"$ref": "#/$defs/d0"}) | {"$defs": definitions | {f"d{links}": {"type": "string"}}}


def test_references_are_counted_and_not_followed_one_inside_of_the_other() -> None:
    assert (
        schema_refusal(chained(300))
        == "output_config.format.schema.properties.a.$ref: references may lead on 256 times"
    )
    message(output_config={"format": {"type": "json_schema", "schema": chained(250)}})
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(500):
        nested = {"anyOf": [nested]}
    assert "160 levels" in schema_refusal(nested)
