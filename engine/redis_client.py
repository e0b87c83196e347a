"""Redis clients by URL, for both packages: of one server, of the master behind sentinels, of a cluster. All three have
the methods of `Redis` that are used here, and fail with RedisError, OSError or TimeoutError while nothing can be done.

After a fail-over
    a script is unknown               `Script` sends its text again (EVAL, as proxies refuse SCRIPT LOAD)
    a connection leads to a replica   it is closed, and the next one asks where the master is
    the last writes may be lost       replication is asynchronous: callers compare versions, and leases end

In a cluster
    scripts      their keys, and those that they build, are in one slot, by a hash tag
    pipelines    are split by node, so that only commands for one key are in order; there are no transactions
    the layout   is read anew after a failure, while calls to other nodes go on
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar, cast

from redis.asyncio import Connection, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode, ClusterPipeline
from redis.asyncio.connection import ConnectionPool, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from engine import redis_url

_T = TypeVar("_T")

LOOK_S: Final = 1.0
"""Between two questions to the sentinels where the primary is."""

_NOT_THERE: Final = (RedisConnectionError, RedisTimeoutError, ClusterDownError, SlotNotCoveredError)
"""Of a command in a cluster: its node is gone, or nobody has the slot."""


def connect(url: str, *, timeout_s: float, max_connections: int, connect_timeout_s: float | None = None) -> Redis:
    """A client in which no read or write takes longer than `timeout_s`, nor a connect without its own limit. It tries
    again only once: a connection may have been closed while it was idle. Its owner ends it with `close`. Does not
    connect yet. Raises ValueError for a URL that redis_url.parse refuses.

    max_connections  at the same time, in a cluster to each node
    """
    read = redis_url.parse(url)
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": connect_timeout_s or timeout_s}
    options |= {"retry": Retry(NoBackoff(), 1), "max_connections": max_connections, **parse_url(read.server)}
    if read.kind == "single":
        kind = options.get("connection_class", Connection)
        options["connection_class"] = _OF_PRIMARY.get(kind, kind)
        return Redis.from_pool(ConnectionPool(**options))
    tls = options.pop("connection_class", None) is SSLConnection
    for name in ("host", "port"):
        options.pop(name)
    if read.kind == "cluster":
        del options["db"]
        nodes = [ClusterNode(host, port) for host, port in read.hosts]
        return cast("Redis", ClusterClient(startup_nodes=nodes, ssl=tls, reinitialize_steps=0, **options))
    sentinel: dict[str, Any] = {name: value for name, value in options.items() if name.startswith(("ssl_", "socket_"))}
    sentinel |= {**dict(read.sentinel), "ssl": tls, "retry": Retry(NoBackoff(), 1)}
    sentinels = _Sentinels(read.hosts, sentinel_kwargs=sentinel)
    options["connection_class"] = _SentinelSSLConnection if tls else _SentinelConnection
    kinds: dict[str, Any] = {"redis_class": _BehindSentinels, "connection_pool_class": _SentinelPool}
    return cast("Redis", sentinels.master_for(read.master, **kinds, **options))


async def close(redis: Redis) -> None:
    """Ends every connection of a client that `connect` made."""
    client: object = redis
    await (client.disconnect() if isinstance(client, ClusterClient) else redis.aclose())


class Script:
    """A Lua script by its digest, and by its text where the server does not know it: a new one, a new primary."""

    def __init__(self, redis: Redis, source: str) -> None:
        self._redis = redis
        self._source = source
        self._sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, *, keys: Sequence[str], args: Sequence[bytes | str | int | float] = ()) -> Any:
        """What it returns. `keys` are in one slot of a cluster."""
        rest = (len(keys), *keys, *args)
        try:
            return await self._redis.execute_command("EVALSHA", self._sha, *rest)  # type: ignore[no-untyped-call]
        except NoScriptError:
            return await self._redis.execute_command("EVAL", self._source, *rest)  # type: ignore[no-untyped-call]


@contextmanager
def _closed_is_lost() -> Iterator[None]:
    """A write to a connection that its server has just closed is a RuntimeError to uvloop, which redis-py passes on."""
    try:
        yield
    except RuntimeError as error:
        if "the handler is closed" not in str(error):
            raise
        raise RedisConnectionError("the server closed the connection") from None


# -- one server, and the master behind sentinels -----------------------------------------------------------------------


class _ToPrimary:
    """Of a connection: closed when its server has become a replica. Redis before 7 says so of scripts in the text of
    an error alone."""

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        with _closed_is_lost():
            await super().send_packed_command(*args, **options)  # type: ignore[misc]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except ResponseError as error:
            if not isinstance(error, ReadOnlyError) and "-READONLY" not in str(error):
                raise
            await self.disconnect()  # type: ignore[attr-defined]
            raise RedisConnectionError("this Redis is a replica, and no primary any more") from None


class _Connection(_ToPrimary, Connection):
    pass


class _SSLConnection(_ToPrimary, SSLConnection):
    pass


class _UnixConnection(_ToPrimary, UnixDomainSocketConnection):
    pass


class _SentinelConnection(_ToPrimary, SentinelManagedConnection):
    pass


class _SentinelSSLConnection(_ToPrimary, SentinelManagedSSLConnection):
    pass


_OF_PRIMARY: Final[Mapping[type, type]] = {
    Connection: _Connection,
    SSLConnection: _SSLConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


class _OneRun:
    """One run of a coroutine at a time for all who wait for it. It goes on when those who wait are cancelled: a call
    has less time than it takes to find out that the first host is gone."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None

    async def join(self, run: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        return cast("_T", await asyncio.shield(self.begin(run)))

    def begin(self, run: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[Any]:
        """The run that goes on, or a new one."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(run(), name="find redis")
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait any more
        return self._task

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


class _Sentinels(Sentinel):
    """Asks all sentinels at once, so that one that is gone costs nothing. What a sentinel says that missed the last
    fail-over counts only when no other answers."""

    def __init__(self, hosts: Sequence[tuple[str, int]], **options: Any) -> None:
        super().__init__(hosts, **options)  # type: ignore[no-untyped-call]
        self._asking = _OneRun()
        self._epoch = 0  # of the newest configuration that was seen

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        return await self._asking.join(lambda: self._ask(service_name))

    async def _ask(self, name: str) -> tuple[str, int]:
        asked = [asyncio.ensure_future(one.sentinel_masters()) for one in self.sentinels]
        late: tuple[str, int] | None = None
        silent = 0
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    masters: Any = await answer
                except (RedisError, OSError, TimeoutError):
                    silent += 1
                    continue
                state = masters.get(name)
                if state and self.check_master_state(state, name):
                    late = (state["ip"], state["port"])
                    if state["config-epoch"] >= self._epoch:
                        self._epoch = state["config-epoch"]
                        return late
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if late is not None:
            return late
        raise MasterNotFoundError(
            f"no sentinel knows a master {name!r} that is up: {len(asked)} were asked, {silent} did not answer"
        )

    async def aclose(self) -> None:
        await self._asking.end()
        await super().aclose()


class _SentinelPool(SentinelConnectionPool):
    """Also asks the sentinels every LOOK_S while it is used: a primary that hung and was replaced takes itself for one
    when it goes on, and what is written to it until a sentinel tells it is lost."""

    def __init__(self, service_name: str, sentinel_manager: _Sentinels, **options: Any) -> None:
        super().__init__(service_name, sentinel_manager, **options)  # type: ignore[no-untyped-call]
        self.looking = _OneRun()

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        self.looking.begin(self._look)
        return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]

    async def _look(self) -> None:
        """Ends when no call waits for an answer; those that hang are to find another connection afterwards."""
        used: set[Any] = self._in_use_connections
        while True:
            with suppress(RedisError, OSError, TimeoutError):
                # Closes idle connections when it is another one.
                address = await self.get_master_address()  # type: ignore[no-untyped-call]
                for connection in used:
                    if connection.is_connected and (connection.host, connection.port) != address:
                        connection.mark_for_reconnect()
            await asyncio.sleep(LOOK_S)
            if not used:
                return


class _BehindSentinels(Redis):
    """Also closes the connections to the sentinels."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        pool: Any = self.connection_pool
        await pool.looking.end()
        await super().aclose(close_connection_pool)
        await pool.sentinel_manager.aclose()


# -- a cluster ---------------------------------------------------------------------------------------------------------


class ClusterClient(RedisCluster):
    """Translates what a cluster alone raises to ConnectionError. A failure costs the calls of its node, not the calls
    of all others, whose connections redis-py closes before it reads the layout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(require_full_coverage=False, **options)
        self._reading = _OneRun()

    async def initialize(self, *args: Any, **options: Any) -> ClusterClient:
        if self._initialize:
            await self._reading.join(lambda: self._read_layout(*args, **options))
        return self

    async def _read_layout(self, *args: Any, **options: Any) -> None:
        try:
            await super().initialize(*args, **options)
        except RedisClusterException as error:
            raise RedisConnectionError(str(error)) from None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            with _closed_is_lost():
                return await super().execute_command(*args, **options)
        except asyncio.CancelledError:  # its time was over: the node may hang, and have been replaced
            await self.aclose()
            raise
        except (ClusterDownError, SlotNotCoveredError) as error:
            raise RedisConnectionError(str(error)) from None

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> _SplitPipeline:
        assert not transaction, "redis-py blocks the event loop with it: write a script"
        return _SplitPipeline(self)  # type: ignore[abstract]

    async def aclose(self) -> None:
        """The layout is read anew before the next command. redis-py calls this after failures; the owner calls
        `close`."""
        self._initialize = True

    async def disconnect(self) -> None:
        """Ends every connection."""
        await self._reading.end()
        self._initialize = True
        await self.nodes_manager.aclose()
        await self.nodes_manager.aclose("startup_nodes")

    async def __aexit__(self, *exc: object) -> None:
        await self.disconnect()


class _SplitPipeline(ClusterPipeline):
    """Commands for one key stay in order."""

    def unlink(self, *names: Any) -> Any:  # redis-py's is a coroutine here, unlike that of other pipelines
        return self.execute_command("UNLINK", *names)

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:
        try:
            with _closed_is_lost():
                results = await super().execute(raise_on_error, allow_redirections)
        except asyncio.CancelledError:
            await self.cluster_client.aclose()
            raise
        except (ClusterDownError, SlotNotCoveredError) as error:
            raise RedisConnectionError(str(error)) from None
        if lost := next((result for result in results if isinstance(result, _NOT_THERE)), None):
            await self.cluster_client.aclose()
            raise RedisConnectionError(str(lost)) from None
        return results
