"""What is killed, cut off or malformed, against a real server: everybody gets an answer or an error, nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from gateway.redis_server import BINARIES
from tests.fakes.server import Server

QUESTION = "Tell me everything about the weather at sea, and about the ships that were there. "


async def chat(client: openai.AsyncOpenAI, text: str, max_tokens: int = 16) -> str:
    """`ok`, or the name of the SDK's exception. The answer is as long as it may be, whatever the model wants to say."""
    try:
        answer = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": text}],
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
    except openai.APIError as error:
        return type(error).__name__
    assert answer.usage is not None
    return "ok"


def settled(server: Server) -> bool:
    """No sequence is live, every block is accounted for, no violation was ever seen."""
    for engine in server.get("/admin/stats")["engines"]:
        blocks = engine["blocks"]
        if blocks["live"] or blocks["free"] + blocks["cached"] + blocks["live"] != blocks["total"]:
            return False
    return True


async def wait_settled(server: Server) -> None:
    await asyncio.to_thread(server.wait_until, lambda: settled(server), "no live blocks")
    assert not [line for line in server.lines if "Traceback" in line or "violation" in line]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Of this module alone: its Redis is killed."""
    with Server(tmp_path_factory.mktemp("faults"), "--kv-cache-bytes", str(64 << 20), "--dtype", "float32") as running:
        yield running


async def test_killing_redis_under_load_is_not_noticed_by_anybody(server: Server) -> None:
    async with server.async_client() as client:

        async def load(rounds: int) -> Counter[str]:
            results = await asyncio.gather(*(chat(client, f"{QUESTION} {n % 5}") for n in range(rounds)))
            return Counter(results)

        assert await load(8) == {"ok": 8}
        (redis,) = server.children(*BINARIES)
        before = len(server.lines)
        under_load = asyncio.create_task(load(24))
        os.kill(redis, signal.SIGKILL)
        assert await under_load == {"ok": 24}
        assert await load(8) == {"ok": 8}
        # It comes back by itself: another process, and the metric says so.
        await asyncio.to_thread(
            server.wait_until, lambda: "kvasir_redis_up 1" in server.get("/metrics"), "Redis is used again"
        )
        await asyncio.to_thread(server.wait_until, lambda: bool(server.children(*BINARIES)), "a new Redis")
        assert server.children(*BINARIES) != [redis]
        assert await load(8) == {"ok": 8}
    warnings = [line for line in server.lines[before:] if "WARNING" in line and "gateway.storage.breaker" in line]
    assert len(warnings) <= 2, "one warning per outage, not one per request"
    await wait_settled(server)


async def test_two_hundred_clients_that_hang_up_leave_nothing_behind(server: Server) -> None:
    dice = random.Random(7)
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": QUESTION * 20}],
        "max_tokens": 400,
        "stream": True,
        "temperature": 1,
    }

    async def hang_up(session: aiohttp.ClientSession, after_bytes: int, patience_s: float) -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with (
                asyncio.timeout(patience_s),
                session.post(f"{server.url}/v1/chat/completions", json=body) as answer,
            ):
                async for piece in answer.content.iter_any():
                    after_bytes -= len(piece)
                    if after_bytes < 0:
                        return

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        await asyncio.gather(
            *(hang_up(session, dice.randrange(4000), dice.choice([0.01, 0.05, 0.2, 1.0, 3.0])) for _ in range(200))
        )
    await wait_settled(server)
    async with server.async_client() as client:
        assert await chat(client, "still there?") == "ok"


BAD_BODIES = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "a string": b'"x"',
    "nan": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
    "infinity": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
    "deep": b'{"model":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "deep objects": b'{"model":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "not utf-8": b'{"model":"demo","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "lone surrogate": b'{"model":"demo","messages":[{"role":"user","content":"\\ud83d"}]}',
    "huge number": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":' + b"9" * 5000 + b"}",
    "no messages": b'{"model":"demo","messages":[]}',
    "null byte": b'{"model":"demo","messages":[{"role":"user","content":"x"}],"seed":"\\u0000"}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_malformed_body_is_a_400_in_the_dialects_own_shape(server: Server, name: str) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"{server.url}/v1/chat/completions"
        async with session.post(url, data=BAD_BODIES[name], headers={"content-type": "application/json"}) as answer:
            assert answer.status == 400, await answer.text()
            error = (await answer.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]


async def status_line(server: Server, head: bytes, pieces: Iterable[bytes] = ()) -> bytes:
    """The first line of the answer to a request whose body is still being sent, over a connection of its own.

    It is cut at the end: closed in the ordinary way it would wait for the server to take what is left of the body.
    """
    reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))

    async def feed() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    writer.write(head)
    feeding = asyncio.create_task(feed())
    try:
        return await asyncio.wait_for(reader.readline(), 30)
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_body_over_the_limit_is_refused_before_it_is_read(server: Server) -> None:
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
    assert b" 413 " in await status_line(server, post + b"Content-Length: 9999999999\r\n\r\n")
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    over_the_limit = [chunk] * 33  # MiB; more than this is not on its way when the server answers
    assert b" 413 " in await status_line(server, post + b"Transfer-Encoding: chunked\r\n\r\n", over_the_limit)


async def test_wrong_methods_and_unknown_paths_say_what_would_be_right(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.delete(f"{server.url}/v1/chat/completions") as answer:
            assert (answer.status, "POST" in answer.headers["allow"]) == (405, True)
            assert set((await answer.json())["error"]) == {"message", "type", "param", "code"}
        async with session.get(f"{server.url}/v1/nothing") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "unknown_url"


def question(number: int) -> dict[str, Any]:
    """A request whose answer is long, and the same each time."""
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{number} {QUESTION * 20}"}],
        "max_tokens": 300,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }


@pytest.mark.slow
async def test_an_engine_killed_mid_stream_is_not_noticed_and_comes_back(tmp_path: Path) -> None:
    flags = ("--engines", "2", "--threads", "1", "--kv-cache-bytes", str(32 << 20), "--dtype", "float32")
    with Server(tmp_path, *flags) as server:
        async with server.async_client() as client:
            direct = await asyncio.gather(*(client.chat.completions.create(**question(n)) for n in range(6)))
            begun = [
                await client.chat.completions.with_raw_response.create(
                    **question(number), stream=True, stream_options={"include_usage": True}
                )
                for number in range(6)
            ]
            assert len({raw.headers["x-kvasir-engine"] for raw in begun}) == 2, "both engines have streams"
            assert all(
                raw.headers["x-kvasir-predicted-tokens"] == raw.headers["x-kvasir-cached-tokens"] for raw in begun
            )
            streams = [raw.parse() for raw in begun]
            first = [await anext(stream) for stream in streams]
            assert all(chunk.choices[0].delta.role == "assistant" for chunk in first)
            os.kill(server.children("gateway.cli")[0], signal.SIGKILL)

            async def rest(stream: openai.AsyncStream[Any]) -> tuple[str, str, Any]:
                text, end, usage = "", "cut off", None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    for choice in chunk.choices:
                        text, end = text + (choice.delta.content or ""), choice.finish_reason or end
                return text, end, usage

            ends = await asyncio.gather(*map(rest, streams))
            for number, (answer, (text, end, usage), raw) in enumerate(zip(direct, ends, begun, strict=True)):
                assert end == answer.choices[0].finish_reason == "length"
                assert text == answer.choices[0].message.content, f"question {number}"
                assert (usage.prompt_tokens, usage.completion_tokens) == (answer.usage.prompt_tokens, 300)
                assert usage.prompt_tokens_details.cached_tokens == int(raw.headers["x-kvasir-cached-tokens"])
            retries = re.search(r'^kvasir_retries_total{model="demo"} (\S+)$', server.get("/metrics"), re.MULTILINE)
            assert retries, "nothing was killed in the middle of an answer"
            assert any("tokens of the answer; request" in line for line in server.lines)
            # New requests go to the other engine at once, and to both when the first is back.
            assert await chat(client, "and now?") == "ok"
            await asyncio.to_thread(
                server.wait_until,
                lambda: len([e for e in server.get("/admin/stats")["engines"] if e["state"] == "ready"]) == 2,
                "two engines",
                60.0,
            )
            assert await chat(client, "and then?") == "ok"
        await wait_settled(server)


@pytest.mark.slow
async def test_an_answer_with_a_grammar_ends_with_an_error_when_its_engine_is_killed(tmp_path: Path) -> None:
    with Server(tmp_path, "--engines", "2", "--threads", "1", "--kv-cache-bytes", str(32 << 20)) as server:
        async with server.async_client() as client:
            stream = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=700,
                stream=True,
                extra_body={"guided_regex": "[a-z ]{4000}"},
            )
            await anext(stream)
            for engine in server.children("gateway.cli"):
                os.kill(engine, signal.SIGKILL)
            with pytest.raises(openai.APIError, match=r"(?i)engine"):
                async for _ in stream:
                    pass


async def streamed(client: openai.AsyncOpenAI, text: str) -> str:
    """As `chat`; `begun` is an error behind the first token."""
    begun = False
    try:
        stream = await client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": text}], max_tokens=4, temperature=0, stream=True
        )
        async for _ in stream:
            begun = True
    except openai.APIError as error:
        return "begun" if begun else type(error).__name__
    return "ok"


@pytest.mark.slow
async def test_killing_an_engine_before_the_first_token_is_not_noticed(tmp_path: Path) -> None:
    with Server(tmp_path, "--engines", "2", "--threads", "1", "--kv-cache-bytes", str(32 << 20)) as server:
        async with server.async_client() as client:
            asked = [asyncio.create_task(streamed(client, f"{n} {QUESTION * 100}")) for n in range(12)]
            await asyncio.to_thread(
                server.wait_until,
                lambda: all(engine["in_flight"] for engine in server.get("/admin/stats")["engines"]),
                "both engines have work",
            )
            os.kill(server.children("gateway.cli")[0], signal.SIGKILL)
            results = Counter(await asyncio.gather(*asked))
        assert set(results) <= {"ok", "begun"}, json.dumps(results)
        retries = re.search(r'^kvasir_retries_total{model="demo"} (\S+)$', server.get("/metrics"), re.MULTILINE)
        assert retries, "nothing was killed before its first token"
        assert float(retries[1]) >= 1


@pytest.mark.slow
async def test_a_terminated_server_ends_by_itself_with_what_it_started(tmp_path: Path) -> None:
    with Server(tmp_path, "--kv-cache-bytes", str(32 << 20)) as server:
        started = server.children("")
        async with server.async_client() as client:
            streaming = asyncio.create_task(chat(client, QUESTION, 300))
            await asyncio.to_thread(
                server.wait_until, lambda: server.get("/admin/stats")["engines"][0]["in_flight"] > 0, "a request runs"
            )
            server.process.send_signal(signal.SIGTERM)
            assert await streaming == "ok", "what runs is let end"
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240 - not a disk
