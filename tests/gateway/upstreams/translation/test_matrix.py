"""Every client form before every upstream form, by the real SDKs. The upstreams are as strict as their APIs
(api_rules.py): what they are sent has to pass the SDKs' types and the rules of the API, and what clients get is parsed
by their SDKs. A cell is one test: client, upstream, and what is asked for.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from tests.fakes.api_rules import CHECKS
from tests.fakes.hosted import ANSWER_TOKENS, CACHED_TOKENS, PROMPT_TOKENS, UPSTREAMS, answers, refuses
from tests.fakes.sdk_clients import (
    CLIENTS,
    IMAGE,
    PLACES,
    QUESTION,
    REST,
    RESULTS,
    SYSTEM,
    Failed,
    Heard,
    Sdks,
    Wish,
    ask,
    sdks,
)
from tests.fakes.upstream import StubUpstream, Told, upstream
from tests.fakes.whole import whole

PAIRS = list(itertools.product(CLIENTS, UPSTREAMS))
CALLS = [("get_weather", {"place": "Oslo ✓"}), ("get_weather", {"place": "Rome"})]
USAGE = (PROMPT_TOKENS, CACHED_TOKENS, ANSWER_TOKENS)
SCHEMA_TEXT = '{"city":"Oslo"}'

pytestmark = pytest.mark.asyncio(loop_scope="module")
pairs = pytest.mark.parametrize(("client", "dialect"), PAIRS, ids=map("-".join, PAIRS))
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def table(stub: StubUpstream, dialect: str, *models: str, **options: Any) -> dict[str, Any]:
    """Of [[upstreams]]. One of OpenAI has chats or responses, and not both."""
    api = {"dialect": "openai", "api": "responses"} if dialect == "responses" else {"dialect": dialect}
    only = {"api_only": api["dialect"] == "openai"}
    settings = stub.settings(*models, retries=0, breaker_failures=10_000, **api, **only, **options)
    return settings.model_dump(exclude={"key"}) | {"key": "sk-upstream"}


@dataclass
class Grid:
    """A gateway before one upstream of each form, whose models are called as the form."""

    url: str
    stubs: Mapping[str, StubUpstream]
    sdks: Sdks

    async def ask(self, client: str, dialect: str, told: Told, **wish: Any) -> Heard | Failed:
        """What the client hears of an answer. Raises for a request that the API of the upstream refuses."""
        stub = self.tell(dialect, told)
        try:
            return await self.sdks.ask(client, f"{dialect}-model", Wish(**wish))
        finally:
            for got in stub.got:
                CHECKS[dialect](got.json)

    def tell(self, dialect: str, told: Told) -> StubUpstream:
        """What the upstream answers from now on."""
        stub = self.stubs[dialect]
        stub.answers, stub.got = [told], []
        stub.left, stub.reached = asyncio.Event(), asyncio.Event()
        return stub

    def body(self, dialect: str) -> str:
        """The text of the one request that the upstream got."""
        (got,) = self.stubs[dialect].got
        return orjson.dumps(got.json).decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grid() -> AsyncIterator[Grid]:
    async with AsyncExitStack() as stack:
        stubs = {dialect: await stack.enter_async_context(upstream()) for dialect in UPSTREAMS}
        tables = [table(stub, name, f"{name}-model", name=name) for name, stub in stubs.items()]
        running = await stack.enter_async_context(whole(engines=0, sections={"upstreams": tables}))
        yield Grid(running.url, stubs, await stack.enter_async_context(sdks(running.url)))


@streams
@pairs
async def test_plain(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    heard = await grid.ask(client, dialect, answers(dialect, ["Hel", "lo ✓"], stream=stream), stream=stream)
    assert heard == Heard("Hello ✓", [], *USAGE)
    assert SYSTEM in grid.body(dialect)
    assert QUESTION in grid.body(dialect)


@streams
@pairs
async def test_tools(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    """Calls and results of an earlier turn, two at once, and a call that is the answer."""
    told = answers(dialect, ["Wait."], CALLS[:1], stream=stream)
    heard = await grid.ask(client, dialect, told, stream=stream, tools=True)
    assert heard == Heard("Wait.", CALLS[:1], *USAGE)
    body = grid.body(dialect)
    assert all(text in body for text in (*RESULTS, *(place["place"] for place in PLACES), "get_weather", "clock"))
    assert body.index(RESULTS[0]) < body.index(RESULTS[1])


@streams
@pairs
async def test_parallel_tools(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    heard = await grid.ask(client, dialect, answers(dialect, [], CALLS, stream=stream), stream=stream, tools=True)
    assert heard == Heard("", CALLS, *USAGE)
    assert isinstance(heard, Heard)
    assert heard.ended == {"openai": "tool_calls", "responses": "completed", "anthropic": "tool_use"}.get(
        client, "STOP"
    )


@streams
@pairs
async def test_a_forced_and_strict_tool(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    told = answers(dialect, [], CALLS[:1], stream=stream)
    heard = await grid.ask(client, dialect, told, stream=stream, tools=True, forced=True)
    assert heard == Heard("", CALLS[:1], *USAGE)
    body = orjson.loads(grid.body(dialect))
    forced: dict[str, Any] = {
        "openai": {"type": "function", "function": {"name": "get_weather"}},
        "responses": {"type": "function", "name": "get_weather"},
        "anthropic": {"type": "tool", "name": "get_weather"},
        "gemini": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["get_weather"]}},
    }
    choice = body["toolConfig" if dialect == "gemini" else "tool_choice"]
    if dialect == "anthropic" and client != "gemini":  # which has no field for one call
        assert choice.pop("disable_parallel_tool_use") is True
    assert choice == forced[dialect]
    if dialect != "gemini" and client != "gemini":  # where a call that is forced is strict, and no field says so
        assert all(one.get("function", one)["strict"] is True for one in body["tools"])


@streams
@pairs
async def test_structured(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    told = answers(dialect, [SCHEMA_TEXT[:5], SCHEMA_TEXT[5:]], stream=stream)
    heard = await grid.ask(client, dialect, told, stream=stream, schema=True)
    assert heard == Heard(SCHEMA_TEXT, [], *USAGE)
    body = orjson.loads(grid.body(dialect))
    schema: Any = {
        "openai": lambda: body["response_format"]["json_schema"]["schema"],
        "responses": lambda: body["text"]["format"]["schema"],
        "anthropic": lambda: body["output_config"]["format"]["schema"],
        "gemini": lambda: body["generationConfig"]["responseJsonSchema"],
    }[dialect]()
    assert schema["properties"] == {"city": {"type": "string"}}


@streams
@pairs
async def test_an_image(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    """Between two texts."""
    heard = await grid.ask(client, dialect, answers(dialect, ["A cat."], stream=stream), stream=stream, image=True)
    assert heard == Heard("A cat.", [], *USAGE)
    body = orjson.loads(grid.body(dialect))
    turn = body.get("messages", body.get("input", body.get("contents")))[-1]
    first, image, last = turn.get("content", turn.get("parts"))
    assert (first["text"], last["text"]) == (QUESTION, REST)
    written = orjson.dumps(image).decode()
    if client == dialect == "gemini":  # as its SDK wrote it
        written = written.replace("-", "+").replace("_", "/")
    assert base64.b64encode(IMAGE).decode() in written


@streams
@pairs
async def test_an_error(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    failed = await grid.ask(client, dialect, refuses(dialect, 400, "no such place"), stream=stream)
    assert isinstance(failed, Failed)
    assert failed.status == 400
    assert "no such place" in failed.message


@streams
@pairs
async def test_a_rate_limit(grid: Grid, client: str, dialect: str, stream: bool) -> None:
    failed = await grid.ask(client, dialect, refuses(dialect, 429, "slow down", retry_after="7"), stream=stream)
    assert isinstance(failed, Failed)
    assert (failed.status, failed.retry_after) == (429, "7")
    assert "slow down" in failed.message


@pairs
async def test_an_answer_that_breaks_off(grid: Grid, client: str, dialect: str) -> None:
    told = answers(dialect, ["Hel", "lo"], stream=True)
    cut = Told(told.pieces[: 4 if dialect == "anthropic" else 1], media=told.media, then="cut")
    with pytest.raises(Exception, match=r"(?i)middle of its answer|upstream|response|closed|payload|peer"):
        heard = await grid.ask(client, dialect, cut, stream=True)
        assert isinstance(heard, Failed), heard
        raise RuntimeError(heard.message)


@pairs
async def test_cancel(grid: Grid, client: str, dialect: str) -> None:
    """A client that leaves ends the request at the upstream."""
    told = answers(dialect, ["Hel", "lo"], stream=True)
    stub = grid.tell(dialect, Told(told.pieces[:-2], media=told.media, then="stall"))
    asking = asyncio.ensure_future(grid.sdks.ask(client, f"{dialect}-model", Wish(stream=True)))
    async with asyncio.timeout(10):
        await stub.reached.wait()
        asking.cancel()
        await stub.left.wait()
    with pytest.raises(asyncio.CancelledError):
        await asking


ODD_BODIES = {
    "openai": '{ "model":"openai-model","messages": [{"role":"user","content":"\\u00e9"}],"x_new":{"a":[1.0,1e2]} }',
    "responses": '{ "model":"responses-model","input": "\\u00e9","store":false,"x_new":{"a":[1.0,1e2]} }',
    "anthropic": '{ "model":"anthropic-model","max_tokens":5,"messages":[{"role":"user","content":"\\u00e9"}],"x":1.0}',
    "gemini": '{ "contents": [{"role":"user","parts":[{"text":"\\u00e9"}]}],"x_new":{"a":[1.0,1e2]} }',
}
PATHS = {
    "openai": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/gemini-model:generateContent",
}


@pytest.mark.parametrize("form", CLIENTS)
async def test_one_form_passes_byte_for_byte(grid: Grid, form: str) -> None:
    odd = b'{ "any" : [1.0, "\\u00e9"] }\n'
    stub = grid.tell(form, Told([odd[:9], odd[9:]]))
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"} if form == "anthropic" else None
    async with (
        aiohttp.ClientSession() as session,
        session.post(grid.url + PATHS[form], data=ODD_BODIES[form].encode(), headers=headers) as answer,
    ):
        assert await answer.read() == odd
    (got,) = stub.got
    assert got.body.decode() == ODD_BODIES[form]


@asynccontextmanager
async def gateway(
    dialect: str, *told: Told, sections: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> AsyncIterator[tuple[str, StubUpstream]]:
    async with upstream(*told) as stub:
        tables = [table(stub, dialect, **options)]
        async with whole(engines=0, sections={"upstreams": tables, **sections}) as running:
            yield running.url, stub


async def test_an_answer_is_remembered_for_clients_of_every_form() -> None:
    told = answers("anthropic", ["Hello ✓"], stream=False)
    cache = {"mode": "on", "requests": "all"}
    async with gateway("anthropic", told, sections={"response_cache": cache}) as (url, stub):
        for client in ("openai", "gemini", "responses", "openai"):
            heard = await ask(client, url, stream=False)
            assert isinstance(heard, Heard)
            assert heard.text == "Hello ✓"
    assert len(stub.got) == 1


async def test_an_answer_is_remembered_for_one_image_and_no_other() -> None:
    told = answers("anthropic", ["A cat."], stream=False)
    cache = {"mode": "on", "requests": "all"}
    async with gateway("anthropic", told, sections={"response_cache": cache}) as (url, stub), sdks(url) as clients:
        for client in ("openai", "gemini", "responses"):
            heard = await clients.ask(client, "up-1", Wish(image=True))
            assert isinstance(heard, Heard)
            assert heard.text == "A cat."
        assert len(stub.got) == 1
        assert isinstance(await clients.ask("openai", "up-1", Wish()), Heard)
    assert len(stub.got) == 2


@streams
async def test_what_an_api_lacks_is_refused_or_left_out_and_named(stream: bool) -> None:
    body = {"model": "up-1", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, "seed": 7, "n": 1}
    told = answers("anthropic", ["Hello"], stream=stream)
    for lossy, status in (("refuse", 400), ("drop", 200)):
        async with (
            gateway("anthropic", told, lossy=lossy) as (url, stub),
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/chat/completions", json=body) as answer,
        ):
            text = await answer.text()
            assert answer.status == status
            if status == 200:
                assert answer.headers["x-kvasir-dropped"] == "seed"
                assert "seed" not in stub.got[0].json
            else:
                assert orjson.loads(text)["error"]["param"] == "seed"
                assert not stub.got
