"""Several processes that are one gateway (`server.workers`): this one binds a socket for each on the same port, starts
them, starts one that died again with the same socket, and adds up what they count. It answers no request itself.

    parent    sockets (SO_REUSEPORT: Linux spreads new connections over them), Redis and engines of `kvasir serve`
    worker    a whole gateway (serving.py) on its socket, with its part of the limits that no Redis keeps

The sockets stay with the parent, so a connection is never lost between a worker's end and the parent's notice of it. A
socket without a worker does not listen: new connections go to the others.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

from engine import tls
from engine.config import ConfigError
from gateway import tasks
from gateway.admin.audit import AuditLog
from gateway.admin.sums import Snapshot, added, counters
from gateway.api.descriptors import raise_limit
from gateway.app import replica_keys, upstream_keys, upstream_proxies
from gateway.config import Reloaded, Settings
from gateway.errors import KvasirError, OverloadedError
from gateway.parent import Place
from gateway.peer import Peer
from gateway.processes import Child, Children, ChildStartError
from gateway.reload import Reloading
from gateway.serving import certificate_of, own_engines_of, start_redis
from gateway.vllm_process import choose_engine

log = logging.getLogger(__name__)

WORKER_COMMAND: Final = (sys.executable, "-m", "gateway.worker")

LOOK_S: Final = 1.0
"""From one look at what workers have counted to the next: a worker that is killed loses no more than that."""

ASK_S: Final = 1.0
"""For a worker to say what it has counted; then its last figures are taken."""

USE_S: Final = 5.0
"""For a worker to have changed settings."""

MAX_SILENT: Final = 30
"""Looks in a row that a worker does not answer; then it hangs, with all its connections, and is killed."""

MORE_S: Final = 10.0
"""That a worker gets to end, besides server.shutdown_s for its requests."""

SHARED_OUT: Final[Mapping[str, Sequence[str]]] = {
    "server": ("max_bodies_bytes",),
    "prompt": ("memo_bytes",),
    "queue": ("max_waiting", "max_waiting_per_tenant", "slots_per_engine", "batch_slots_per_engine"),
    "batches": ("max_in_flight",),
    "response_cache": ("max_memory_bytes", "max_rendered_bytes"),
    "semantic_cache": ("max_memory_bytes",),
    "upstreams": ("max_connections", "max_waiting", "max_in_flight", "batch_slots"),
}
"""Settings of one gateway of which each worker gets its part. All others hold for each, or are kept in Redis."""


async def serve_workers(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    own_engines: bool,
    say: Callable[[str], None],
    read: Callable[[], Settings],
) -> None:
    """As serving.serve, with several processes; a second signal ends them at once. Raises ConfigError without a Redis,
    or for limits that cannot be shared out, OSError, and ChildStartError for a worker or engine that cannot start."""
    raise_limit()
    stop = asyncio.Event()
    fatal: list[ChildStartError] = []

    def give_up(error: ChildStartError) -> None:
        fatal.append(error)
        stop.set()

    given, settings = settings, choose_engine(settings, environ) if own_engines else settings
    _check(settings, environ)
    certificate_of(settings)
    tls.between(settings.engine.tls_dir, serves=False)
    parts = [part_of(settings, number) for number in range(settings.server.workers)]
    async with AsyncExitStack() as stack:
        sockets = bind(settings.server.host, settings.server.port, len(parts))
        stack.callback(_close, sockets)
        redis_url = settings.redis.url
        if redis_url is None and own_engines:
            redis_url = await start_redis(settings, stack)
        if redis_url is None:
            raise ConfigError(f"server.workers: {len(parts)} workers share what they know in Redis; set redis.url")
        joined: set[str] = set()
        engines = own_engines_of(settings, redis_url, environ, joined.__contains__, give_up) if own_engines else None
        urls = {} if engines is None else engines.urls
        name = uuid.uuid4().hex
        places = [Place(part, own_engines, redis_url, urls, name) for part in parts]
        workers = Workers(places, sockets, joined, say, give_up)

        def ask_to_stop() -> None:
            if stop.is_set():
                log.warning("a second signal: workers end now, whatever they do")
                workers.kill()
            stop.set()

        reloading = Reloading(read, given, settings, partial(_use, workers, environ))
        workers.reload = reloading.reload
        reloading.at_hangup(ask_to_stop, AuditLog(settings.server.data_dir / "audit.jsonl", time.time).reloaded)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ask_to_stop)
        if engines is not None:
            await stack.enter_async_context(engines)
        await stack.enter_async_context(workers)
        await stop.wait()
        _close(sockets)  # of ours: a worker's own is open until it closes it
    if fatal:
        raise fatal[0]


def _check(settings: Settings, environ: Mapping[str, str]) -> None:
    """Raises ConfigError here rather than in each worker."""
    for check in (upstream_keys, upstream_proxies, replica_keys):
        check(settings, environ)


async def _use(workers: Workers, environ: Mapping[str, str], changed: Settings) -> None:
    _check(changed, environ)
    await workers.use([part_of(changed, number) for number in range(changed.server.workers)])


def part_of(settings: Settings, number: int) -> Settings:
    """Settings of one worker: what all have together is no more than one gateway may have. Raises ConfigError."""
    changed: dict[str, Any] = {}
    for section, names in SHARED_OUT.items():
        found = getattr(settings, section)
        parts = tuple(_part(section, one, names, settings.server.workers, number) for one in _all(found))
        changed[section] = parts if isinstance(found, tuple) else parts[0]
    return settings.model_copy(update=changed)


def _part(section: str, settings: Any, names: Sequence[str], workers: int, number: int) -> Any:
    whole = {name: getattr(settings, name) for name in names}
    for name, value in whole.items():
        if 0 < value < workers:
            raise ConfigError(f"{section}.{name}: {value} cannot be shared out among {workers} workers")
    parts = {name: value // workers + (number < value % workers) for name, value in whole.items()}
    return settings.model_copy(update=parts)


def _all(found: Any) -> Sequence[Any]:
    return found if isinstance(found, tuple) else (found,)


def bind(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """For each worker its sockets on all addresses of the host, bound and not listening; port 0 is a free one. Raises
    OSError, also when another process listens there with SO_REUSEPORT, as all sockets of one port have it here."""
    addresses = list(dict.fromkeys(_addresses(host, port)))
    with _socket(*addresses[0]) as probe:
        port = probe.getsockname()[1]
    places = [(family, (address[0], port, *address[2:])) for family, address in addresses]
    sockets: list[list[socket.socket]] = []
    try:
        for _ in range(count):
            sockets.append([])
            for family, address in places:
                sockets[-1].append(_socket(family, address, shares=True))
    except BaseException:
        _close(sockets)
        raise
    return sockets


def _addresses(host: str, port: int) -> Iterator[tuple[int, Any]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in found:
        yield family, address


def _socket(family: int, address: Any, *, shares: bool = False) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {address[0]} port {address[1]}: {error.strerror}") from None
    return bound


def _close(sockets: Sequence[Sequence[socket.socket]]) -> None:
    for own in sockets:
        for one in own:
            one.close()


@dataclass(slots=True)
class _Worker:
    """One worker: its part of the settings, its sockets, and of its process what is known.

    peer    the way to its process
    has     the settings that its process has
    counts  what it has counted, at the last look
    up      whether it answers requests
    silent  looks in a row that it did not answer
    worked  whether it ever did
    """

    place: Place
    sockets: Sequence[socket.socket]
    peer: Peer | None = None
    has: Settings | None = None
    counts: Snapshot | None = None
    up: bool = False
    silent: int = 0
    worked: bool = False
    text: str | None = None  # that it would say to the operator


class Workers(Children):
    """The workers of one gateway."""

    def __init__(
        self,
        places: Sequence[Place],
        sockets: Sequence[Sequence[socket.socket]],
        joined: set[str],
        say: Callable[[str], None],
        on_fatal: Callable[[ChildStartError], None],
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        """
        places   for each worker what it is told
        sockets  and its own ones
        joined   gets the URLs of engines that any worker has joined
        say      called once all workers answer requests, with what one of them says
        """
        self._workers = [_Worker(place, own) for place, own in zip(places, sockets, strict=True)]
        self._joined = joined
        self._say: Callable[[str], None] | None = say
        self._command = command
        self._past: Snapshot = {}  # of workers that are no more
        self._looking: asyncio.Task[None] | None = None
        self.reload: Callable[[], Awaitable[Reloaded]] | None = None
        drain_s = places[0].settings.server.shutdown_s + MORE_S
        super().__init__(
            [
                Child(
                    f"worker {number}",
                    partial(self._start, worker),
                    partial(getattr, worker, "worked"),
                    drain_s,
                    partial(self._ended, worker),
                )
                for number, worker in enumerate(self._workers)
            ],
            on_fatal,
        )

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._looking = tasks.spawn(self._look_again(), name="look at workers")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        await tasks.cancel(self._looking)

    async def use(self, parts: Sequence[Settings]) -> None:
        """Makes these settings hold in all workers, or in none: raises ConfigError and OverloadedError. One that dies
        meanwhile is started with them."""
        up = [(worker, part) for worker, part in zip(self._workers, parts, strict=True) if worker.up]
        for why in await asyncio.gather(*(self._prepare(worker, part) for worker, part in up)):
            if why is not None:
                raise ConfigError(why)
        for worker, part in zip(self._workers, parts, strict=True):
            worker.place = replace(worker.place, settings=part)
        await asyncio.gather(*map(self._bring, self._workers))

    async def _prepare(self, worker: _Worker, part: Settings) -> str | None:
        """Why a worker cannot use them. Raises OverloadedError for one that does not answer."""
        assert worker.peer is not None
        try:
            why: str | None = await worker.peer.ask("prepare", part, timeout_s=USE_S)
        except (OSError, TimeoutError):
            raise OverloadedError("A worker does not answer; the settings are as they were.") from None
        return why

    async def _bring(self, worker: _Worker) -> None:
        """The settings of its place to a worker that began with others. One that does not answer is killed, when it is
        looked at again and again, and started with them."""
        if worker.peer is not None and worker.up and worker.has is not worker.place.settings:
            worker.has = worker.place.settings
            try:
                await worker.peer.ask("use", worker.has, timeout_s=USE_S)
            except (OSError, TimeoutError):
                log.error("a worker has not said that it has the settings which were read again")

    async def _start(self, worker: _Worker) -> asyncio.subprocess.Process:
        engines = [one for other in self._workers if other.counts for one in other.counts["engines"].values()]
        place = replace(worker.place, joined=frozenset(one.url for one in engines if one.state == "ready"))
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = tuple(one.fileno() for one in worker.sockets)
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,  # closes when this process ends, however it ends
                pass_fds=(*numbers, theirs.fileno()),
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((place, numbers, theirs.fileno())))
        worker.has = place.settings
        worker.peer = Peer(partial(self._answer, worker))
        await worker.peer.connect(ours)
        return process

    def _ended(self, worker: _Worker) -> None:
        peer, worker.peer, worker.up, worker.silent = worker.peer, None, False, 0
        if peer is not None:
            tasks.spawn(peer.close(), name="close the way to a worker")
        if worker.counts is not None:
            self._past = added(self._past, counters(worker.counts))
            worker.counts = None
        for one in worker.sockets:
            with suppress(OSError):  # it may be closed, or never have listened
                one.shutdown(socket.SHUT_RD)

    async def _answer(self, worker: _Worker, what: str, value: Any) -> Any:
        """A question of a worker: its port is open, it has a text for the operator, or is asked for figures of all."""
        if what == "up":
            worker.up = worker.worked = True
            await self._bring(worker)
        elif what == "reload":
            assert self.reload is not None
            try:
                return await self.reload()
            except (ConfigError, KvasirError) as error:
                return error
        elif what == "say":
            worker.text = value
            if self._say is not None and all(one.text is not None for one in self._workers):
                self._say(value)
                self._say = None
        elif what == "total":
            self._note(worker, value)
            await asyncio.gather(*(self._look(other) for other in self._workers if other is not worker))
            return self._total()
        return None

    async def _look_again(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.gather(*map(self._look, self._workers))
            for worker, child in zip(self._workers, self.children, strict=True):
                if worker.silent >= MAX_SILENT:
                    log.error("%s has not answered for %d looks in a row, and is killed", child.name, worker.silent)
                    child.kill()
            await asyncio.sleep(LOOK_S)

    async def _look(self, worker: _Worker) -> None:
        if (peer := worker.peer) is None or not worker.up:
            return
        worker.silent += 1
        with suppress(OSError, TimeoutError):
            counts = await peer.ask("snapshot", timeout_s=ASK_S)
            if worker.peer is peer:
                worker.silent = 0
                self._note(worker, counts)

    def _note(self, worker: _Worker, counts: Snapshot) -> None:
        if worker.peer is not None:
            worker.counts = counts
            self._joined.update(one.url for one in counts["engines"].values() if one.incarnation is not None)

    def _total(self) -> Snapshot:
        total = self._past
        for worker in self._workers:
            total = added(total, worker.counts)
        workers = {
            "configured": len(self._workers),
            "running": sum(worker.up for worker in self._workers),
            "restarts": sum(child.restarts for child in self.children),
        }
        return {**total, "workers": workers}
