"""/v1/responses of `kvasir serve` with the demo model, spoken to with the real openai SDK."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.fakes.server import Server

BOOK = "You are the porter of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)


class Ticket(pydantic.BaseModel):
    klass: Literal["first", "second"]
    bags: int


def ask(server: Server, said: Any, **options: Any) -> openai.types.responses.Response:
    options = {"max_output_tokens": 16, "temperature": 0} | options
    response: openai.types.responses.Response = server.client().responses.create(model="demo", input=said, **options)
    return response


def cached(response: openai.types.responses.Response) -> int:
    assert response.usage is not None
    return response.usage.input_tokens_details.cached_tokens


def test_a_conversation_goes_on_from_what_is_kept_and_reuses_its_prefix(server: Server) -> None:
    first = ask(server, [{"role": "system", "content": BOOK}, {"role": "user", "content": "May I take four bags?"}])
    second = ask(server, "And five?", previous_response_id=first.id)
    third = ask(server, "And six?", previous_response_id=second.id)
    assert first.usage is not None
    assert second.usage is not None
    assert third.usage is not None
    assert cached(first) == 0
    assert cached(second) >= first.usage.input_tokens - 16
    assert cached(third) >= second.usage.input_tokens - 16
    assert third.usage.input_tokens > second.usage.input_tokens > first.usage.input_tokens
    items = list(server.client().responses.input_items.list(third.id, order="asc"))
    assert [item.role for item in items] == ["system", "user", "assistant", "user", "assistant", "user"]  # type: ignore[union-attr]


def test_a_stream_is_the_unstreamed_response_in_pieces_and_can_be_retrieved(server: Server) -> None:
    whole = ask(server, "Tell me a story.", max_output_tokens=40)
    with server.client().responses.stream(
        model="demo", input="Tell me a story.", max_output_tokens=400, temperature=0
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text
    assert final.output_text.startswith(whole.output_text)
    kept = server.client().responses.retrieve(final.id)
    assert (kept.output_text, kept.status) == (final.output_text, "completed")
    assert server.client().responses.delete(final.id) is None
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve(final.id)


async def test_streams_of_an_asynchronous_client_do_not_mix(server: Server) -> None:
    async with server.async_client() as client:

        async def one(number: int) -> tuple[str, str]:
            stream = await client.responses.create(
                model="demo", input=f"Story number {number}.", max_output_tokens=24, temperature=0, stream=True
            )
            pieces, response_id = "", ""
            async for event in stream:
                if event.type == "response.created":
                    response_id = event.response.id
                elif event.type == "response.output_text.delta":
                    pieces += event.delta
            return pieces, (await client.responses.retrieve(response_id)).output_text

        told = await asyncio.gather(*(one(number) for number in range(8)))
    assert all(first == second for first, second in told)


def test_an_answer_is_parsed_into_the_clients_own_type(server: Server) -> None:
    answer = server.client().responses.parse(
        model="demo", input="Which ticket?", text_format=Ticket, max_output_tokens=200, temperature=0
    )
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Ticket)


def test_tokens_are_counted_as_they_are_charged(server: Server) -> None:
    counted = server.client().responses.input_tokens.count(model="demo", input="How many?", instructions="Be brief.")
    answer = ask(server, "How many?", instructions="Be brief.")
    assert answer.usage is not None
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_prewarmed_prompt_is_read_by_the_request_after_it(server: Server) -> None:
    said = [{"role": "user", "content": f"Warm. {BOOK}"}]
    warm = ask(server, said, prompt_cache_options={"prewarm": True, "ttl": "30m"})
    assert (warm.status, warm.output) == ("completed", [])
    assert warm.usage is not None
    details = warm.usage.input_tokens_details
    assert details.cache_write_tokens_details is not None
    assert details.cache_write_tokens_details.ttl_30m_tokens == details.cache_write_tokens > 100
    assert cached(ask(server, said)) >= details.cache_write_tokens


def test_log_probabilities_add_up_to_the_text(server: Server) -> None:
    answer = ask(server, "Tell me.", top_logprobs=2, include=["message.output_text.logprobs"])
    (message,) = answer.output
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode() == part.text
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}


TOOLS: Any = [
    {
        "type": "function",
        "name": "ticket",
        "description": "Sells one.",
        "parameters": {
            "type": "object",
            "properties": {"klass": {"enum": ["first", "second"]}, "bags": {"type": "integer", "minimum": 0}},
            "required": ["klass", "bags"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {"type": "function", "name": "now"},
]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_has_to_be_made_validates_and_its_output_is_answered(server: Server, streamed: bool) -> None:
    asked: Any = {
        "model": "demo",
        "input": "One ticket.",
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "ticket"},
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "temperature": 0,
    }
    if streamed:
        with server.client().responses.stream(**asked) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = server.client().responses.create(**asked)
    (call,) = answer.output
    assert (answer.status, call.type, call.name) == ("completed", "function_call", "ticket")
    Ticket.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sold."}
    after = ask(server, [output], previous_response_id=answer.id, tools=TOOLS, tool_choice="none")
    items = list(server.client().responses.input_items.list(after.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    assert cached(after) > 0


def test_a_response_in_the_background_is_polled_or_cancelled(server: Server) -> None:
    client = server.client()
    begun = ask(server, "Tell me a story.", background=True)
    assert begun.status == "in_progress"
    long = ask(server, "Tell me everything.", background=True, max_output_tokens=1_500, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"
    server.wait_until(lambda: client.responses.retrieve(begun.id).status != "in_progress", "the response has ended")
    done = client.responses.retrieve(begun.id)
    assert done.output_text == ask(server, "Tell me a story.").output_text
    assert client.responses.retrieve(long.id).status == "cancelled"


def test_what_cannot_be_done_is_refused(server: Server) -> None:
    inside = "" if server.has_replicas else ".not"  # a vLLM does not say where in the schema
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_output_tokens": 15}, "max_output_tokens"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"prompt_cache_options": {"ttl": "31m"}}, "prompt_cache_options.ttl"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
            f"text.format.schema{inside}",
        ),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            ask(server, "hi", **fields)
        assert refused.value.param == param
    with pytest.raises(openai.BadRequestError) as refused:
        ask(server, "word " * 40_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_an_input_that_is_too_long_loses_its_oldest_turns_where_that_is_asked_for(server: Server) -> None:
    long = [{"role": "user", "content": "word " * 30_000}, {"role": "assistant", "content": "Yes."}]
    answer = ask(server, [*long, *long, {"role": "user", "content": "Well?"}], truncation="auto")
    assert answer.usage is not None
    assert 0 < answer.usage.input_tokens < 100
