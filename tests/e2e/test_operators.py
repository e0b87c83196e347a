"""What operators see of `kvasir gateway` processes on one Redis: in a browser, from two of them, after a restart."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import redis as redis_client

from gateway.admin.requests import MOST
from tests.fakes.browsing import MARKS, chromium, visit
from tests.fakes.demo_traffic import TENANTS
from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import ADMIN_KEY, Server, inside
from tests.fakes.upstream import CHAT, StubUpstream, upstream
from tests.fakes.waiting import until

ATLAS = TENANTS["atlas"]
ASK: dict[str, Any] = {"model": "up-1", "messages": [{"role": "user", "content": "Is a berth free?"}]}
WATCHED_S = 8.0
MOST_MS = 10.0
"""Of the gateway's CPU, that a page may ask for in a second."""
MORE_LOOKS = 4
LIMIT_S = 60.0
RING = "kvasir:{requests}.ring"


@asynccontextmanager
async def gateway(folder: Path, redis: RedisProcess, hosted: StubUpstream) -> AsyncIterator[Server]:
    config = f"""
    [auth]
    admin_keys = ["{ADMIN_KEY}"]
    [[tenants]]
    name = "atlas"
    keys = ["{ATLAS}"]
    [[upstreams]]
    name = "hosted"
    url = "{hosted.settings().url}"
    models = ["up-1"]
    [[prices]]
    model = "up-1"
    input = 2
    cached_read = 0.5
    output = 8
    """
    server = Server(folder, "--redis-url", redis.url, command="gateway", config=config)
    async with inside(server):
        yield server


class Client:
    """Speaks to gateways as programs do."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def chat(self, server: Server, key: str = ATLAS, **more: Any) -> tuple[int, str]:
        """Status and id."""
        headers = {"Authorization": f"Bearer {key}"}
        async with self._session.post(f"{server.url}/v1/chat/completions", json=ASK | more, headers=headers) as answer:
            await answer.read()
            return answer.status, answer.headers["x-request-id"]

    async def admin(self, server: Server, path: str, body: Any = None, key: str = ADMIN_KEY) -> Any:
        """A GET, or with a body a POST."""
        method, headers = "GET" if body is None else "POST", {"Authorization": f"Bearer {key}"}
        async with self._session.request(method, server.url + path, json=body, headers=headers) as answer:
            assert answer.status in (200, 201), await answer.text()
            return await answer.json()

    async def log_in(self, server: Server) -> dict[str, str]:
        """Headers of the new session."""
        async with self._session.post(f"{server.url}/admin/session", json={"key": ADMIN_KEY}) as answer:
            cookies: SimpleCookie = answer.cookies
            csrf = (await answer.json())["csrf"]
        return {"Cookie": f"kvasir_session={cookies['kvasir_session'].value}", "x-kvasir-csrf": csrf}

    async def with_session(self, server: Server, session: dict[str, str], method: str, path: str) -> int:
        async with self._session.request(method, server.url + path, headers=session) as answer:
            return answer.status


@pytest.mark.slow
async def test_a_restart_keeps_what_operators_see_and_have_made(tmp_path: Path, own_redis: RedisProcess) -> None:
    """Nobody looks before it: what is written is what a gateway writes by itself as it ends."""
    async with upstream(CHAT) as hosted, aiohttp.ClientSession() as session:
        client = Client(session)
        async with gateway(tmp_path, own_redis, hosted) as server:
            going, over = [await client.log_in(server) for _ in range(2)]
            assert await client.with_session(server, over, "DELETE", "/admin/session") == 200
            await client.admin(server, "/admin/tenants", {"name": "delta", "requests_per_minute": 600})
            made = await client.admin(server, "/admin/keys", {"tenant": "delta", "name": "laptop"})
            sent = [await client.chat(server, key) for key in (ATLAS, ATLAS, made["key"])]
            sent.append(await client.chat(server, model="missing"))
            known = [await client.admin(server, path) for path in ("/admin/tenants", "/admin/keys")]
        assert [status for status, _ in sent] == [200, 200, 200, 404]
        async with gateway(tmp_path, own_redis, hosted) as server:
            totals = (await client.admin(server, "/admin/overview"))["totals"]
            assert (totals["requests"], totals["errors"], totals["cached_tokens"]) == (3, 1, 3 * 64)
            assert totals["cost"] == (await client.admin(server, "/admin/ledger"))["total"]["used"]["cost"] != {}
            rows = (await client.admin(server, "/admin/requests"))["requests"]
            assert [row["id"] for row in rows] == [id_ for _, id_ in reversed(sent)]
            assert [await client.admin(server, path) for path in ("/admin/tenants", "/admin/keys")] == known
            assert (await client.chat(server, made["key"]))[0] == 200
            told = [await client.with_session(server, one, "GET", "/admin/stats") for one in (going, over)]
            assert told == [200, 401]


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    async with chromium() as browser:
        yield browser


FIGURES = "() => [...document.querySelectorAll('#page .figures > div')].map(one => one.innerText)"
LINES = "() => [...document.querySelectorAll('#page tbody tr')].map(one => one.innerText)"


def marked(test: Any) -> Any:
    for mark in (pytest.mark.slow, *MARKS):
        test = mark(test)
    return test


@marked
async def test_two_gateways_on_one_redis_show_the_same_numbers_in_a_browser(
    tmp_path: Path, own_redis: RedisProcess, browser: Any
) -> None:
    async with AsyncExitStack() as stack:
        hosted = await stack.enter_async_context(upstream(CHAT))
        client = Client(await stack.enter_async_context(aiohttp.ClientSession()))
        servers = [await stack.enter_async_context(gateway(tmp_path / name, own_redis, hosted)) for name in "ab"]
        views = [await stack.enter_async_context(visit(browser, server)) for server in servers]
        for number in range(12):
            more = {"model": "missing"} if number % 5 == 4 else {}
            await client.chat(servers[number % 3 % 2], **more)

        async def same(script: str, holds: Any) -> list[str]:
            async def look() -> bool:
                shown[:] = [await view.page.evaluate(script) for view in views]
                return shown[0] == shown[1] and holds(shown[0])

            shown: list[list[str]] = []
            await until(look, LIMIT_S)
            return shown[0]

        for view in views:
            await view.open("overview")
        (requests,) = [
            one
            for one in await same(FIGURES, lambda texts: any("2 failed" in text for text in texts))
            if "failed" in one
        ]
        assert requests.split("\n")[1] == "10"
        for view in views:
            await view.open("requests")
        lines = await same(LINES, lambda rows: len(rows) == 12)
        assert sum("404" in line for line in lines) == 2
        for view in views:
            await view.open("tenants")
        await same(LINES, lambda rows: any("atlas" in row for row in rows))


def cpu_ms(server: Server) -> float:
    """Of all threads of the process, to the nanosecond."""
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e6


async def passed(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    await until(lambda: time.monotonic() >= end_s, seconds + LIMIT_S)


@marked
async def test_no_page_asks_a_gateway_for_more_than_ten_milliseconds_of_cpu_a_second(
    tmp_path: Path, own_redis: RedisProcess, browser: Any
) -> None:
    """Opening it included, with as many requests kept as may be."""
    async with upstream(CHAT) as hosted, aiohttp.ClientSession() as session:
        client = Client(session)
        async with gateway(tmp_path, own_redis, hosted) as server:
            for _ in range(20):
                await client.chat(server)
            await client.admin(server, "/admin/requests")
            fill(own_redis)
            (newest,) = (await client.admin(server, "/admin/requests?limit=1"))["requests"]
            async with visit(browser, server) as one:
                await one.open("playground")  # what the shell needs is remembered from here on
                pages = [address.removeprefix("#/") for _, address in await one.pages()]
            await passed(2.0)
            before = cpu_ms(server)
            await passed(WATCHED_S)
            idle = (cpu_ms(server) - before) / WATCHED_S

            async def watch(name: str) -> float:
                async with visit(browser, server) as one:
                    before, began_s = cpu_ms(server), time.monotonic()
                    await one.open(name)
                    await passed(WATCHED_S - (time.monotonic() - began_s))
                    return (cpu_ms(server) - before) / (time.monotonic() - began_s) - idle

            # What else runs on a machine makes a page dearer, never cheaper: the least of some looks is its own. On a
            # slower machine an idle gateway, about MOST_MS, takes more as well.
            most = max(MOST_MS, idle)
            asked = dict[str, float]()
            for name in (*pages, f"requests/{newest['row']}"):
                asked[name] = await watch(name)
                for _ in range(MORE_LOOKS if asked[name] > most else 0):
                    asked[name] = min(asked[name], await watch(name))
            print(f"idle {idle:.1f} ms/s;", ", ".join(f"{name} {ms:.1f}" for name, ms in asked.items()))
            assert len(pages) >= 8
            assert {name: ms for name, ms in asked.items() if ms > most} == {}


def fill(own_redis: RedisProcess) -> None:
    """The ring, with copies of the requests in it."""
    with redis_client.Redis(unix_socket_path=str(own_redis.socket)) as client:
        rows = [orjson.loads(row) for row in client.lrange(RING, 0, -1)]  # type: ignore[union-attr]
        copies = [orjson.dumps(rows[number % len(rows)] | {"row": f"copy-{number}"}) for number in range(MOST)]
        client.rpush(RING, *copies)
        client.ltrim(RING, 0, MOST - 1)
        assert client.llen(RING) == MOST
