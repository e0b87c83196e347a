from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from google.genai import types as api
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Grammar
from gateway.errors import BadRequestError, UnsupportedError, UpstreamRefusedError
from gateway.types import CachePrefix, Constraint, Marker, Request, TextPrompt, Tool, ToolUse
from gateway.upstreams.translation.gemini import GeminiGenerate
from tests.fakes.translated import (
    CLOCK,
    WEATHER,
    call,
    chat,
    conversations,
    read_stream,
    read_whole,
    result,
    said,
    system,
    user,
)

FORM = GeminiGenerate()
SIGNED = {"thoughtSignature": "skip_thought_signature_validator"}
BOTH = (WEATHER, CLOCK)


def written(request: Request) -> dict[str, Any]:
    """The body, which the SDK's own types take."""
    path, body, query = FORM.write(request, "gemini")
    ending = (":streamGenerateContent", "alt=sse") if request.stream else (":generateContent", "")
    assert (path, query) == ("/v1beta/models/{model}" + ending[0], ending[1])
    body = orjson.loads(orjson.dumps(body))
    types: dict[str, Any] = {
        "systemInstruction": api.Content,
        "toolConfig": api.ToolConfig,
        "generationConfig": api.GenerationConfig,
    }
    for name, value in body.items():
        for one in value if name in ("contents", "tools") else [value]:
            (api.Content if name == "contents" else api.Tool if name == "tools" else types[name]).model_validate(one)
    roles = [content["role"] for content in body["contents"]]
    assert set(roles) <= {"user", "model"}
    assert all(one != other for one, other in pairwise(roles))
    for content in body["contents"]:
        assert content["parts"]
        kinds = ["functionResponse" in part for part in content["parts"]]
        assert kinds == sorted(kinds, reverse=True)
    return body


def test_a_plain_question_has_nothing_else() -> None:
    markers = (Marker(0, 2, 300.0),)
    assert written(chat(user("Hi"), markers=markers)) == {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}


def test_a_stream_is_another_path() -> None:
    assert set(written(chat(stream=True))) == {"contents"}


def test_parameters_with_values_of_their_own_are_written() -> None:
    sampling = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "seed": (1 << 31) + 7,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
    }
    assert written(chat(sampling=sampling, stop=("a", "b")))["generationConfig"] == {
        "maxOutputTokens": 9,
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 3,
        "seed": 7,
        "presencePenalty": 0.25,
        "frequencyPenalty": -0.5,
        "stopSequences": ["a", "b"],
    }
    assert "generationConfig" not in written(chat(sampling={"max_tokens": 0}))


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMATS: dict[str, tuple[Grammar, dict[str, Any]]] = {
    "object": (Grammar("json_object"), {}),
    "schema": (Grammar("json_schema", orjson.dumps(SCHEMA).decode()), {"responseJsonSchema": SCHEMA}),
    "any JSON": (Grammar("json_schema", "true"), {}),
}


@pytest.mark.parametrize(("grammar", "expected"), FORMATS.values(), ids=FORMATS)
def test_structured_output(grammar: Grammar, expected: dict[str, Any]) -> None:
    body = written(chat(constraint=Constraint(grammar, "response_format")))
    assert body["generationConfig"] == {"responseMimeType": "application/json", **expected}


TURNS: dict[str, tuple[list[Any], list[str], list[tuple[str, list[str]]]]] = {
    "alone, it is what is answered": ([system("s")], [], [("user", ["s"])]),
    "several": ([system("s"), system("t"), user("u")], ["s", "t"], [("user", ["u"])]),
    "later": (
        [system("s"), user("u"), said("a"), system("t"), user("v")],
        ["s"],
        [("user", ["u"]), ("model", ["a"]), ("user", ["t", "v"])],
    ),
    "empty texts": ([system(""), user("u"), said(""), user(" ")], [], [("user", ["u", " "])]),
    "a list of texts": ([{"role": "user", "content": ["u", "v"]}], [], [("user", ["uv"])]),
    "thoughts": ([user("u"), said("a") | {"reasoning_content": "hm"}], [], [("user", ["u"]), ("model", ["a"])]),
}


@pytest.mark.parametrize(("messages", "instruction", "turns"), TURNS.values(), ids=TURNS)
def test_instructions_come_first_and_turns_alternate(messages: Any, instruction: Any, turns: Any) -> None:
    body = written(chat(*messages))
    assert [part["text"] for part in body.get("systemInstruction", {}).get("parts", [])] == instruction
    assert [(turn["role"], [part["text"] for part in turn["parts"]]) for turn in body["contents"]] == turns


def test_responses_come_first_and_have_the_names_of_their_calls() -> None:
    body = written(
        chat(
            user("u"),
            said("Well.", call("weather", {"city": "Åre"}, "c1"), call("clock", "{}", "c2")),
            user("And?"),
            result("noon", "c2"),
            result('{"snow": true}', "c1"),
        )
    )
    assert body["contents"][1:] == [
        {
            "role": "model",
            "parts": [
                {"text": "Well."},
                {"functionCall": {"id": "c1", "name": "weather", "args": {"city": "Åre"}}, **SIGNED},
                {"functionCall": {"id": "c2", "name": "clock", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c2", "name": "clock", "response": {"output": "noon"}}},
                {"functionResponse": {"id": "c1", "name": "weather", "response": {"snow": True}}},
                {"text": "And?"},
            ],
        },
    ]


def test_calls_without_ids_are_found_by_name_and_an_id_may_come_twice() -> None:
    messages = [user("u"), said("", call("clock", {}, None), call("weather", {}, None))]
    body = written(chat(*messages, result("snow", None, "weather"), result("noon", None)))
    first, second = (part["functionCall"] for part in body["contents"][1]["parts"])
    answers = [part["functionResponse"] for part in body["contents"][2]["parts"]]
    assert [(one["id"], one["name"]) for one in answers] == [(second["id"], "weather"), (first["id"], "clock")]

    again = [said("", call("clock", {})), result("1"), said("", call("weather", {})), result("2")]
    names = [
        part["functionResponse"]["name"]
        for turn in written(chat(user("u"), *again))["contents"][2::2]
        for part in turn["parts"]
    ]
    assert names == ["clock", "weather"]


def test_a_result_that_no_call_asked_for_keeps_its_own_name() -> None:
    (turn,) = written(chat(result("x", None, "clock")))["contents"]
    assert turn["parts"] == [{"functionResponse": {"name": "clock", "response": {"output": "x"}}}]


@pytest.mark.parametrize("text", ["[1]", "1", "null", "{", "", '{"a":' * 200 + "1" + "}" * 200])
def test_a_result_that_is_no_object_of_usual_depth_is_text(text: str) -> None:
    body = written(chat(user("u"), said("", call("clock", text)), result(text)))
    assert body["contents"][1]["parts"][0]["functionCall"]["args"] == {}
    assert body["contents"][2]["parts"][0]["functionResponse"]["response"] == {"output": text}


STRICT = replace(CLOCK, strict=True)
CHOICES: dict[str, tuple[tuple[Tool, ...], ToolUse | None, dict[str, Any] | None]] = {
    "auto": (BOTH, ToolUse(BOTH), None),
    "none": (BOTH, None, {"mode": "NONE"}),
    "any": (BOTH, ToolUse(BOTH, "required"), {"mode": "ANY"}),
    "forced": (BOTH, ToolUse((CLOCK,), "required"), {"mode": "ANY", "allowedFunctionNames": ["clock"]}),
    "the only one": ((CLOCK,), ToolUse((CLOCK,), "required"), {"mode": "ANY"}),
    "some": (BOTH, ToolUse((CLOCK,)), {"mode": "VALIDATED", "allowedFunctionNames": ["clock"]}),
    "strict": ((WEATHER, STRICT), ToolUse((WEATHER, STRICT)), {"mode": "VALIDATED"}),
}


@pytest.mark.parametrize(("tools", "use", "calling"), CHOICES.values(), ids=CHOICES)
def test_tools_and_which_of_them_are_called(tools: Any, use: ToolUse | None, calling: Any) -> None:
    body = written(chat(tools=tools, tool_use=use))
    assert body.get("toolConfig") == (None if calling is None else {"functionCallingConfig": calling})
    assert [one["name"] for one in body["tools"][0]["functionDeclarations"]] == [tool.name for tool in tools]


def test_a_function_has_a_schema_where_it_takes_arguments() -> None:
    (tools,) = written(chat(tools=(WEATHER, Tool("bare")), tool_use=ToolUse((WEATHER, Tool("bare")))))["tools"]
    assert tools["functionDeclarations"] == [
        {"name": "weather", "description": "Of a city.", "parametersJsonSchema": WEATHER.parameters},
        {"name": "bare"},
    ]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "stops": ({"stop": tuple("abcdef")}, "stop"),
    "logprobs": ({"sampling": {"logprobs": 0}}, "logprobs"),
    "min_p": ({"sampling": {"min_p": 0.1}}, "min_p"),
    "prewarm": ({"prewarm": True}, "max_tokens"),
    "continues": ({"continues": True}, "messages"),
    "regex": ({"constraint": Constraint(Grammar("regex", "a+"), "regex")}, "regex"),
    "no JSON": ({"constraint": Constraint(Grammar("json_schema", "false"), "response_format")}, "response_format"),
}


@pytest.mark.parametrize(("fields", "param"), REFUSED.values(), ids=REFUSED)
def test_what_the_api_lacks_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        FORM.write(chat(**fields), "gemini")
    assert caught.value.param == param


def test_a_conversation_without_text_and_a_text_are_refused() -> None:
    with pytest.raises(BadRequestError) as caught:
        FORM.write(chat(user("")), "gemini")
    assert caught.value.param == "messages"
    with pytest.raises(UnsupportedError):
        FORM.write(replace(chat(), prompt=TextPrompt("p")), "gemini")


def _response(text: str) -> dict[str, Any]:
    """What a result is, as conversations() have them."""
    return dict(orjson.loads(text)) if text == "{}" else {"output": text}


@given(conversations())
def test_a_conversation_arrives_as_it_was(messages: list[dict[str, Any]]) -> None:
    begin = next(at for at, one in enumerate(messages) if one["role"] != "system")
    try:
        body = written(chat(*messages))
    except BadRequestError:
        assert not any(one["content"] for one in messages[begin:])
        return
    contents = [api.Content.model_validate(one) for one in body["contents"]]
    parts = [part for content in contents for part in content.parts or ()]
    instruction = api.Content.model_validate(body.get("systemInstruction", {}))
    for role, several in (
        ("system", [instruction]),
        ("user", [content for content in contents if content.role == "user"]),
        ("assistant", [content for content in contents if content.role == "model"]),
    ):
        texts = [part.text for content in several for part in content.parts or () if part.text is not None]
        assert texts == [one["content"] for one in messages if one["role"] == role and one["content"]]
    calls = [(one.id, one.name, one.args) for part in parts if (one := part.function_call) is not None]
    assert calls == [
        (one["id"], one["function"]["name"], one["function"]["arguments"])
        for message in messages
        for one in message.get("tool_calls", ())
    ]
    names = {name: of for name, of, _ in calls}
    answers = [(one.id, one.name, one.response) for part in parts if (one := part.function_response) is not None]
    assert answers == [
        (one["tool_call_id"], names[one["tool_call_id"]], _response(one["content"]))
        for one in messages
        if one["role"] == "tool"
    ]


def answer(*parts: api.Part, why: str | None = "STOP", message: str | None = None) -> dict[str, Any]:
    content = api.Content(role="model", parts=list(parts)) if parts else None
    reason = None if why is None else api.FinishReason(why)
    candidate = api.Candidate(content=content, finish_reason=reason, finish_message=message, index=0)
    usage = api.GenerateContentResponseUsageMetadata(prompt_token_count=3, total_token_count=8)
    response = api.GenerateContentResponse(candidates=[candidate], usage_metadata=usage, model_version="gemini")
    found: dict[str, Any] = orjson.loads(response.model_dump_json(by_alias=True, exclude_none=True))
    return found


def wrote(value: str) -> api.Part:
    return api.Part(text=value)


def called(name: str, **args: Any) -> api.Part:
    return api.Part(function_call=api.FunctionCall(name=name, args=args, id="x"), thought_signature=b"s")


THOUGHT = api.Part(text="hm", thought=True, thought_signature=b"s")
ANSWERS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "text": ([answer(wrote("Hi "), why=None), answer(wrote("you"))], ("Hi you", [], "stop", None)),
    "thoughts": ([answer(THOUGHT, why=None), answer(wrote("Hi"))], ("Hi", [], "stop", None)),
    "calls": (
        [answer(wrote("Well."), called("clock"), why=None), answer(called("weather", city="Åre"))],
        ("Well.", [("clock", "{}"), ("weather", '{"city":"Åre"}')], "tool_calls", None),
    ),
    "a reason in every event": (
        [answer(wrote("a")), answer(called("clock"))],
        ("a", [("clock", "{}")], "tool_calls", None),
    ),
    "an end without content": ([answer(wrote("a"), why=None), answer()], ("a", [], "stop", None)),
    "cut": ([answer(wrote("a"), why="MAX_TOKENS")], ("a", [], "length", None)),
    "cut among calls": ([answer(called("clock"), why="MAX_TOKENS")], ("", [("clock", "{}")], "length", None)),
    "filtered": ([answer(wrote("a"), why="SAFETY", message="No.")], ("a", [], "refusal", None)),
    "filtered at once": ([answer(why="PROHIBITED_CONTENT", message="No.")], ("No.", [], "refusal", None)),
    "filtered without a word": ([answer(why="RECITATION")], ("", [], "refusal", None)),
    "no end": ([answer(wrote("a"), why=None)], ("a", [], None, None)),
    "no candidate": ([{"usageMetadata": {"promptTokenCount": 1}}, {"candidates": []}], ("", [], None, None)),
    "other parts": (
        [answer(api.Part(executable_code=api.ExecutableCode(code="1", language=api.Language.PYTHON)), wrote("1"))],
        ("1", [], "stop", None),
    ),
}


@pytest.mark.parametrize(("events", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_is_read(events: list[dict[str, Any]], expected: Any) -> None:
    assert read_stream(FORM.reader(chat()), events) == expected
    noise = {"news": 1, "candidates": None, "promptFeedback": {"safetyRatings": []}}
    assert read_stream(FORM.reader(chat()), [one for event in events for one in (noise, event)]) == expected
    if len(events) == 1:
        assert read_whole(FORM.reader(chat()), events[0]) == expected


def test_where_one_call_is_asked_for_others_are_left_out() -> None:
    request = chat(tools=BOTH, tool_use=ToolUse(BOTH, parallel=False))
    events = [answer(called("clock"), called("weather"), why=None), answer(called("clock"))]
    assert read_stream(FORM.reader(request), events) == ("", [("clock", "{}")], "tool_calls", None)


ODD: dict[str, dict[str, Any]] = {
    "candidates": {"candidates": ["x"]},
    "candidate": {"candidates": [None]},
    "content": {"candidates": [{"content": "x"}]},
    "parts": {"candidates": [{"content": {"parts": 1}}]},
    "part": {"candidates": [{"content": {"parts": [None]}}]},
    "text": {"candidates": [{"content": {"parts": [{"text": 1}]}}]},
    "call": {"candidates": [{"content": {"parts": [{"functionCall": "x"}]}}]},
    "call without a name": {"candidates": [{"content": {"parts": [{"functionCall": {"args": {}}}]}}]},
    "arguments": {"candidates": [{"content": {"parts": [{"functionCall": {"name": "a", "args": [1]}}]}}]},
    "error": {"error": "x"},
    "feedback": {"promptFeedback": "x"},
    "reason": {"candidates": [{"finishReason": ["STOP"]}]},
}


@pytest.mark.parametrize("event", ODD.values(), ids=ODD)
def test_what_is_no_answer_is_an_error(event: dict[str, Any]) -> None:
    for read in (FORM.reader(chat()).event, FORM.reader(chat()).whole):
        with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
            list(read(event))


BLOCKED: Any = api.GenerateContentResponse(
    prompt_feedback=api.GenerateContentResponsePromptFeedback(
        block_reason=api.BlockedReason.SAFETY, block_reason_message="Too bad."
    )
)
ERRORS: dict[str, tuple[dict[str, Any], int, str]] = {
    "overloaded": ({"error": {"code": 503, "message": "Busy.", "status": "UNAVAILABLE"}}, 503, "Busy"),
    "no status": ({"error": {"code": "x", "message": "Busy."}}, 500, "Busy"),
    "no call": (answer(why="MALFORMED_FUNCTION_CALL", message="Odd."), 502, "MALFORMED_FUNCTION_CALL.*Odd"),
}


def test_a_blocked_prompt_is_a_refusal() -> None:
    event = orjson.loads(BLOCKED.model_dump_json(by_alias=True, exclude_none=True))
    said = "The prompt was blocked (SAFETY): Too bad."
    assert read_stream(FORM.reader(chat()), [event]) == (said, [], "refusal", None)


@pytest.mark.parametrize(("event", "status", "said"), ERRORS.values(), ids=ERRORS)
def test_an_error_in_the_place_of_an_answer_is_told(event: dict[str, Any], status: int, said: str) -> None:
    for read in (FORM.reader(chat()).event, FORM.reader(chat()).whole):
        with pytest.raises(UpstreamRefusedError, match=said) as caught:
            list(read(event))
        assert caught.value.status == status


@given(st.lists(st.sampled_from([*(one for events, _ in ANSWERS.values() for one in events), *ODD.values()])))
def test_events_in_any_order_are_read_or_an_error(events: list[dict[str, Any]]) -> None:
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        read_stream(FORM.reader(chat()), events)


# -- what may be cached -----------------------------------------------------------------------------------------------

CALLED = (user("u"), said("", call("f", {}, "1"), call("g", {}, "2")), result("r", "1"), result("s", "2"), user("v"))
TALK = (system("s"), user("u"), said("a"), user("v"))
PREFIXES: dict[str, tuple[tuple[Any, ...], tuple[Marker, ...], int | None, int]] = {
    # messages, markers, leading contents that are marked, contents
    "instructions": (TALK, (Marker(0, 1, 300.0),), 0, 3),
    "instructions that go on": ((system("s"), system("t"), user("u")), (Marker(0, 1, 300.0),), None, 1),
    "a turn": (TALK, (Marker(2, 1, 300.0),), 2, 3),
    "the last turn": (TALK, (Marker(3, 1, 300.0),), 2, 3),
    "the only turn": (TALK[:2], (Marker(1, 1, 300.0),), 0, 1),
    "a document before a question": ((user("doc question"),), (Marker(0, 4, 300.0),), 1, 2),
    "a document in a turn of its own": ((user("doc"), user("question")), (Marker(0, 3, 300.0),), 1, 2),
    "the last of several": (TALK, (Marker(0, 1, 300.0), Marker(2, 1, 300.0)), 2, 3),
    "inside of an answer": (TALK, (Marker(2, 0, 300.0),), None, 3),
    "the last call": (CALLED, (Marker(1, 0, 300.0, call=1),), 2, 3),
    "a call before others": (CALLED, (Marker(1, 0, 300.0, call=0),), None, 3),
    "all results": (CALLED, (Marker(3, 1, 300.0),), 3, 4),
    "some results": (CALLED, (Marker(2, 1, 300.0),), 2, 3),
    "tools": ((user("u"),), (Marker(0, 0, 300.0, tool=0),), 0, 1),
    "tools before instructions": (TALK, (Marker(0, 0, 300.0, tool=0),), None, 3),
}


@pytest.mark.parametrize(("messages", "markers", "marked", "contents"), PREFIXES.values(), ids=PREFIXES)
def test_a_prefix_ends_where_a_content_does(messages: Any, markers: Any, marked: int | None, contents: int) -> None:
    request = chat(*messages, markers=markers, tools=(WEATHER,))
    prefix = FORM.prefix(request)
    assert (None if prefix is None else prefix.contents) == marked
    assert len(FORM.write(request, "gemini").body["contents"]) == contents


def test_without_markers_anything_may_come_again() -> None:
    assert FORM.prefix(chat(*TALK)) == CachePrefix(None, 0.0)
    assert FORM.prefix(chat(*TALK, markers=(Marker(0, 1, 300.0), Marker(2, 1, 3600.0)))) == CachePrefix(2, 3600.0)


@given(conversations(), st.data())
def test_a_cut_changes_no_text(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    places = st.integers(0, len(messages) - 1).flatmap(
        lambda at: st.builds(Marker, st.just(at), st.integers(0, len(messages[at]["content"])), st.just(300.0))
    )
    request = chat(*messages, markers=tuple(data.draw(st.lists(places, max_size=6))))

    def texts(one: Request) -> list[tuple[str, str]]:
        made: list[tuple[str, str]] = []
        with suppress(BadRequestError):
            for content in FORM.write(one, "gemini").body["contents"]:
                for part in content["parts"]:
                    text = part.get("text", orjson.dumps(part, option=orjson.OPT_SORT_KEYS).decode())
                    if made and "text" in part and made[-1][0] == content["role"]:
                        made[-1] = content["role"], made[-1][1] + text
                    else:
                        made.append((content["role"], text))
        return made

    assert texts(request) == texts(chat(*messages))
