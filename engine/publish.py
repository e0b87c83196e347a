"""Publishes what an engine's blocks did to the Redis index, and keeps the lease that the index lives on.

What is in Redis, per incarnation:

    blocks_key         hash   digest -> tier byte (TIER_CODES); a decimal block id may follow, we leave it out
                              VERSION_FIELD -> decimal counter, one up with every write; digests are longer than it
    announcement_key   string Hello.to_json() plus "url" (where gateways connect); not of a replica
    ENGINES_KEY        zset   incarnation -> Unix second at which its announcement expires

Both keys live for lease_s and are renewed every heartbeat_s. The version is read back with every heartbeat: a Redis
that restarted, evicted the hash or failed over to an older copy shows another one, and gets the whole table again.

Works on the event loop; the engine's thread is never waited for, and an unreachable Redis costs one warning and the
memory of the table. Knows nothing about models. Its neighbours are engine/server.py, which feeds it, and
gateway/index/redis_index.py, which reads what it wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from engine.protocol import (
    DIGEST_BYTES,
    ENGINES_KEY,
    TIER_CODES,
    BlockEvents,
    Hello,
    Tier,
    announcement_key,
    blocks_key,
    split_digests,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger(__name__)

VERSION_FIELD: Final = b"v"
FIELDS_PER_COMMAND: Final = 1024
"""Digests in one command, so that no single one holds Redis up for long, and Lua can unpack them."""

_CHANGE: Final = """
-- KEYS[1]  blocks_key
-- ARGV     digests, DIGEST_BYTES each, one after the other; the tier byte of each, empty: they are removed
local digests, tiers, fields = ARGV[1], ARGV[2], {}
for at = 1, #digests, 16 do
  fields[#fields + 1] = string.sub(digests, at, at + 15)
  if tiers ~= '' then
    local block = (at - 1) / 16 + 1
    fields[#fields + 1] = string.sub(tiers, block, block)
  end
end
return redis.call(tiers == '' and 'HDEL' or 'HSET', KEYS[1], unpack(fields))
"""
"""A command pays for each of its arguments in redis-py, and not for their bytes: half of what publishing costs."""

COMMANDS_PER_PIPELINE: Final = 64
LONGEST_PAUSE_S: Final = 60.0
"""Between two writes of the whole table, when Redis is too small for it and drops it again and again."""

REDIS_TIMEOUT_S: Final = 5.0
"""Longer than the slowest healthy answer; a Redis that takes more is treated as unreachable."""


class ResidencyTable:
    """Which blocks can be hit now, and the fastest tier that holds each. Written and read on the event loop only.

    Prefix-closed at all times, and iterated parents before children: a block is only ever added after its parent, and
    a parent is only ever taken out after its children. A block that moves to another tier keeps its place.
    """

    def __init__(self) -> None:
        self._digests: dict[bytes, Tier] = {}

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._digests)

    def apply(self, events: BlockEvents) -> None:
        """Takes `removed` out, then puts `stored` in; a digest in both is there afterwards."""
        if events.reset:
            self._digests.clear()
        for digest in split_digests(events.removed):
            self._digests.pop(digest, None)
        self._digests.update(dict.fromkeys(split_digests(events.stored), events.tier))

    def tier(self, digest: bytes) -> Tier:
        """The fastest tier that holds a block. Raises KeyError for a block that is not in the table."""
        return self._digests[digest]

    def snapshot(self, max_bytes: int) -> list[BlockEvents]:
        """The table as events that start from nothing, each with about `max_bytes` of digests. Never empty.

        One tier after the other, fastest first: a tier holds the parents of what it holds, so no block's parent is in
        a slower one and parents still come before children.
        """
        step = max(DIGEST_BYTES, max_bytes // DIGEST_BYTES * DIGEST_BYTES)
        parts: list[BlockEvents] = []
        for tier in TIER_CODES:
            packed = b"".join(digest for digest, held_in in self._digests.items() if held_in == tier)
            parts += [BlockEvents(packed[i : i + step], tier=tier) for i in range(0, len(packed), step)]
        first = parts[0] if parts else BlockEvents()
        return [replace(first, reset=True), *parts[1:]]


class Publisher:
    """Keeps Redis equal to the table, as far as Redis can be reached."""

    def __init__(
        self,
        redis: Redis,
        table: ResidencyTable,
        hello: Hello,
        url: str | None,
        *,
        heartbeat_s: float,
        lease_s: float,
        fence: int = 0,
    ) -> None:
        """
        url    where gateways connect; None: the blocks of somebody else's server, which is not announced
        fence  of those that may publish the same incarnation one after the other: a larger number for each. What one
               writes late, the next one takes for lost writes, and writes its table anew
        """
        self._redis = redis
        self._table = table
        self._hello = hello
        self._announcement = None if url is None else json.dumps({**hello.to_json(), "url": url})
        self._heartbeat_s = heartbeat_s
        self._lease_ms = max(1, int(lease_s * 1000))
        self._blocks_key = blocks_key(hello.model, hello.incarnation)
        self._pending: dict[bytes, bool] = {}  # digest -> is it in the table; not yet in Redis
        self._resync = True
        self._version = fence
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self._warned = False  # of the present outage
        # By the monotonic clock:
        self._beat_s = 0.0  # when the next heartbeat is due
        self._wrote_s = -LONGEST_PAUSE_S  # when the whole table was written last
        self._write_s = 0.0  # before this it is not written again
        self._pause_s = heartbeat_s
        self.up = False  # the last exchange with Redis succeeded
        self.resyncs = 0  # how often the whole table was written

    def start(self) -> None:
        """Begins to publish. Does not wait for Redis."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="publish")

    def publish(self, events: BlockEvents) -> None:
        """Notes events that the table has applied already. Never blocks, never fails."""
        if events.reset:
            self._forget()
            self._write_s = 0.0
        if not self._resync:
            for present, packed in ((False, events.removed), (True, events.stored)):
                for digest in split_digests(packed):
                    if not (present and self._pending.get(digest)):  # one that moves stays before its children
                        self._pending.pop(digest, None)  # a later change goes to the end: the order is what matters
                        self._pending[digest] = present
            if len(self._pending) > 2 * len(self._table) + FIELDS_PER_COMMAND:
                self._forget()  # writing the table anew is less than what piled up
                self._write_s = 0.0
        self._settled.clear()
        self._wake.set()

    async def settled(self) -> None:
        """Returns when Redis equals the table. Waits for as long as Redis is unreachable."""
        await self._settled.wait()

    async def stop(self) -> None:
        """Stops. What is in Redis stays there for lease_s."""
        if self._task is not None:
            self._closing = True  # besides, because redis-py may forget that it was cancelled when a command fails
            self._task.cancel()
            await asyncio.wait([self._task])

    async def close(self) -> None:
        """Stops, and takes everything of this incarnation out of Redis if it can be reached."""
        await self.stop()
        with contextlib.suppress(Exception):  # the lease ends it in any case
            async with asyncio.timeout(REDIS_TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
                pipe.execute_command("UNLINK", self._blocks_key)
                if self._announcement is not None:
                    pipe.execute_command("UNLINK", announcement_key(self._hello.incarnation))
                    pipe.zrem(ENGINES_KEY, self._hello.incarnation)
                await pipe.execute()

    async def _run(self) -> None:
        while not self._closing:
            self._wake.clear()
            try:
                if self._resync and time.monotonic() >= self._write_s:
                    await self._write_all()
                elif self._pending and not self._resync:
                    await self._write_pending()
                if time.monotonic() >= self._beat_s:
                    await self._heartbeat()
                    self._beat_s = time.monotonic() + self._heartbeat_s
                self._note_up()
            except Exception as error:
                self._note_down(error)
            if self._resync or not self._pending:
                await self._sleep()

    async def _sleep(self) -> None:
        """Until something changed or is due."""
        due_s = min(self._beat_s, self._write_s) if self._resync else self._beat_s
        if not self._resync:
            self._settled.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._wake.wait()

    async def _write_pending(self) -> None:
        """One pipeline: children out before their parents, then parents in before their children."""
        pending, self._pending = self._pending, {}
        removed = [digest for digest, present in pending.items() if not present]
        stored = [digest for digest, present in pending.items() if present]
        commands = [self._change(part, b"") for part in _parts(removed)]
        commands += [self._store(part) for part in _parts(stored)]
        await self._execute(commands)

    async def _write_all(self) -> None:
        """The whole table, in several pipelines. Changes that come meanwhile are pending and follow."""
        now_s = time.monotonic()
        again_soon = now_s - self._wrote_s < LONGEST_PAUSE_S
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again_soon else self._heartbeat_s
        self._wrote_s, self._write_s = now_s, now_s + self._pause_s
        self._pending.clear()
        self._resync = False
        digests = list(self._table)
        commands = [self._store(part) for part in _parts(digests)]
        await self._execute(commands[:COMMANDS_PER_PIPELINE], from_nothing=True)
        for start in range(COMMANDS_PER_PIPELINE, len(commands), COMMANDS_PER_PIPELINE):
            await self._execute(commands[start : start + COMMANDS_PER_PIPELINE])
        self.resyncs += 1

    async def _execute(self, commands: list[tuple[Any, ...]], *, from_nothing: bool = False) -> None:
        self._version += 1
        async with asyncio.timeout(REDIS_TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
            # The lease comes first, so that a pipeline which is cut leaves nothing behind for ever; and last, in case
            # that Redis evicts the hash in between, whose version is missing then.
            if from_nothing:
                pipe.execute_command("UNLINK", self._blocks_key)
                pipe.execute_command("HSET", self._blocks_key, VERSION_FIELD, self._version)
            else:  # counted by Redis: a hash that was lost since the last write does not get the right number back
                pipe.execute_command("HINCRBY", self._blocks_key, VERSION_FIELD, 1)
            pipe.execute_command("PEXPIRE", self._blocks_key, self._lease_ms)
            for command in commands:
                pipe.execute_command(*command)
            pipe.execute_command("PEXPIRE", self._blocks_key, self._lease_ms)
            await pipe.execute()

    async def _heartbeat(self) -> None:
        """Renews the lease, and checks that Redis still holds what was written."""
        now, lease_s = time.time(), self._lease_ms / 1000
        async with asyncio.timeout(REDIS_TIMEOUT_S), self._redis.pipeline(transaction=False) as pipe:
            if self._announcement is not None:
                pipe.set(announcement_key(self._hello.incarnation), self._announcement, px=self._lease_ms)
                pipe.zadd(ENGINES_KEY, {self._hello.incarnation: now + lease_s})
                pipe.zremrangebyscore(ENGINES_KEY, "-inf", now - lease_s)
            if self._resync:  # half a table is worse than none: gateways believe what is there
                pipe.execute_command("UNLINK", self._blocks_key)
            pipe.pexpire(self._blocks_key, self._lease_ms)
            pipe.hget(self._blocks_key, VERSION_FIELD.decode())
            *_, version = await pipe.execute()
        if not self._resync and (version is None or int(version) != self._version):
            log.info("Redis lost writes of this engine's index (restart, eviction or failover); writing it anew")
            self._forget()

    def _store(self, digests: list[bytes]) -> tuple[Any, ...]:
        return self._change(digests, b"".join(TIER_CODES[self._table.tier(digest)] for digest in digests))

    def _change(self, digests: list[bytes], tiers: bytes) -> tuple[Any, ...]:
        return ("EVAL", _CHANGE, 1, self._blocks_key, b"".join(digests), tiers)

    def _forget(self) -> None:
        """From now on Redis is taken to know nothing."""
        self._pending.clear()
        self._resync = True
        self._settled.clear()

    def _note_up(self) -> None:
        if self._resync:
            return  # Redis answers, and does not have the table yet
        if not self.up:
            log.info("publishing to Redis: %d blocks", len(self._table))
        self.up, self._warned = True, False

    def _note_down(self, error: Exception) -> None:
        from redis.exceptions import ResponseError

        if not self._warned:
            reason = str(error) or type(error).__name__
            log.warning("Redis cannot be used, the index is not published until it can: %s", reason[:300])
        self.up, self._warned = False, True
        self._forget()
        self._beat_s = time.monotonic() + self._heartbeat_s
        if not isinstance(error, ResponseError):  # unreachable; one that refuses, being full, is asked less and less
            self._write_s, self._wrote_s = self._beat_s, -LONGEST_PAUSE_S


def _parts(digests: list[bytes]) -> Iterator[list[bytes]]:
    rest = iter(digests)
    while part := list(islice(rest, FIELDS_PER_COMMAND)):
        yield part
