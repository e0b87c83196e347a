"""Clients of a cluster and of the master behind sentinels, and what a fail-over does to them. Real redis-servers."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from redis.asyncio import Redis, SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from engine.redis_client import Script, close, connect
from tests.fakes.certificates import Authority
from tests.fakes.redis_fleet import HOST, MASTER, ClusterFleet, SentinelFleet, opened
from tests.fakes.redis_process import RedisProcess
from tests.fakes.waiting import until

KEYS = [f"key-{number}" for number in range(30)]
"""Of all nodes."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterFleet]:
    with ClusterFleet(tmp_path_factory.mktemp("c")) as fleet:
        yield fleet


async def test_a_pipeline_reaches_all_nodes_and_keeps_the_order_of_one_key(cluster: ClusterFleet) -> None:
    async with opened(cluster.url) as redis, redis.pipeline(transaction=False) as pipe:
        for key in KEYS:
            pipe.set(key, "old")
            pipe.unlink(key)
            pipe.append(key, "new")
            pipe.get(key)
        assert (await pipe.execute())[3::4] == [b"new"] * len(KEYS)


async def test_a_script_is_sent_again_where_it_is_not_known(cluster: ClusterFleet) -> None:
    async with opened(cluster.url) as redis:
        script = Script(redis, "return redis.call('INCR', KEYS[1])")
        for count in (1, 2):
            cluster.flush()
            assert [await script(keys=[key]) for key in KEYS] == [1] * len(KEYS), count


async def test_a_script_needs_no_script_load() -> None:
    """Managed proxies refuse it."""
    sent: list[str] = []

    class Proxy:
        async def execute_command(self, name: str, *args: Any) -> int:
            sent.append(name)
            if name == "EVALSHA":
                raise NoScriptError("NOSCRIPT")
            return 1

    assert await Script(cast("Redis", Proxy()), "return 1")(keys=["a"]) == 1
    assert sent == ["EVALSHA", "EVAL"]


async def test_a_lost_node_costs_the_keys_of_others_nothing(tmp_path: Path) -> None:
    with ClusterFleet(tmp_path, "--cluster-require-full-coverage", "no") as fleet:
        async with opened(fleet.url) as redis:
            for key in KEYS:
                await redis.set(key, "1")
            fleet.nodes[0].kill()
            answers = await asyncio.gather(*(redis.get(key) for key in KEYS), return_exceptions=True)
            lost = [answer for answer in answers if isinstance(answer, Exception)]
            assert 0 < len(lost) < len(KEYS)
            assert all(isinstance(answer, (RedisError, OSError)) for answer in lost)
            assert {answer for answer in answers if not isinstance(answer, Exception)} == {b"1"}
            with pytest.raises(RedisConnectionError):
                pipe = redis.pipeline(transaction=False)
                for key in KEYS:
                    pipe.get(key)
                await pipe.execute(raise_on_error=False)


async def test_tls_is_for_every_node_and_every_sentinel() -> None:
    options = "?ssl_ca_certs=/etc/ca.pem&ssl_check_hostname=false"
    redis: Any = connect(f"rediss+sentinel://u:p@one,two/m/2{options}", timeout_s=1, max_connections=4)
    sentinels = [one.connection_pool.make_connection() for one in redis.connection_pool.sentinel_manager.sentinels]
    cluster: Any = connect(f"rediss+cluster://u:p@one,two{options}", timeout_s=1, max_connections=4)
    nodes = [node.acquire_connection() for node in cluster.startup_nodes]
    primary = redis.connection_pool.make_connection()
    for connection in (primary, *sentinels, *nodes):
        assert isinstance(connection, SSLConnection)
        assert (connection.ssl_context.ca_certs, connection.ssl_context.check_hostname) == ("/etc/ca.pem", False)
        assert connection.socket_timeout == 1
    assert [one.username for one in (primary, *nodes)] == ["u", "u", "u"]
    assert (primary.db, [one.username for one in sentinels]) == (2, [None, None]), "they have a login of their own"
    await close(redis)
    await close(cluster)


async def test_a_cluster_that_is_not_there_is_unreachable() -> None:
    with closing(socket.socket()) as free:
        free.bind((HOST, 0))
        redis = connect(f"redis+cluster://u:pa5sw0rd@{HOST}:{free.getsockname()[1]}", timeout_s=1, max_connections=4)
        with pytest.raises(RedisConnectionError) as error:
            await redis.get("a")
        assert "pa5sw0rd" not in str(error.value)
        await close(redis)


async def test_a_server_that_became_a_replica_is_left(own_redis: RedisProcess) -> None:
    """By a write and by a script that writes, whose errors differ."""
    redis = connect(own_redis.url, timeout_s=5, max_connections=4)
    script = Script(redis, "return redis.call('INCR', KEYS[1])")
    assert await script(keys=["a"]) == 1
    await redis.execute_command("REPLICAOF", HOST, "1")
    for write in (lambda: redis.set("a", "2"), lambda: script(keys=["a"])):
        with pytest.raises(RedisConnectionError):
            await write()
    await redis.execute_command("REPLICAOF", "NO", "ONE")
    assert await script(keys=["a"]) == 2
    await close(redis)


@pytest.mark.parametrize("of_cluster", [False, True])
def test_a_write_to_a_connection_that_was_just_closed_is_a_lost_connection(
    cluster: ClusterFleet, own_redis: RedisProcess, of_cluster: bool
) -> None:
    """redis-py has looked whether it is open; then it ends, and uvloop raises what is no OSError."""

    async def main() -> None:
        async with opened(cluster.url if of_cluster else own_redis.url) as redis:
            await redis.get("a")
            kinds = (redis.nodes_manager if of_cluster else redis.connection_pool).connection_kwargs  # type: ignore[attr-defined]
            kind = kinds["connection_class"] if of_cluster else redis.connection_pool.connection_class
            with pytest.MonkeyPatch.context() as patch:
                write = kind._send_packed_command

                async def close_and_write(self: Any, command: Any) -> None:
                    self._writer.transport.abort()
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    await write(self, command)

                patch.setattr(kind, "_send_packed_command", close_and_write)
                with pytest.raises(RedisConnectionError, match="closed"):
                    await redis.get("a")
                with pytest.raises(RedisConnectionError, match="closed"):
                    await redis.pipeline(transaction=False).get("a").execute()
            assert await redis.get("a") is None

    uvloop.run(main())


async def test_rediss_is_tls_with_the_ca_and_the_certificate_that_the_url_names(
    tmp_path: Path, single_redis_url: str
) -> None:
    """What ends TLS here stands in front of a real server: the one of the tests may be built without it."""
    folder = Authority().issue(tmp_path / "tls", use=None)
    wants = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.crt"))
    wants.verify_mode = ssl.CERT_REQUIRED
    wants.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(single_redis_url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=wants) as server:
        url = f"rediss://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ca, own = f"ssl_ca_certs={folder}/ca.crt", f"ssl_certfile={folder}/tls.crt&ssl_keyfile={folder}/tls.key"
        async with opened(f"{url}?{ca}&{own}") as redis:
            script = Script(redis, "return redis.call('INCR', KEYS[1])")
            assert [await script(keys=["a"]) for _ in range(3)] == [1, 2, 3]
        for lacking in (url, f"{url}?{ca}", f"{url}?{own}"):
            async with opened(lacking) as redis:
                with pytest.raises(RedisError):
                    await redis.get("a")


@pytest.mark.slow
async def test_sentinels_that_are_gone_cost_nothing_and_an_unknown_master_is_named(tmp_path: Path) -> None:
    with SentinelFleet(tmp_path) as fleet:
        for sentinel in fleet.sentinels[:2]:
            sentinel.kill()
        async with opened(fleet.url) as redis:
            assert await redis.set("a", "1")
        async with opened(fleet.url.replace(MASTER, "other")) as redis:
            with pytest.raises(RedisConnectionError, match="no sentinel knows a master 'other' that is up"):
                await redis.get("a")


@pytest.mark.slow
async def test_the_next_call_after_a_fail_over_reaches_the_new_primary(tmp_path: Path) -> None:
    with SentinelFleet(tmp_path) as fleet:
        async with opened(fleet.url) as redis:
            script = Script(redis, "return redis.call('INCR', KEYS[1])")
            assert [await script(keys=["a"]) for _ in range(3)] == [1, 2, 3]
            await until(lambda: fleet.replica.ask("GET", "a") == b"3")
            fleet.primary.kill()

            async def answered() -> bool:
                try:
                    return bool(await script(keys=["a"]) >= 4)  # again, when the connection ended before its answer
                except (RedisError, OSError):
                    return False

            await until(answered)
            fleet.primary.start()  # as a primary, until sentinels make it a replica
            await until(lambda: fleet.primary.ask("ROLE")[0] == b"slave", 60)
            assert await script(keys=["a"]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_the_replica_of_a_clusters_node_takes_its_place(tmp_path: Path, end: signal.Signals) -> None:
    """Also when calls end before the node does."""
    with ExitStack() as stack:
        fleet = stack.enter_context(ClusterFleet(tmp_path))
        fleet.add_replica(stack, tmp_path / "replica")
        redis = connect(fleet.url, timeout_s=1, max_connections=64)
        for key in KEYS:
            await redis.set(key, "1")
        fleet.nodes[0].process.send_signal(end)

        async def all_answer() -> bool:
            try:
                async with asyncio.timeout(0.25):
                    return [await redis.get(key) for key in KEYS] == [b"1"] * len(KEYS)
            except (RedisError, OSError):
                return False

        await until(all_answer)
        await close(redis)
