"""Which servers the fleet has, and which of them drain: those of [[replicas]], pods that were found for it (pods.py),
and those added while gateways run.

    draining  gets no new requests; running ones end
    removed   the same, and is forgotten when nothing runs there any more, or at once where that is forced

With Redis a change reaches every gateway and worker within SYNC_S, and is there after a restart: they are a small hash,
name -> change. A gateway that knows a change which Redis lost writes it again. A server of the settings stays as they
have it, and a pod as the cluster has it: of a change with its name only `draining` counts. Without Redis changes are
this gateway's, until it ends.
Beside it lies, for a minute or two, what each gateway says that the servers' caches are worth.

Knows servers as far as they are named, started, drained and stopped; joining.py has their life.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import orjson
from pydantic import ValidationError

from engine.protocol.frozen import dataclass
from gateway import tasks
from gateway.config import ReplicaSettings
from gateway.errors import BadRequestError, NotFoundError, OverloadedError, RedisDownError
from gateway.storage.redis_calls import RedisCalls, read_or_skip

log = logging.getLogger(__name__)

KEY: Final = "kvasir:fleet:replicas"
WORTH_KEY: Final = "kvasir:fleet:worth"
WORTH_S: Final = 60
"""For which what a gateway that is gone said counts at least; twice as long at most."""

_STORE: Final = "changes of the fleet"
SYNC_S: Final = 1.0
MAX_CHANGES: Final = 512
"""Names in the hash; those that were removed are among them for KEPT_S."""

KEPT_S: Final = 86_400.0
"""For which a removed name is kept, so that a gateway which did not reach Redis learns of it."""

R_co = TypeVar("R_co", bound="Member", covariant=True)


class Member(Protocol):
    """One rank of a server. See replica.py."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    def figures(self) -> dict[str, Any]: ...


class Server(Protocol[R_co]):
    """See joining.py."""

    @property
    def settings(self) -> ReplicaSettings: ...

    @property
    def replicas(self) -> Sequence[R_co]: ...

    def drain(self, draining: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Change:
    """What was decided about one name. `settings`: of one that was added; `at`: when, in seconds since 1970."""

    settings: ReplicaSettings | None
    draining: bool = False
    removed: bool = False
    forced: bool = False
    at: float = 0.0


class Fleet:
    """Holds the servers, from `start` to `stop`. Belongs to one event loop."""

    def __init__(
        self,
        configured: Sequence[Server[Any]],
        open_server: Callable[[ReplicaSettings], Server[Any]],
        attach: Callable[[Any], None],
        detach: Callable[[Any], Awaitable[None]],
        calls: RedisCalls | None,
        now: Callable[[], float] = time.time,
        worth: Callable[[str], float] = lambda _: 0.0,
        pods: Callable[[], Mapping[str, Change]] = dict,
    ) -> None:
        """
        configured      those of the settings
        open_server     makes one that is added, without starting it; raises BadRequestError where that cannot be
        attach, detach  the registry's: make a replica known, and start it; stop it
        calls           None without Redis
        worth           of a replica's cache to this gateway, in tokens
        pods            what there is now in the cluster, asked every SYNC_S
        """
        self._configured = {one.settings.name for one in configured}
        self._servers: dict[str, Server[Any]] = {one.settings.name: one for one in configured}
        self._open, self._attach, self._detach = open_server, attach, detach
        self._calls, self._now, self._worth, self._find_pods = calls, now, worth, pods
        self._pods: Mapping[str, Change] = {}
        self._owner = uuid.uuid4().hex
        self._changes: dict[str, Change] = {}
        self.unusable: dict[str, str] = {}  # name of one that was added elsewhere -> why it is not used here
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def attach(self) -> None:
        """Makes the servers of the settings known, and begins to ask them."""
        for server in self._servers.values():
            self._attach_all(server)

    async def start(self) -> None:
        """The same with those that were added, if Redis answers, and with those that will be."""
        await self._sync()
        self._task = tasks.spawn(self._run(), name="changes of the fleet")

    async def stop(self) -> None:
        """The registry stops the replicas."""
        await tasks.cancel(self._task)

    @property
    def replicas(self) -> list[Any]:
        """Of all servers."""
        return [replica for server in self._servers.values() for replica in server.replicas]

    def figures(self) -> dict[str, dict[str, Any]]:
        """URL of each replica -> what this gateway knows of it. See Replica.figures."""
        return {
            replica.url: {
                "server": name,
                "kind": server.settings.kind,
                "configured": self._is_configured(name),
                **replica.figures(),
            }
            for name, server in self._servers.items()
            for replica in server.replicas
        }

    # -- changes -------------------------------------------------------------------------------------------------------

    async def add(self, table: Mapping[str, Any]) -> str:
        """Takes in a server, as a table of [[replicas]] describes it, whether it can be reached or not. Returns its
        name. Raises BadRequestError, and RedisDownError: then nothing has changed for certain at this gateway alone."""
        settings = _settings(table)
        async with self._lock:
            await self._read()
            name, known = settings.name, self._changes.get(settings.name)
            if name in self._servers or (known is not None and not known.removed):
                raise _refused("name", f"there is a replica {name} already; remove it first")
            if (other := self._find_url(settings.url)) is not None:
                raise _refused("url", f"this is the server of replica {other}")
            if len(self._changes) >= MAX_CHANGES and known is None:
                raise OverloadedError(f"The fleet has {MAX_CHANGES} changes, which is the limit.")
            self._open(settings)  # raises what stands against it
            await self._write(name, Change(settings, at=self._now()))
            await self._settle()
        return name

    async def drain(self, name: str, *, draining: bool = True) -> None:
        """No new requests go there from now on; or they do again. Raises NotFoundError and RedisDownError."""
        async with self._lock:
            await self._read()
            change = self._find(name)
            await self._write(name, replace(change, draining=draining, at=self._now()))
            await self._settle()

    async def remove(self, name: str, *, force: bool = False) -> None:
        """Drains one that was added, and forgets it; with `force` what runs there ends now. Raises NotFoundError,
        RedisDownError, and BadRequestError for one of the settings."""
        async with self._lock:
            await self._read()
            change = self._find(name)
            if self._is_configured(name):
                raise _refused("name", f"{name} is one of the settings ([[replicas]], --replica): drain it")
            await self._write(name, replace(change, draining=True, removed=True, forced=force, at=self._now()))
            await self._settle()

    def _find(self, name: str) -> Change:
        change = self._changes.get(name)
        configured = self._is_configured(name)
        if change is not None and (not change.removed or (name in self._servers and not configured)):
            return change
        if not configured:
            raise NotFoundError(f"There is no replica {name}.")
        return Change(None)

    def _is_configured(self, name: str) -> bool:
        return name in self._configured or name in self._pods

    def _find_url(self, url: str) -> str | None:
        found = (name for name, server in self._servers.items() if server.settings.url.lower() == url.lower())
        return next(found, None)

    # -- the same everywhere -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(SYNC_S)
            await self._sync()

    async def _sync(self) -> None:
        async with self._lock:
            with suppress(RedisDownError):
                await self._read()
                await self._tell_worth()
            await self._settle()

    async def worth(self) -> Mapping[str, float]:
        """Server -> what its cache is worth to all gateways, in tokens. Empty without Redis. Raises RedisDownError."""
        total = Counter[str]()
        if self._calls is not None:
            await self._tell_worth()
            redis: Any = self._calls.redis
            found = dict[bytes, bytes]()  # by gateway, the latest
            for key in self._worth_keys():
                found |= await self._calls.ask_or_skip(_STORE, redis.hgetall(key), {})
            for value in found.values():
                total.update(read_or_skip(_STORE, partial(_read_worth, value)))
        return total

    async def _tell_worth(self) -> None:
        if self._calls is not None:
            own = {name: sum(self._worth(one.name) for one in each.replicas) for name, each in self._servers.items()}
            redis: Any = self._calls.redis
            *_, key = self._worth_keys()
            await self._calls.ask(redis.hset(key, self._owner, orjson.dumps(own)))
            await self._calls.ask(redis.expire(key, 2 * WORTH_S))

    def _worth_keys(self) -> list[str]:
        """A hash for each time, so that what gateways said that are gone goes with it: the last one and this."""
        at = int(self._now()) // WORTH_S
        return [f"{WORTH_KEY}:{at - 1}", f"{WORTH_KEY}:{at}"]

    async def _read(self) -> None:
        """Takes over what Redis has, and gives back what it lost. Raises RedisDownError."""
        if self._calls is None:
            return
        redis: Any = self._calls.redis
        found = await self._calls.ask_or_skip(_STORE, redis.hgetall(KEY), {})
        changes: dict[str, Change] = {}
        for field, value in list(found.items())[:MAX_CHANGES]:
            if (read := read_or_skip(_STORE, partial(_change, field, value))) is not None:
                changes[read[0]] = read[1]
        old_s = self._now() - KEPT_S
        for name, change in self._changes.items():
            if name not in changes and not (change.removed and change.at < old_s):
                await self._calls.ask(redis.hsetnx(KEY, name, _written(change)))
                changes[name] = change
        for name in [name for name, change in changes.items() if change.removed and change.at < old_s]:
            await self._calls.ask(redis.hdel(KEY, name))
            del changes[name]
        self._changes = changes

    async def _write(self, name: str, change: Change) -> None:
        if self._calls is not None:
            redis: Any = self._calls.redis
            await self._calls.ask(redis.hset(KEY, name, _written(change)))
        self._changes[name] = change

    async def _settle(self) -> None:
        """Makes the servers what the changes and the cluster say."""
        self._pods = {name: pod for name, pod in self._find_pods().items() if name not in self._configured}
        decided = {name: self._decided(name) for name in [*self._changes, *self._pods]}
        self.unusable = {
            name: why for name, why in self.unusable.items() if name in decided and not decided[name].removed
        }
        for name, server in list(self._servers.items()):
            change = decided.get(name) or Change(None)
            own = name not in self._configured
            gone = own and (change.removed or change.settings != server.settings)
            forced = change.forced or name in self._pods  # another pod has the name: what ran in the old one is lost
            server.drain(gone or change.draining)
            if gone and (forced or not any(replica.in_flight for replica in server.replicas)):
                del self._servers[name]
                for replica in list(server.replicas):
                    await self._detach(replica)
                log.info("replica %s is removed", name)
                if change.settings is None and name in self._changes and not change.removed:  # of a pod, and drained
                    with suppress(RedisDownError):
                        await self._write(name, Change(None, removed=True, at=self._now()))
        for name, change in decided.items():
            if change.settings is not None and not change.removed and name not in self._servers:
                self._take_in(name, change.settings)
                if (taken := self._servers.get(name)) is not None:
                    taken.drain(change.draining)
        if self._calls is None:
            self._changes = {name: change for name, change in self._changes.items() if not self._is_over(name, change)}

    def _decided(self, name: str) -> Change:
        change, pod = self._changes.get(name) or Change(None), self._pods.get(name)
        return change if pod is None else replace(pod, draining=pod.draining or change.draining)

    def _is_over(self, name: str, change: Change) -> bool:
        return change.removed and name not in self._servers

    def _take_in(self, name: str, settings: ReplicaSettings) -> None:
        """One that was added here or elsewhere. What stands against it here alone is logged once."""
        try:
            if (other := self._find_url(settings.url)) is not None:
                raise _refused("url", f"this is the server of replica {other}")
            server = self._open(settings)
        except BadRequestError as error:
            if self.unusable.get(name) != error.message:
                self.unusable[name] = error.message
                log.warning("replica %s cannot be used by this gateway: %s", name, error.message)
            return
        self._servers[name] = server
        self._attach_all(server)

    def _attach_all(self, server: Server[Any]) -> None:
        for replica in list(server.replicas):
            self._attach(replica)


def _settings(table: Mapping[str, Any]) -> ReplicaSettings:
    """Raises BadRequestError in words of the first thing that is wrong."""
    try:
        settings = ReplicaSettings.model_validate(table)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or "replica"
        raise _refused(param, first["msg"].removeprefix("Value error, ")) from None
    if settings.service is not None:
        raise _refused("url", "a Service is found by gateways that have it in their settings")
    if settings.key is not None:
        raise _refused("key", "keys are not sent; name the environment variable that has it in api_key_env")
    return settings


def _refused(param: str, why: str) -> BadRequestError:
    return BadRequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")


def _read_worth(value: bytes) -> dict[str, float]:
    """Raises ValueError and others for what no gateway wrote."""
    return {server: float(tokens) for server, tokens in orjson.loads(value).items()}


def _written(change: Change) -> bytes:
    table = None if change.settings is None else change.settings.model_dump(exclude_none=True)
    return orjson.dumps([table, change.draining, change.removed, change.forced, change.at])


def _change(field: bytes, value: bytes) -> tuple[str, Change]:
    """The name, and what was decided about it. Raises ValueError and others for what no gateway wrote."""
    table, draining, removed, forced, at = orjson.loads(value)
    try:
        settings = None if table is None else _settings(table)
    except BadRequestError as error:
        raise ValueError(error.message) from None
    if settings is not None and settings.name != field.decode():
        raise ValueError("another name")
    return field.decode(), Change(settings, bool(draining), bool(removed), bool(forced), float(at))
