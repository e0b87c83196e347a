"""Several real redis-servers for tests: a cluster of primaries, or a primary and its replica under sentinels."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import redis
from redis.asyncio import Redis, RedisCluster

from gateway.redis_server import find_binary
from gateway.storage.redis_calls import close, connect
from tests.fakes.ports import free_port
from tests.fakes.redis_process import START_LIMIT_S

HOST = "127.0.0.1"
SLOTS = 16384
MASTER = "mymaster"


def wait_for(ready: Callable[[], Any], what: str) -> None:
    """Raises TimeoutError when it does not become true."""
    tick = threading.Event()
    for _ in range(int(START_LIMIT_S / 0.02)):
        try:
            if ready():
                return
        except redis.RedisError:
            pass
        tick.wait(0.02)
    raise TimeoutError(what)


class RedisNode:
    """One redis-server on a TCP port, or a sentinel. Context manager."""

    def __init__(self, folder: Path, *options: str, config: str | None = None) -> None:
        """`config` is the text of a sentinel's file."""
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisNode:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def client(self, **options: Any) -> redis.Redis:
        return redis.Redis(host=HOST, port=self.port, **options)

    def ask(self, *command: str | int) -> Any:
        with self.client() as client:
            return client.execute_command(*command)

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [str(find_binary()), "--port", str(self.port)]
        if self._config is not None:
            file = self._folder / "sentinel.conf"
            file.write_text(self._config)
            command = [str(find_binary()), str(file), "--port", str(self.port), "--sentinel"]
        command += ["--bind", HOST, "--dir", str(self._folder), *self._options]
        if self._config is None:
            command += ["--save", ""]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: self.ask("PING"), "redis-server does not answer")

    def kill(self) -> None:
        """SIGKILL. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process


class RedisFleet:
    """Context manager around `nodes`, which share `url`."""

    url: str
    nodes: list[RedisNode]
    _stack: ExitStack

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start(self, stack: ExitStack) -> None:
        """Starts all processes, which end with the stack, and returns when they work together."""
        raise NotImplementedError

    def flush(self) -> None:
        """Empties all databases, and forgets all scripts."""
        for node in self.nodes:
            with node.client() as client:
                if client.role()[0] in (b"master", "master"):
                    client.flushall()
                    client.script_flush()


class ClusterFleet(RedisFleet):
    """Three primaries of a Redis Cluster, without replicas."""

    def __init__(self, folder: Path, *options: str) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *options)
        self._options = options
        self.nodes = [RedisNode(folder / str(index), *options) for index in range(3)]
        self.url = "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    def _start(self, stack: ExitStack) -> None:
        for index, node in enumerate(self.nodes):
            stack.enter_context(node)
            first, last = SLOTS * index // len(self.nodes), SLOTS * (index + 1) // len(self.nodes)
            node.ask("CLUSTER", "ADDSLOTS", *range(first, last))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for node in self.nodes[1:]:
            node.ask("CLUSTER", "MEET", HOST, self.nodes[0].port)
        wait_for(lambda: all(self._is_whole(node) for node in self.nodes), "the cluster does not come together")

    def add_replica(self, stack: ExitStack, folder: Path) -> None:
        """Of the first primary. Returns when all nodes know it."""
        replica, first = stack.enter_context(RedisNode(folder, *self._options)), self.nodes[0]
        replica.ask("CLUSTER", "MEET", HOST, first.port)
        name = _text(first.ask("CLUSTER", "MYID"))
        wait_for(lambda: replica.ask("CLUSTER", "REPLICATE", name), "the replica does not know the primary")
        wait_for(lambda: replica.ask("ROLE")[3] == b"connected", "the replica does not follow")

        def is_known(node: RedisNode) -> bool:
            return any(len(slots) == 4 for slots in node.ask("CLUSTER", "SLOTS"))

        wait_for(lambda: all(is_known(node) for node in self.nodes), "the replica is not known")

    def _is_whole(self, node: RedisNode) -> bool:
        info = _text(node.ask("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and f"cluster_known_nodes:{len(self.nodes)}\r\n" in info


class SentinelFleet(RedisFleet):
    """A primary, its replica, and three sentinels that replace it within seconds."""

    def __init__(self, folder: Path, down_after_ms: int = 1000) -> None:
        self._folder = folder
        self.primary = RedisNode(folder / "primary", "--repl-diskless-sync-delay", "0")
        self.replica = RedisNode(folder / "replica", "--replicaof", HOST, str(self.primary.port))
        config = (
            f"sentinel monitor {MASTER} {HOST} {self.primary.port} 2\n"
            f"sentinel down-after-milliseconds {MASTER} {down_after_ms}\n"
            f"sentinel failover-timeout {MASTER} 6000\n"
        )
        self.sentinels = [RedisNode(folder / f"sentinel{index}", config=config) for index in range(3)]
        self.nodes = [self.primary, self.replica]
        self.url = "redis+sentinel://" + ",".join(f"{HOST}:{one.port}" for one in self.sentinels) + f"/{MASTER}"

    def _start(self, stack: ExitStack) -> None:
        for node in (self.primary, self.replica, *self.sentinels):
            stack.enter_context(node)
        wait_for(lambda: self.replica.ask("ROLE")[3] == b"connected", "the replica does not follow")
        wait_for(lambda: all(self._is_ready(one) for one in self.sentinels), "the sentinels do not find one another")

    def _is_ready(self, sentinel: RedisNode) -> bool:
        state = fields(sentinel.ask("SENTINEL", "MASTER", MASTER))
        return state["num-other-sentinels"] == "2" and state["num-slaves"] == "1"


def fields(found: Any) -> dict[str, str]:
    """What a node says by name, in either version of the protocol."""
    told = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
    return {_text(name): _text(value) for name, value in told.items()}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Redis]:
    """A client of the product's own."""
    client = connect(url, START_LIMIT_S)
    try:
        yield client
    finally:
        await close(client)


async def keys_of(client: Redis, pattern: str = "*") -> list[bytes]:
    """On all nodes, sorted."""
    nodes = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
    return sorted(await client.keys(pattern, **nodes))
