"""`kvasir replicas` against real gateway processes, over servers that only say what they are."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import cli
from tests.fakes.redis_process import RedisProcess
from tests.fakes.replica_server import ReplicaServer, replica_server
from tests.fakes.server import Server, inside
from tests.fakes.waiting import until

CONFIG = '[[tenants]]\nname = "anonymous"\nkeys = ["none-key-1"]\n\n[auth]\nadmin_keys = ["admin-key-1"]\n'
LIMIT_S = 60.0


class Command:
    """`kvasir replicas` with the admin key, for one gateway."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.url = url
        self._capsys = capsys
        monkeypatch.setenv("KVASIR_API_KEY", "admin-key-1")

    async def __call__(self, name: str, *arguments: str) -> tuple[int, str]:
        """In a thread of its own: the command has its own event loop. Returns its status and what it printed."""
        self._capsys.readouterr()
        status = await asyncio.to_thread(cli.main, ["replicas", name, *arguments, "--url", self.url])
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err

    async def shown(self) -> dict[str, Any]:
        _, text = await self("list", "--json")
        return {one["name"]: one for one in map(json.loads, text.splitlines())}

    async def states(self) -> dict[str, str]:
        return {name: one["state"] for name, one in (await self.shown()).items()}

    async def until(self, **states: str) -> None:
        async def so() -> bool:
            return await self.states() == states

        await until(so, LIMIT_S)


@asynccontextmanager
async def replicas(count: int, **more: Any) -> AsyncIterator[list[ReplicaServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(replica_server(events_port=None, **more)) for _ in range(count)]


async def complete(url: str) -> int:
    body = {"model": "demo", "prompt": "hello", "max_tokens": 1}
    headers = {"Authorization": "Bearer none-key-1"}
    session = aiohttp.ClientSession(headers=headers)
    async with session, session.post(f"{url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_replicas_come_and_go_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replicas(2) as [one, other]:
        server = Server(tmp_path / "d", "--replica", f"vllm:file={one.url}", command="gateway", config=CONFIG)
        async with inside(server):
            kvasir = Command(server.url, monkeypatch, capsys)
            await kvasir.until(file="joined")
            assert await kvasir("add", "new", "vllm", other.url) == (0, "new: added\n")
            await kvasir.until(file="joined", new="joined")
            status, text = await kvasir("list")
            assert status == 0
            assert re.search(
                r"^new: joined: demo on vllm 0\.32\.0 at http://\S+; index fallback \(the server", text, re.M
            )
            assert await kvasir("drain", "--least") == (0, "file: draining\n")
            assert await kvasir.states() == {"file": "draining", "new": "joined"}
            one.got.clear()
            assert await complete(server.url) == 200
            assert [path for path, _ in one.got] == []
            assert (await kvasir("drain", "--least"))[0] == 1
            assert await kvasir("drain", "file", "--undo") == (0, "file: serving\n")
            assert await kvasir("remove", "new") == (0, "new: removed\n")
            assert await kvasir.states() == {"file": "joined"}
            for arguments, words in (
                (("remove", "file"), "one of the settings"),
                (("remove", "new"), "no replica new"),
                (("add", "x", "ollama", other.url), "Invalid value for 'kind'"),
                (("add", "x", "vllm", one.url), "server of replica file"),
                (("add", "x", "vllm", other.url, "--key-env", "HOME"), "begin with REPLICA_"),
                (("add", "x", "vllm", other.url, "--key-env", "REPLICA_X"), "REPLICA_X is not set"),
            ):
                status, text = await kvasir(*arguments)
                assert (status, text.count("\n")) == (1, 1)
                assert words in text


async def test_a_server_that_cannot_be_reached_is_shown_with_the_reason_and_joins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replicas(2) as [one, other]:
        other.answers["/v1/models"] = 503
        server = Server(tmp_path / "d", "--replica", f"vllm:file={one.url}", command="gateway", config=CONFIG)
        async with inside(server):
            kvasir = Command(server.url, monkeypatch, capsys)
            assert (await kvasir("add", "away", "vllm", other.url))[0] == 0

            async def is_explained() -> bool:
                return "503" in (await kvasir.shown())["away"]["reason"]

            await until(is_explained, LIMIT_S)
            assert (await kvasir.states())["away"] == "joining"
            assert await complete(server.url) == 200
            del other.answers["/v1/models"]
            await kvasir.until(file="joined", away="joined")


async def test_all_workers_have_what_one_of_them_was_told_and_a_restart_keeps_it(
    tmp_path: Path, own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with replicas(2) as [one, other]:
        flags = ("--replica", f"vllm:file={one.url}", "--redis-url", own_redis.url, "--redis-timeout-s", "10")
        server = Server(tmp_path / "d", *flags, "--workers", "2", command="gateway", config=CONFIG)
        async with inside(server):
            kvasir = Command(server.url, monkeypatch, capsys)
            await kvasir("add", "new", "vllm", other.url)
            await kvasir.until(file="joined", new="joined")  # at both workers
            await kvasir("drain", "file")
            await kvasir.until(file="draining", new="joined")

            async def all_drain() -> bool:
                one.got.clear()
                for _ in range(8):  # which worker gets a connection is chance
                    assert await complete(server.url) == 200
                return not one.got

            await until(all_drain, LIMIT_S)
            sent = sum(bool(body.get("stream")) for path, body in other.got if path == "/v1/completions")
            assert (await kvasir.shown())["new"]["requests"] == sent
        again = Server(tmp_path / "e", *flags, command="gateway", config=CONFIG)
        async with inside(again):
            kvasir.url = again.url
            await kvasir.until(file="draining", new="joined")
