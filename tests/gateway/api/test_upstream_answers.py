"""The response cache in front of hosted APIs: byte for byte in the form that an answer came in, and told by the real
SDKs in the other one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import orjson
import pytest

from gateway.api.body import MAX_DEPTH
from gateway.config import NamespaceSettings, TenantSettings
from gateway.responses.entries import Entry
from tests.fakes.gateway import LIMIT_S, Gateway, response_cache, running
from tests.fakes.gemini import gemini
from tests.fakes.shelf import Shelf
from tests.fakes.upstream import (
    CHUNK,
    CONTENT,
    CONTENT_STREAM,
    EMBEDDINGS,
    MESSAGE,
    MESSAGE_STREAM,
    RESPONSE,
    RESPONSE_STREAM,
    SSE,
    USAGE,
    Told,
    chunk,
    error,
    events,
    said,
    upstream,
)
from tests.fakes.upstream import whole_chat as whole
from tests.fakes.waiting import until

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "Hello."}]
ASK: dict[str, Any] = {"model": "up-1", "messages": MESSAGES, "temperature": 0}
END = {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
STREAM = Told(
    [*events(chunk("Hel"), chunk("lo \u2713"), END, {**CHUNK, "choices": [], "usage": USAGE}), b"data: [DONE]\n\n"],
    media=SSE,
)
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def ask(gateway: Gateway, body: Any = ASK, path: str = PATH, **headers: str) -> tuple[str, bytes, Any]:
    """What the cache had, and the answer."""
    async with gateway.session.post(gateway.url + path, json=body, headers=headers) as answer:
        return answer.headers.get("x-kvasir-cache", ""), await answer.read(), answer


async def outcomes(gateway: Gateway, *bodies: Any, **headers: str) -> list[str]:
    return [(await ask(gateway, body, **headers))[0] for body in bodies]


async def test_generated_answers_are_remembered_for_who_asks_and_vectors_for_all() -> None:
    async with (
        upstream(whole(), whole(), whole(), EMBEDDINGS) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache(upstreams="ask")) as gateway,
    ):
        assert await outcomes(gateway, ASK, ASK) == ["bypass; reason=not-asked"] * 2
        assert await outcomes(gateway, ASK, ASK, **{"x-kvasir-cache": "on"}) == ["miss", "exact"]
        vector = {"model": "up-1", "input": "Hello."}
        assert [(await ask(gateway, vector, "/v1/embeddings"))[0] for _ in range(2)] == ["miss", "exact"]


async def test_a_retry_is_asked_for_anew_and_its_answer_replaces_the_old_one() -> None:
    async with (
        upstream(whole("malformed"), whole("better")) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first = {"x-stainless-retry-count": "0"}
        again = [await ask(gateway, **first) for _ in range(3)]  # the last one on the resend path
        assert [outcome for outcome, _, _ in again] == ["miss", "exact", "exact"]
        outcome, retried, _ = await ask(gateway, **{"x-stainless-retry-count": "1"})
        assert (outcome, b"better" in retried, len(stub.got)) == ("miss", True, 2)
        for headers in (first, {}, first):
            assert (await ask(gateway, **headers))[:2] == ("exact", retried)


async def test_the_same_request_gets_the_same_bytes_and_nobody_is_asked() -> None:
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first, second = await ask(gateway), await ask(gateway, {"temperature": 0.0, **ASK, "user": "somebody"})
        assert (first[0], second[0], len(stub.got)) == ("miss", "exact", 1)
        assert first[1] == second[1] == whole().pieces[0]
        assert second[2].headers["Age"] == "0"
        assert second[2].headers["Content-Type"].startswith("application/json")
        assert "x-kvasir-engine" not in second[2].headers
        stats = await (await gateway.session.get(f"{gateway.url}/admin/stats")).json()
        assert stats["tenants"]["anonymous"]["response_hits"] == 1
        assert stats["tenants"]["anonymous"]["prompt_tokens"] == 100


async def test_a_priority_goes_on_as_it_was_sent_and_makes_no_other_request() -> None:
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, {**ASK, "priority": -(2**40)}, {**ASK, "priority": 7}, ASK) == [
            "miss",
            "exact",
            "exact",
        ]
        assert [orjson.loads(got.body)["priority"] for got in stub.got] == [-(2**40)]


async def test_a_stream_comes_again_in_its_own_pieces_with_or_without_its_usage() -> None:
    async with (
        upstream(STREAM) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first = await ask(gateway, ASK | WITH_USAGE)
        again = await ask(gateway, ASK | WITH_USAGE)
        bare = await ask(gateway, ASK | {"stream": True})
        assert (first[0], again[0], bare[0], len(stub.got)) == ("miss", "exact", "exact", 1)
        assert first[1] == again[1] == b"".join(STREAM.pieces)
        assert bare[1] == b"".join([*STREAM.pieces[:3], STREAM.pieces[4]])


async def test_what_was_streamed_is_told_whole_and_back_by_the_sdk() -> None:
    async with (
        upstream(STREAM) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        await ask(gateway, ASK | WITH_USAGE)
        answer = await gateway.sdk().chat.completions.create(**ASK)
        assert answer.choices[0].message.content == "Hello \u2713"
        assert answer.usage is not None
        assert answer.usage.total_tokens == USAGE["total_tokens"]
        assert len(stub.got) == 1
    async with (
        upstream(whole("Hello \u2713")) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first = await gateway.sdk().chat.completions.create(**ASK)
        async with gateway.sdk().chat.completions.stream(**ASK, stream_options={"include_usage": True}) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == first.choices[0].message.content
        assert final.usage == first.usage
        assert len(stub.got) == 1


async def test_messages_and_contents_are_told_in_both_forms() -> None:
    older: Any = {"extra_headers": {"anthropic-version": "2023-06-01"}, "extra_body": {"temperature": 0}}
    body: Any = {"model": "up-1", "max_tokens": 9, "messages": MESSAGES}
    async with (
        upstream(MESSAGE_STREAM) as stub,
        running(upstreams=[stub.settings(dialect="anthropic")], response_cache=response_cache()) as gateway,
    ):
        async with gateway.anthropic().messages.stream(**body, **older) as stream:
            streamed = await stream.get_final_message()
        told = await gateway.anthropic().messages.create(**body, **older)
        assert told.content[0].text == streamed.content[0].text == "Hello"  # type: ignore[union-attr]
        assert told.usage == streamed.usage
        assert len(stub.got) == 1
    async with (
        upstream(CONTENT) as stub,
        running(upstreams=[stub.settings(dialect="gemini")], response_cache=response_cache()) as gateway,
    ):
        sdk = gemini(gateway.url)
        asked: Any = {"model": "up-1", "contents": "Hello.", "config": {"temperature": 0}}
        answer = await sdk.aio.models.generate_content(**asked)
        pieces = [piece.text async for piece in await sdk.aio.models.generate_content_stream(**asked)]
        await sdk.aio.aclose()
        sdk.close()
        assert ([answer.text], len(stub.got)) == (pieces, 1)


RESPOND: Any = {"model": "up-1", "input": "Hello.", "temperature": 0, "store": False}


@pytest.mark.parametrize("told", [RESPONSE, RESPONSE_STREAM])
async def test_a_response_that_is_not_stored_is_told_in_both_forms(told: Told) -> None:
    streamed = told is RESPONSE_STREAM
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        first = await ask(gateway, RESPOND | {"stream": streamed}, "/v1/responses")
        sdk = gateway.sdk()
        whole = await sdk.responses.create(**RESPOND)
        async with sdk.responses.stream(**RESPOND) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        again = await ask(gateway, RESPOND | {"stream": streamed}, "/v1/responses")
        assert (first[0], again[0], len(stub.got)) == ("miss", "exact", 1)
        assert first[1] == again[1] == b"".join(told.pieces)
        assert (whole.output_text, whole.usage) == (final.output_text, final.usage)
        assert whole.output_text == "Hello"


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"store": True}, "bypass; reason=stateful"),
        ({"store": None}, "bypass; reason=stateful"),
        ({"previous_response_id": "resp_0"}, "bypass; reason=stateful"),
        ({"conversation": "conv_1"}, "bypass; reason=stateful"),
        ({"prompt": {"id": "p"}}, "bypass; reason=stateful"),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "bypass; reason=stateful"),
        ({"prompt_cache_options": {"prewarm": True}}, "bypass; reason=stateful"),
        ({"tools": [{"type": "web_search"}]}, "bypass; reason=tools"),
        ({"temperature": None}, "bypass; reason=sampling"),
        ({"instructions": "Be brief."}, "miss"),
        ({"safety_identifier": "s"}, "exact"),
    ],
)
async def test_a_response_of_which_its_upstream_keeps_something_takes_no_part(
    more: dict[str, Any], outcome: str
) -> None:
    async with (
        upstream(RESPONSE) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        got = [(await ask(gateway, body, "/v1/responses"))[0] for body in (RESPOND, RESPOND | more)]
        assert got == ["miss", outcome]


async def test_vectors_are_kept_without_being_asked_for() -> None:
    async with (
        upstream(EMBEDDINGS) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        body: dict[str, Any] = {"model": "up-1", "input": ["a", "b"]}
        asked = (body, body, body | {"dimensions": 2}, body | {"input": ["b", "a"]})
        got = [await ask(gateway, one, "/v1/embeddings") for one in asked]
        assert [one[0] for one in got] == ["miss", "exact", "miss", "miss"]
        assert got[0][1] == got[1][1] == EMBEDDINGS.pieces[0]
        tenants = (await (await gateway.session.get(f"{gateway.url}/admin/stats")).json())["tenants"]
        assert (tenants["anonymous"]["response_hits"], tenants["anonymous"]["prompt_tokens"]) == (1, 24)
        vectors = await gateway.sdk().embeddings.create(**body, encoding_format="float")
        assert vectors.data[0].embedding == [0.5, -1.0]


@pytest.mark.parametrize(
    ("more", "outcome"),
    [
        ({"temperature": 0.5}, "bypass; reason=sampling"),
        ({"temperature": None, "seed": 4}, "miss"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "bypass; reason=tools"),
        ({"web_search_options": {}}, "bypass; reason=tools"),
        ({"container": "c_1"}, "bypass; reason=stateful"),
        ({"store": True}, "bypass; reason=stateful"),
        ({"cache": {"use-cache": False}}, "bypass; reason=off"),
        ({"messages": [{"role": "user", "content": "Hello!"}]}, "miss"),
        ({"x_unknown": 1}, "miss"),
        ({"prompt_cache_key": "k"}, "miss"),
        ({"cache": {"namespace": "n"}}, "miss"),
        ({"max_tokens": 5}, "miss"),
        ({"metadata": {"a": "b"}, "cache": {"ttl": 5}}, "exact"),
        ({"cache": {"no-cache": True}}, "miss"),
    ],
)
async def test_another_body_is_another_request_and_some_take_no_part(more: dict[str, Any], outcome: str) -> None:
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, ASK, ASK | more) == ["miss", outcome]


async def test_several_answers_to_one_request_are_kept_together() -> None:
    value = orjson.loads(whole().pieces[0])
    value["choices"] = [{**value["choices"][0], "index": index} for index in range(2)]
    candidate = {"content": {"role": "model", "parts": [{"text": "Hi"}]}, "finishReason": "STOP"}
    content = {"candidates": [{**candidate, "index": index} for index in range(2)]}
    gemini_path = "/v1beta/models/up-1:generateContent"
    body = {"contents": [{"parts": [{"text": "Hello."}]}], "generationConfig": {"temperature": 0, "candidateCount": 2}}
    for told, dialect, path, asked in (
        (said(value), "openai", PATH, ASK | {"n": 2}),
        (said(content), "gemini", gemini_path, body),
    ):
        async with (
            upstream(told) as stub,
            running(upstreams=[stub.settings(dialect=dialect)], response_cache=response_cache()) as gateway,
        ):
            got = [await ask(gateway, asked, path) for _ in range(2)]
            assert [(outcome, answer) for outcome, answer, _ in got] == [
                ("miss", told.pieces[0]),
                ("exact", told.pieces[0]),
            ]


async def test_an_answer_that_says_that_it_is_not_encoded_is_kept() -> None:
    told = Told(whole().pieces, headers={"Content-Encoding": "identity"})
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, ASK, ASK) == ["miss", "exact"]


async def test_an_answer_is_shared_in_a_namespace_on_purpose_and_nowhere_else() -> None:
    tenants = [TenantSettings(name=name, keys=(f"the-key-of-{name}",)) for name in "abc"]
    shared = NamespaceSettings(name="handbook", tenants=("a", "b"))
    async with (
        upstream(whole()) as stub,
        running(
            upstreams=[stub.settings()], response_cache=response_cache(), tenants=tenants, namespaces=[shared]
        ) as gateway,
    ):

        async def got(tenant: str, **headers: str) -> tuple[int, str | None]:
            sent = {"Authorization": f"Bearer the-key-of-{tenant}", **headers}
            async with gateway.session.post(gateway.url + PATH, json=ASK, headers=sent) as answer:
                return answer.status, answer.headers.get("x-kvasir-cache")

        handbook = {"x-kvasir-namespace": "handbook"}
        assert [await got("a"), await got("b")] == [(200, "miss")] * 2
        assert [await got("a", **handbook), await got("b", **handbook)] == [(200, "miss"), (200, "exact")]
        assert [await got("b"), (await got("c", **handbook))[0]] == [(200, "exact"), 403]


def calling(arguments: str) -> bytes:
    """A conversation in which a tool was called, as a client writes it."""
    return (
        b'{"model":"up-1","max_tokens":9,"temperature":0,"messages":[{"role":"user","content":"Well?"},'
        b'{"role":"assistant","content":[{"type":"tool_use","id":"t","name":"f","input":%b}]},'
        b'{"role":"user","content":[{"type":"tool_result","tool_use_id":"t","content":"ok"}]}]}'
    ) % arguments.encode()


@pytest.mark.parametrize(
    ("one", "other", "outcomes"),
    [
        ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}', ["miss", "miss"]),
        ('{"id": 12345678901234567890123}', '{"id": 12345678901234567890124}', ["bypass; reason=numbers"] * 2),
        ('{"id": 18446744073709551615}', '{"id": -9223372036854775808}', ["miss", "miss"]),
        ('{"id": 1}', '{"id":1}', ["miss", "exact"]),
    ],
)
async def test_arguments_that_a_model_reads_differently_are_other_requests(
    one: str, other: str, outcomes: list[str]
) -> None:
    async with (
        upstream(MESSAGE) as stub,
        running(upstreams=[stub.settings(dialect="anthropic")], response_cache=response_cache()) as gateway,
    ):
        got = []
        for arguments in (one, other):
            async with gateway.session.post(f"{gateway.url}/v1/messages", data=calling(arguments)) as answer:
                got.append(answer.headers["x-kvasir-cache"])
        assert got == outcomes


async def test_the_names_of_a_body_of_a_turn_and_of_a_part_may_come_in_any_order() -> None:
    part = {"type": "text", "text": "Hello."}
    body = {**ASK, "messages": [{"role": "user", "content": [part]}]}
    turned = {"role": "user", "content": [dict(reversed(part.items()))]}
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        other = {**dict(reversed(body.items())), "messages": [dict(reversed(turned.items()))]}
        assert await outcomes(gateway, body, other) == ["miss", "exact"]


async def test_what_is_said_of_our_cache_reaches_no_upstream_and_odd_words_are_refused() -> None:
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        body = (
            b'{"cache" : {"ttl": 5, "no-store": true},  "model":"up-1", "messages": [{"role":"user","content":"x"}] }'
        )
        async with gateway.session.post(gateway.url + PATH, data=body) as answer:
            assert answer.status == 200
        assert stub.got[0].body == b'{"model":"up-1","messages":[{"role":"user","content":"x"}]}'
        status, told, _ = await gateway.post(PATH, {**ASK, "cache": {"tenant": "x"}})
        assert (status, told["error"]["param"]) == (400, "cache.tenant")
        status, told, sent = await gateway.post(PATH, ASK, headers={"Cache-Control": "only-if-cached"})
        assert (status, told["error"]["code"], len(stub.got)) == (504, "not_cached", 1)
        assert sent["x-kvasir-cache"] == "miss"


@pytest.mark.parametrize(
    "told",
    [
        whole(finish="length"),
        whole(finish="content_filter"),
        error(400),
        Told([b"no json"]),
        Told(STREAM.pieces[:3], media=SSE),
        Told([*STREAM.pieces[:2], b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"], media=SSE),
        Told(whole().pieces, status=203),
        Told(whole().pieces, headers={"Content-Encoding": "x-own"}),
        Told([*STREAM.pieces[:2], *STREAM.pieces[3:]], media=SSE),
        Told(STREAM.pieces, media=SSE, then="cut"),
    ],
)
async def test_what_failed_was_cut_or_is_no_answer_is_not_kept(told: Told) -> None:
    body = ASK | (WITH_USAGE if told.media == SSE else {})
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings(retries=0)], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, body, body) == ["miss", "miss"]
        assert len(stub.got) == 2


@pytest.mark.parametrize(("told", "body"), [(STREAM, ASK), (whole(), ASK | WITH_USAGE)])
async def test_what_comes_in_another_form_than_was_asked_for_is_not_kept(told: Told, body: dict[str, Any]) -> None:
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, body, body, ASK) == ["miss"] * 3


async def test_an_answer_that_breaks_off_breaks_off_for_all_who_share_it_and_is_not_kept() -> None:
    async with (
        upstream(Told(STREAM.pieces[:2], media=SSE, then="stall"), STREAM) as stub,
        running(upstreams=[stub.settings(retries=0)], response_cache=response_cache()) as gateway,
    ):
        body = ASK | {"stream": True}
        reading = [await gateway.session.post(gateway.url + PATH, json=body) for _ in range(3)]
        await asyncio.wait_for(stub.reached.wait(), LIMIT_S)
        for connection in stub.connections:
            connection.close()
        told = [await answer.read() for answer in reading]
        assert len(set(told)) == 1
        begun, _, rest = told[0].partition(b"".join(STREAM.pieces[:2]))
        assert begun == b""
        assert b'"error"' in rest
        assert b"[DONE]" not in rest
        assert len(stub.got) == 1
        assert await outcomes(gateway, body, body) == ["miss", "exact"]


class Leaving(Shelf):
    """A Redis that is away after it was asked once."""

    async def find(self, owner: str, name: str) -> Entry | None:
        found = await super().find(owner, name)
        self.down = True
        return found


async def test_a_redis_that_goes_between_looking_and_keeping_costs_nobody_the_answer() -> None:
    shelf = Leaving()
    async with (
        upstream(STREAM) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache(shelf)) as gateway,
    ):
        body = ASK | {"stream": True}
        got = [await ask(gateway, body) for _ in range(2)]
        assert [(one[0], one[1]) for one in got] == [
            ("miss", b"".join(STREAM.pieces)),
            ("exact", b"".join(STREAM.pieces)),
        ]
        assert (shelf.asked, shelf.entries) == (2, {})


async def test_tenants_have_answers_of_their_own() -> None:
    tenants = [TenantSettings(name=name, keys=(f"key-of-{name}",)) for name in ("north", "south")]
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache(), tenants=tenants) as gateway,
    ):
        got = [(await ask(gateway, Authorization=f"Bearer key-of-{name}"))[0] for name in ("north", "south", "north")]
        assert (got, len(stub.got)) == (["miss", "miss", "exact"], 2)


async def test_identical_requests_in_flight_are_one_and_go_on_when_the_first_leaves() -> None:
    slow = Told(STREAM.pieces[:1], media=SSE, then="stall")
    async with (
        upstream(slow, STREAM) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        body = ASK | {"stream": True}
        first, second = [await gateway.session.post(gateway.url + PATH, json=body) for _ in range(2)]
        assert (first.headers["x-kvasir-cache"], second.headers["x-kvasir-cache"]) == ("miss", "exact")
        assert len(stub.got) == 1
        first.close()
        async with asyncio.timeout(30):
            assert await second.content.readany() == STREAM.pieces[0]
        assert not stub.left.is_set()
        second.close()
        await until(stub.left.is_set)
        assert await outcomes(gateway, body) == ["miss"]


@pytest.mark.parametrize("readers", [1, 3])
async def test_what_was_used_when_all_had_hung_up_is_accounted_for_once(readers: int) -> None:
    begun = Told(MESSAGE_STREAM.pieces[:4], media=SSE, then="stall")
    body = {"model": "up-1", "max_tokens": 9, "messages": MESSAGES, "temperature": 0, "stream": True}
    async with (
        upstream(begun) as stub,
        running(upstreams=[stub.settings(dialect="anthropic")], response_cache=response_cache()) as gateway,
    ):

        async def figures(path: str) -> Any:
            async with gateway.session.get(gateway.url + path) as answer:
                return await answer.json()

        async with asyncio.timeout(LIMIT_S):
            reading = [await gateway.session.post(f"{gateway.url}/v1/messages", json=body) for _ in range(readers)]
            for number, answer in enumerate(reading, start=1):
                await answer.content.readany()
                answer.close()
                while (tenant := (await figures("/admin/stats"))["tenants"]["anonymous"])["requests"] < number:
                    continue  # asking is waiting
            await stub.left.wait()
        (row,) = (await figures("/admin/ledger?group_by=model"))["rows"]
        assert (tenant["prompt_tokens"], row["used"]["prompt_tokens"], row["used"]["cached_tokens"]) == (
            1432,
            1432,
            1400,
        )
        assert len(stub.got) == 1


async def test_a_body_that_parsers_may_read_in_two_ways_takes_no_part() -> None:
    planted = b'{"model":"up-1","temperature":0,"messages":[%b],"messages":[%b]}'
    good, bad = (orjson.dumps({"role": "user", "content": text}) for text in ("Hello.", "Say that it is free."))
    nested = orjson.dumps(ASK).replace(b'"content":"Hello."', b'"content":"Say.","conten\\u0074":"Hello."')
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        for body in (planted % (bad, good), nested):
            async with gateway.session.post(gateway.url + PATH, data=body) as answer:
                assert answer.headers["x-kvasir-cache"] == "bypass; reason=names"
        assert await outcomes(gateway, ASK) == ["miss"]
        spaced = json.dumps(ASK, indent=2).replace("Hello.", "\\u0048ello.").encode()
        async with gateway.session.post(gateway.url + PATH, data=spaced) as answer:
            assert answer.headers["x-kvasir-cache"] == "exact"
        assert [got.body for got in stub.got[:2]] == [planted % (bad, good), nested]
        assert len(stub.got) == 3


@pytest.mark.parametrize("name", ["x_unknown", "tools", "response_format"])
async def test_the_deepest_body_that_may_be_sent_is_looked_up_as_any_other(name: str) -> None:
    deep: Any = 1
    for level in range(MAX_DEPTH - 1):
        deep = [deep] if level % 2 else {"a": deep}
    body = json.dumps({**ASK, name: deep, "cache": {"use-cache": True}}, indent=1).encode()
    async with (
        upstream(whole()) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        got = []
        for _ in range(2):
            async with gateway.session.post(gateway.url + PATH, data=body) as answer:
                got.append((answer.status, answer.headers["x-kvasir-cache"]))
        assert got == [(200, "miss"), (200, "exact")]


async def test_another_form_that_a_url_asks_for_is_another_request() -> None:
    path, body = "/v1beta/models/up-1:{}", {"contents": [{"parts": [{"text": "a"}]}], "generationConfig": {"seed": 1}}
    async with (
        upstream(CONTENT, CONTENT, CONTENT_STREAM) as stub,
        running(upstreams=[stub.settings(dialect="gemini")], response_cache=response_cache()) as gateway,
    ):
        whole = ["", "?alt=json", "?alt=proto"]
        got = [(await ask(gateway, body, path.format(f"generateContent{query}")))[0] for query in whole]
        assert got == ["miss", "exact", "miss"]
        streamed = ["?alt=sse", "?xalt=sse", "?alt=ssex", ""]
        got = [(await ask(gateway, body, path.format(f"streamGenerateContent{query}")))[0] for query in streamed]
        assert got == ["exact", *["bypass; reason=route"] * 3]


@pytest.mark.parametrize("told", [STREAM, whole("Hello \u2713")])
async def test_a_hundred_identical_requests_of_the_sdk_are_one_at_the_upstream(told: Told) -> None:
    async with (
        upstream(told) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        sdk = gateway.sdk()

        async def text() -> str:
            if told is not STREAM:
                return str((await sdk.chat.completions.create(**ASK)).choices[0].message.content)
            stream = await sdk.chat.completions.create(**ASK, **WITH_USAGE)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        assert set(await asyncio.gather(*[text() for _ in range(100)])) == {"Hello \u2713"}
        assert len(stub.got) == 1
        tenant = (await (await gateway.session.get(f"{gateway.url}/admin/stats")).json())["tenants"]["anonymous"]
        assert (tenant["requests"], tenant["response_hits"], tenant["prompt_tokens"]) == (100, 99, 100)


async def test_an_answer_that_calls_a_tool_nobody_asked_for_is_not_kept() -> None:
    async with (
        upstream(whole(finish="tool_calls")) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache()) as gateway,
    ):
        assert await outcomes(gateway, ASK, ASK) == ["miss", "miss"]
        asking = {**ASK, "cache": {"use-cache": True}}
        assert await outcomes(gateway, asking, asking) == ["miss", "exact"]


async def test_who_is_too_slow_for_those_it_shares_an_answer_with_is_cut_off_and_sees_no_second_answer() -> None:
    big = Told([*events(*[chunk("x" * 60_000)] * 160), *STREAM.pieces], media=SSE)
    body = orjson.dumps({**ASK, "stream": True})
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    async with (
        upstream(big) as stub,
        running(upstreams=[stub.settings()], response_cache=response_cache(max_flight_bytes=200_000)) as gateway,
    ):
        fast, slow = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        for _, writer in (fast, slow):
            writer.write(head.encode() + body)
            await writer.drain()
        read = 0
        async with asyncio.timeout(LIMIT_S):
            while read < 160 * 60_000:
                read += len(await fast[0].read(1 << 20))
            rest = bytearray()
            with contextlib.suppress(ConnectionResetError):
                while piece := await slow[0].read(1 << 20):
                    rest += piece
        assert len(stub.got) == 1
        assert rest.count(b"HTTP/1.1 ") == 1
        assert not rest.endswith(b"0\r\n\r\n")
        for _, writer in (fast, slow):
            writer.close()
