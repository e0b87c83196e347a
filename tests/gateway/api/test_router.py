"""Aliases with several targets, over whole gateways with engines and upstreams of every API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from gateway.api.routes import RUNNER
from gateway.types import Tenant
from tests.fakes.hosted import ANSWER_TOKENS, CLIENTS, PROMPT_TOKENS, answers, refuses
from tests.fakes.sdk_clients import Heard, ask
from tests.fakes.upstream import CHAT, CHAT_STREAM, StubUpstream, Told, chunk, error, events, said, upstream, whole_chat
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

MESSAGES = [{"role": "user", "content": "Hi ✓"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "model": "best"}


@dataclass
class Reply:
    status: int
    text: str
    headers: Mapping[str, str]
    json: Any = None

    @property
    def route(self) -> tuple[str, str]:
        return self.headers["x-kvasir-target"], self.headers["x-kvasir-route"]


@dataclass
class Running:
    whole: Whole
    stubs: dict[str, StubUpstream]
    session: aiohttp.ClientSession

    async def post(self, path: str = "/v1/chat/completions", **body: Any) -> Reply:
        headers = {"anthropic-version": "2023-06-01"} if "messages" in path else {}
        async with self.session.post(self.whole.url + path, json={**BODY, **body}, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return Reply(answer.status, await answer.text(), answer.headers, await answer.json() if is_json else None)

    async def get(self, path: str) -> Any:
        async with self.session.get(self.whole.url + path) as answer:
            return await answer.json() if answer.content_type == "application/json" else await answer.text()


@asynccontextmanager
async def running(
    alias: Mapping[str, Any],
    engines: int = 0,
    behaviour: Mapping[str, Any] | None = None,
    sections: Mapping[str, Any] | None = None,
    dialects: Mapping[str, str] | None = None,
    **told: Told | tuple[Told, ...],
) -> AsyncIterator[Running]:
    """An upstream for each `told`, whose model has its name; `dialects` of those that are none of OpenAI's."""
    async with AsyncExitStack() as stack:
        stubs, tables = {}, []
        for name, own in told.items():
            stub = stubs[name] = await stack.enter_async_context(upstream(*(own if isinstance(own, tuple) else (own,))))
            dialect = (dialects or {}).get(name, "openai")
            table = stub.settings(name, name=f"at-{name}", retries=0, dialect=dialect, breaker_failures=2)
            tables.append(table.model_dump(exclude={"key"}) | {"key": "sk-upstream"})
        aliases = [{"name": "best", **alias}]
        given = {"upstreams": tables, "aliases": aliases, **(sections or {})}
        gateway = await stack.enter_async_context(whole(engines=engines, sections=given, **(behaviour or {})))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Running(gateway, stubs, session)


# -- fallbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_falls_back_to_another_api_and_that_to_the_clients_own(stream: bool) -> None:
    targets = {"targets": ["demo", "claude", "gpt"]}
    fine = answers("anthropic", ["Hel", "lo"], stream=stream)
    told = {"claude": (fine, refuses("anthropic", 529, "busy")), "gpt": CHAT_STREAM if stream else CHAT}
    async with running(targets, engines=1, dialects={"claude": "anthropic"}, **told) as run:
        reply = await run.post(stream=stream, max_tokens=3)
        assert reply.status == 200
        assert reply.route == ("demo", "first; reason=first")
        await run.whole.engines[0].die()
        reply = await run.post(stream=stream)
        assert (reply.status, reply.route[0]) == (200, "claude")
        assert reply.headers["x-kvasir-route"] in ("first; reason=down", "first; reason=failed")
        assert "Hel" in reply.text
        reply = await run.post(stream=stream)
        assert reply.route == ("gpt", "first; reason=overloaded")
        assert reply.text.encode() == b"".join((CHAT_STREAM if stream else CHAT).pieces)
        assert run.stubs["gpt"].got[0].json == {**BODY, "model": "gpt", "stream": stream}


@pytest.mark.parametrize("client", CLIENTS)
async def test_every_client_falls_back_in_its_own_form(client: str) -> None:
    alias = {"targets": ["a", "b", "c"]}
    fine = [answers("anthropic", ["Hel", "lo"], stream=stream) for stream in (False, True)]
    told = {"a": refuses("gemini", 503, "busy"), "b": refuses("openai", 429, "slow"), "c": tuple(fine)}
    async with running(alias, dialects={"a": "gemini", "c": "anthropic"}, **told) as run:
        for stream in (False, True):
            heard = await ask(client, run.whole.url, stream=stream, model="best")
            assert isinstance(heard, Heard)
            assert (heard.text, heard.completion_tokens) == ("Hello", ANSWER_TOKENS)
        assert len(run.stubs["c"].got) == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (error(429, "slow down"), "overloaded"),
        (error(503), "overloaded"),
        (error(500), "failed"),
        (Told(refuse=True), "failed"),
        (error(401, "bad key of the gateway"), "failed"),
        (said({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400), "context"),
    ],
)
async def test_what_another_target_may_do_better_goes_on(fails: Told, why: str, stream: bool) -> None:
    fine = CHAT_STREAM if stream else CHAT
    async with running({"targets": ["a", "b"]}, a=fails, b=fine) as run:
        reply = await run.post(stream=stream)
        assert reply.text.encode() == b"".join(fine.pieces)
        assert reply.route == ("b", f"first; reason={why}")
        assert len(run.stubs["a"].got) == 1


@pytest.mark.parametrize("status", [400, 403, 404, 413, 422])
async def test_what_is_wrong_with_the_request_does_not(status: int) -> None:
    async with running({"targets": ["a", "b"]}, a=error(status, "wrong"), b=CHAT) as run:
        reply = await run.post()
        assert (reply.status, reply.json["error"]["message"]) == (status, "wrong")
        assert reply.route == ("a", "first; reason=first")
        assert not run.stubs["b"].got


async def test_the_last_targets_error_comes_as_it_is_and_an_unknown_model_hides_none() -> None:
    busy, broken = error(503, "busy", retry_after="30"), error(500, "broken")
    async with running({"targets": ["a", "b"]}, a=busy, b=broken) as run:
        reply = await run.post()
        assert (reply.status, reply.json["error"]["message"]) == (500, "broken")
        reply = await run.post()  # what asks for a pause is tried last
        assert (reply.status, reply.json["error"]["message"]) == (503, "busy")
        assert reply.headers["retry-after"] == "30"
    async with running({"targets": ["a", "nothing"]}, a=error(429, "slow")) as run:
        assert (await run.post()).status == 429


async def test_a_stream_that_has_begun_ends_with_its_own_target() -> None:
    cut = Told(events(chunk("Hel")), media="text/event-stream", then="cut")
    async with running({"targets": ["a", "b"]}, a=cut, b=CHAT_STREAM) as run:
        reply = await run.post(stream=True)
        assert "Hel" in reply.text
        assert "ended in the middle" in reply.text
        assert not run.stubs["b"].got


async def test_a_prompt_that_is_too_long_skips_targets_that_are_no_larger() -> None:
    async with running({"targets": ["demo", "gpt"]}, engines=1, gpt=CHAT) as run:
        reply = await run.post(messages=[{"role": "user", "content": "word " * 9000}])
        assert (reply.status, reply.route) == (200, ("gpt", "first; reason=context"))


async def test_the_body_is_the_clients_but_for_the_name() -> None:
    raw = '{ "messages" : [{"role":"user","content":"H\\u00ed"}],\n "temperature":1.00, "x":1e2,"model" : "best" }'
    async with running({"target": "a"}, a=CHAT) as run:
        url = f"{run.whole.url}/v1/chat/completions"
        async with run.session.post(url, data=raw.encode(), headers={"Content-Type": "application/json"}) as answer:
            assert answer.headers["x-kvasir-target"] == "a"
            assert answer.headers["x-kvasir-route"] == "first; reason=only"
        assert run.stubs["a"].got[0].body == raw.replace('"best"', '"a"').encode()


# -- policies ---------------------------------------------------------------------------------------------------------


async def test_a_conversation_stays_at_its_target_and_where_it_went_while_that_was_down() -> None:
    async with running({"targets": ["a", "b", "c"], "policy": "affinity"}, a=CHAT, b=CHAT, c=CHAT) as run:
        homes = {}
        for number in range(12):
            turns = [{"role": "user", "content": f"Question {number}"}]
            homes[number] = (await run.post(messages=turns)).route[0]
            turns += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}]
            assert (await run.post(messages=turns)).route == (homes[number], "affinity; reason=affinity")
        assert len(set(homes.values())) == 3
        number, home = next(iter(homes.items()))
        stub = run.stubs[home]
        stub.answers = [error(500)] * len(stub.got) + [error(500), CHAT]
        turns = [{"role": "user", "content": f"Question {number}"}]
        moved = await run.post(messages=turns)
        assert moved.headers["x-kvasir-route"] == "affinity; reason=failed"
        again = await run.post(messages=turns)
        assert again.route == (moved.route[0], "affinity; reason=sticky")


async def test_the_cheapest_answers_and_the_next_one_where_it_fails() -> None:
    prices = [{"model": name, "input": price, "output": price} for name, price in (("a", "3"), ("b", "1"))]
    alias = {"targets": ["a", "b", "c"], "policy": "cheapest"}
    async with running(alias, sections={"prices": prices}, a=CHAT, b=(CHAT, error(500)), c=CHAT) as run:
        assert (await run.post()).route == ("b", "cheapest; reason=cheapest")
        assert (await run.post()).route == ("a", "cheapest; reason=failed")


async def test_the_fastest_is_found_by_measuring() -> None:
    slow = {"first_token_s": 0.5}
    async with running({"targets": ["demo", "b"], "policy": "fastest"}, 1, slow, b=CHAT_STREAM) as run:
        assert (await run.post(stream=True, max_tokens=1)).route == ("demo", "fastest; reason=unmeasured")
        await run.post(model="b", stream=True)  # also by its own name
        targets = (await run.get("/admin/stats"))["aliases"]["best"]["targets"]
        assert targets["demo"]["first_token_ms"] >= 500 > targets["b"]["first_token_ms"] > 0
        assert (await run.post(stream=True)).route == ("b", "fastest; reason=fastest")


async def test_a_request_goes_where_it_fits() -> None:
    targets = [{"model": "a", "max_prompt_tokens": 50, "tools": False}, {"model": "b"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with running({"targets": targets, "policy": "size"}, a=CHAT, b=CHAT) as run:
        assert (await run.post()).route == ("a", "size; reason=fits")
        assert (await run.post(tools=[tool])).route[0] == "b"
        assert (await run.post(messages=[{"role": "user", "content": "x" * 300}])).route[0] == "b"


async def test_a_stored_response_is_continued_where_it_is() -> None:
    async with running(
        {"targets": ["a", "b"]}, a=(said({"id": "resp_a", "object": "response", "output": []}), error(500)), b=CHAT
    ) as run:
        body = {"input": "Hi", "messages": None}
        assert (await run.post("/v1/responses", **body)).route[0] == "a"
        reply = await run.post("/v1/responses", previous_response_id="resp_a", **body)
        assert (reply.status, reply.route) == (500, ("a", "first; reason=stored"))
        assert not run.stubs["b"].got


# -- cascade ----------------------------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def told(dialect: str, text: str, *, stream: bool) -> Told:
    return answers(dialect, [text[:3], text[3:]], stream=stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
async def test_a_small_answer_is_given_once_it_has_passed(dialect: str, stream: bool) -> None:
    alias = {"targets": ["small", "large"], "policy": "cascade", "checks": ["schema", "refusal"]}
    good, bad = told(dialect, '{"n": 7}', stream=stream), told(dialect, '{"n": "x"}', stream=stream)
    sorry = told(dialect, "I'm sorry, but I can't help with that.", stream=stream)
    large = CHAT_STREAM if stream else CHAT
    async with running(alias, dialects={"small": dialect}, small=(good, bad, sorry), large=large) as run:
        reply = await run.post(response_format=FORM, stream=stream)
        assert reply.route == ("small", "cascade; reason=small")
        if dialect == "openai":
            assert reply.text.encode() == b"".join(good.pieces)
        assert not run.stubs["large"].got
        reply = await run.post(response_format=FORM, stream=stream)
        assert reply.route == ("large", "cascade; reason=schema")
        assert reply.text.encode() == b"".join(large.pieces)
        assert (await run.post(stream=stream)).route == ("large", "cascade; reason=refusal")
        ledger = await run.get("/admin/ledger?group_by=model")
        used = {row["model"]: row["used"] for row in ledger["rows"]}
        assert used["small"]["completion_tokens"] == 3 * ANSWER_TOKENS
        assert used["small"]["prompt_tokens"] == 3 * PROMPT_TOKENS
        assert used["large"]["prompt_tokens"] == 2 * PROMPT_TOKENS


async def test_unlikely_tokens_send_a_request_to_the_large_model_and_are_not_shown() -> None:
    def scored(logprob: float) -> Told:
        token = {"token": "Hello", "logprob": logprob, "bytes": None, "top_logprobs": []}
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "small"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return said({**whole, "choices": [{**choice, "logprobs": {"content": [token]}}], "usage": usage})

    alias = {"targets": ["small", "large"], "policy": "cascade", "checks": ["logprob"], "min_mean_logprob": -1.0}
    async with running(alias, small=(scored(-0.5), scored(-2.0), whole_chat()), large=CHAT) as run:
        reply = await run.post()
        assert reply.route == ("small", "cascade; reason=small")
        assert run.stubs["small"].got[0].json["logprobs"] is True
        assert reply.json["choices"][0]["message"]["content"] == "Hello"
        assert reply.json["choices"][0]["logprobs"] is None
        assert (await run.post()).route == ("large", "cascade; reason=logprob")
        assert (await run.post()).route == ("large", "cascade; reason=logprob")  # none at all


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_answer_is_checked_as_well(stream: bool) -> None:
    alias = {"targets": ["demo", "large"], "policy": "cascade", "checks": ["schema"]}
    async with running(alias, engines=1, large=CHAT_STREAM if stream else CHAT) as run:
        assert (await run.post(stream=stream, max_tokens=3)).route == ("demo", "cascade; reason=small")
        form = {"type": "json_object"}
        reply = await run.post(stream=stream, max_tokens=3, response_format=form)
        assert reply.route == ("large", "cascade; reason=schema")


# -- headers, metrics and statistics ----------------------------------------------------------------------------------


async def test_metrics_stats_and_models_tell_of_aliases() -> None:
    async with running({"targets": ["a", "b"]}, a=error(500), b=CHAT) as run:
        for _ in range(3):
            await run.post()
        metrics = await run.get("/metrics")
        assert 'kvasir_alias_requests_total{alias="best",reason="failed",target="b"} 2.0' in metrics
        assert 'kvasir_alias_requests_total{alias="best",reason="down",target="b"} 1.0' in metrics
        stats = (await run.get("/admin/stats"))["aliases"]["best"]
        assert stats["policy"] == "first"
        assert (stats["targets"]["a"]["up"], stats["targets"]["b"]["up"]) == (False, True)
        assert stats["targets"]["b"]["requests"] == 3
        listed = [model["id"] for model in (await run.get("/v1/models"))["data"]]
        assert "best" in listed


async def test_only_the_answers_of_an_alias_with_one_target_are_sent_again() -> None:
    cache = {"response_cache": {"mode": "on", "requests": "all", "upstreams": "on"}}
    for alias, resent in (({"target": "a"}, 1), ({"targets": ["a", "b"]}, 0)):
        async with running(alias, sections=cache, a=CHAT, b=CHAT) as run:
            replies = [await run.post() for _ in range(3)]
            assert [reply.headers["x-kvasir-cache"].partition(";")[0] for reply in replies] == [
                "miss",
                "exact",
                "exact",
            ]
            assert {reply.route[0] for reply in replies} == {"a"}
            assert len(run.stubs["a"].got) == 1
            assert run.whole.gateway.response_cache.figures.resent == resent


async def test_a_tenants_own_limit_is_no_reason_to_try_another_target() -> None:
    limits = {"limits": {"requests_per_minute": 1, "burst_s": 1.0}}
    async with running({"targets": ["a", "b"]}, sections=limits, a=(error(500), CHAT), b=CHAT) as run:
        assert (await run.post()).status == 200  # one request, whatever it took
        reply = await run.post()
        assert (reply.status, reply.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(run.stubs["b"].got) == 1


async def test_counts_and_responses_in_the_background_are_not_checked() -> None:
    alias = {"targets": ["demo", "large"], "policy": "cascade", "checks": ["refusal"]}
    async with running(alias, engines=1, large=said({"input_tokens": 7}), dialects={"large": "anthropic"}) as run:
        reply = await run.post("/v1/messages/count_tokens")
        assert (reply.json, reply.route) == ({"input_tokens": 7}, ("large", "cascade; reason=unchecked"))


async def test_a_line_of_a_batch_gets_the_first_target_that_can_answer_it() -> None:
    async with running({"targets": ["demo", "a", "b"]}, engines=1, a=error(500), b=CHAT) as run:
        router = run.whole.app[RUNNER].router

        def target() -> str:
            return router.line_target("best", Tenant("anonymous"), "openai", "/v1/completions", translated=False)

        assert target() == "demo"
        assert router.line_target("other", Tenant("anonymous"), "openai", "", translated=False) == "other"
        await run.whole.engines[0].die()
        await until(lambda: target() == "a")
        for _ in range(2):  # its breaker opens
            await run.post(model="a")
        assert target() == "b"
