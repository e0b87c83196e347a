"""`kvasir serve` with the demo model, spoken to with the real anthropic SDK."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.fakes.server import CLIENT_LIMIT_S, Server

GREEDY: Any = {"extra_headers": {"anthropic-version": "2023-06-01"}, "extra_body": {"temperature": 0}}
POLICY = "You are the conductor of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)


def ask(server: Server, *turns: str, **options: Any) -> anthropic.types.Message:
    messages: Any = [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    options = {"max_tokens": 8, "system": POLICY} | options
    return server.anthropic().messages.create(model="demo", messages=messages, **options)  # type: ignore[no-any-return]


def said(answer: anthropic.types.Message) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def test_the_same_conversation_has_the_same_answer_in_both_dialects(server: Server) -> None:
    answer = ask(server, "Hello.", **GREEDY)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 8)
    other = server.client().chat.completions.create(
        model="demo",
        max_tokens=8,
        temperature=0,
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": "Hello."}],
    )
    assert said(answer) == other.choices[0].message.content
    assert other.usage is not None
    assert answer.usage.input_tokens == other.usage.prompt_tokens


def test_a_stream_is_the_answer_in_pieces(server: Server) -> None:
    whole = ask(server, "Tell me of bags.", max_tokens=40, **GREEDY)
    messages: Any = [{"role": "user", "content": "Tell me of bags."}]
    asked: Any = {"model": "demo", "max_tokens": 40, "system": POLICY, "messages": messages, **GREEDY}
    with server.anthropic().messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > (0 if server.has_replicas else 3)  # a busy vLLM has many tokens in one event
    assert "".join(pieces) == said(streamed) == said(whole)
    assert (streamed.stop_reason, streamed.usage) == (whole.stop_reason, whole.usage)


async def test_concurrent_streams_do_not_mix(server: Server) -> None:
    questions = [f"Passenger {number} asks about {number} bags." for number in range(8)]
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=CLIENT_LIMIT_S
    ) as client:

        async def one(question: str) -> str:
            messages: Any = [{"role": "user", "content": question}]
            asked: Any = {"model": "demo", "max_tokens": 24, "messages": messages, **GREEDY}
            async with client.messages.stream(**asked) as stream:
                return await stream.get_final_text()

        streamed = await asyncio.gather(*map(one, questions))
    assert streamed == [said(ask(server, question, max_tokens=24, system="", **GREEDY)) for question in questions]


def test_a_stop_sequence_is_told_and_not_part_of_the_text(server: Server) -> None:
    whole = said(ask(server, "Tell me of bags.", max_tokens=40, **GREEDY))
    stop = whole[10:14]
    cut = ask(server, "Tell me of bags.", max_tokens=40, stop_sequences=["never said", stop], **GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert said(cut) == whole[: whole.index(stop)]


def test_a_schema_is_kept_with_required_properties_first(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"note": {"enum": ["n"]}, "bags": {"enum": [1, 2]}},
        "required": ["bags"],
        "additionalProperties": False,
    }
    answer = ask(
        server, "How many?", max_tokens=60, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    told = json.loads(said(answer))
    assert told["bags"] in (1, 2)
    assert list(told) in (["bags"], ["bags", "note"])
    place = "" if server.has_replicas else ".properties.a"
    with pytest.raises(anthropic.BadRequestError, match=rf"output_config.format.schema{place}: "):
        wrong = {**schema, "properties": {"a": {"type": "string", "pattern": "(?=x)"}}, "required": ["a"]}
        ask(server, "How many?", output_config={"format": {"type": "json_schema", "schema": wrong}})


@pytest.mark.slow
def test_as_much_as_the_context_has_room_for(server: Server) -> None:
    window = server.anthropic().models.retrieve("demo").max_input_tokens
    assert window is not None
    counted = server.anthropic().messages.count_tokens
    book = POLICY * 20
    while (count := counted(model="demo", messages=[{"role": "user", "content": book}]).input_tokens) >= window:
        book = book[: len(book) * (window - 40) // count]
    answer = ask(server, book, system="", max_tokens=window)
    assert answer.usage.input_tokens == count
    assert answer.stop_reason in ("model_context_window_exceeded", "end_turn")
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        ask(server, POLICY * 40, system="")


def test_counting_agrees_with_the_usage(server: Server) -> None:
    messages: Any = [{"role": "user", "content": "How many bags? Ünïcode ✓ <|im_end|>"}]
    counted = server.anthropic().messages.count_tokens(model="demo", system=POLICY, messages=messages)
    assert counted.input_tokens == ask(server, messages[0]["content"]).usage.input_tokens


def test_prewarming_computes_the_prompt(server: Server) -> None:
    policy = "Prewarmed. " + POLICY
    assert ask(server, "warmup", system=policy, max_tokens=0).content == []
    raw = server.anthropic().messages.with_raw_response.create(
        model="demo", max_tokens=1, system=policy, messages=[{"role": "user", "content": "Hello."}]
    )
    assert int(raw.headers["x-kvasir-cached-tokens"]) > 100


WEATHER: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_a_tool_that_has_to_be_called_is_called_and_its_result_is_taken(server: Server) -> None:
    chosen = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    options: Any = {"tools": [WEATHER], "tool_choice": chosen, "max_tokens": 60}
    answer = ask(server, "What is the weather?", **options, **GREEDY)
    assert answer.stop_reason == "tool_use"
    call = next(block for block in answer.content if block.type == "tool_use")
    assert (call.name, call.id[:6]) == ("weather", "toolu_")
    assert call.input["city"] in ("Oslo", "Rome")

    asked: Any = {"model": "demo", "system": POLICY, "messages": [{"role": "user", "content": "What is the weather?"}]}
    with server.anthropic().messages.stream(**asked, **options, **GREEDY) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in answer.content
    ]
    asked["messages"] += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}]},
    ]
    counted = server.anthropic().messages.count_tokens(**asked, tools=[WEATHER])
    after = server.anthropic().messages.create(**asked, tools=[WEATHER], max_tokens=4)
    assert after.usage.input_tokens == counted.input_tokens > answer.usage.input_tokens


def test_an_answer_goes_on_with_what_it_was_given(server: Server) -> None:
    whole = said(ask(server, "Tell me of bags.", max_tokens=40, **GREEDY))
    begun = whole[: whole.rindex(" ", 0, len(whole) // 2)].rstrip()
    rest = ask(server, "Tell me of bags.", begun, max_tokens=40, **GREEDY)
    assert whole.startswith(begun + said(rest)[: len(whole) - len(begun)])
    assert len(said(rest)) > 10
    messages: Any = [{"role": "user", "content": "Tell me of bags."}, {"role": "assistant", "content": begun}]
    counted = server.anthropic().messages.count_tokens(model="demo", system=POLICY, messages=messages)
    assert counted.input_tokens == rest.usage.input_tokens
