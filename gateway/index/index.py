"""The index that the pipeline asks which engine holds how much of a prompt: the gateway's own memory for engines whose
events it follows, which is newer than what they wrote to Redis, and Redis for the others, while it is reachable.

Presence is prefix-closed: an engine that holds block i of a chain holds every block before it, because engines publish
parents before children and remove children before parents. So the end of a prefix is found by bisection. An answer is a
hint: the engine compares the tokens before it reuses anything.

Redis has what engine/publish.py writes; keys and values are described there and in engine/protocol/values.py. All
digests travel packed in one argument, because a Redis command pays for each argument and not for its bytes. An outage
costs the requests that were waiting when it began one time limit each, and later ones nothing: a task probes Redis in
the background, for all parts of the gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from engine.protocol import ENGINES_KEY, blocks_key
from gateway import tasks
from gateway.errors import RedisDownError
from gateway.index.memory_index import MemoryIndex
from gateway.index.recent import SHARED_TTL_S, TTL_S, RecentBlocks
from gateway.storage.redis_calls import RedisCalls
from gateway.types import Lost


class PrefixIndex:
    """Never raises."""

    def __init__(self, memory: MemoryIndex, calls: RedisCalls | None, *, retry_s: float) -> None:
        """`memory` is fed by the engines themselves. Redis is probed every `retry_s`."""
        self._memory = memory
        self._recent = RecentBlocks()
        self._retry_s = retry_s
        self._calls = calls
        self._script = None if calls is None else calls.script(__package__, "find.lua")
        self._watching: asyncio.Task[None] | None = None

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """Leading blocks of `digests` that each of `incarnations` holds.

        digests  packed chain digests, DIGEST_BYTES each, first block first
        An incarnation that is known is in the answer, with 0 when it holds none of them; another one is left out, but
        for what it computed a moment ago. The answer is empty when there are no digests or no incarnations. Each
        incarnation costs Redis two commands or more, so it is asked only about those that memory does not know.
        """
        if not digests or not incarnations:
            return {}
        held = dict(self._memory.find(digests, incarnations))
        if len(held) < len(incarnations) and self._calls is not None and self._script is not None:
            names = [name for name in incarnations if name not in held]
            if self._calls.breaker.up:
                keys = [blocks_key(model, name) for name in names]
                with suppress(RedisDownError):
                    counts = await self._calls.ask(self._script(keys=keys, args=[digests]))
                    held |= {name: count for name, count in zip(names, counts, strict=True) if count >= 0}
        if not self._recent:
            return held
        found = {name: self._recent.extend(name, digests, held.get(name, 0)) for name in incarnations}
        return {name: count for name, count in found.items() if count or name in held}

    def recall(self, incarnation: str, digests: bytes) -> int | None:
        """Leading blocks of `digests` that one incarnation holds, as memory has it: newer than what Redis has, by what
        is on its way there. None when this gateway does not follow its events, and another one may."""
        if not self._memory.knows(incarnation):
            return None
        return self._recent.extend(incarnation, digests, self._memory.prefix(incarnation, digests))

    def lost(self, incarnation: str, digests: bytes, held: int) -> Lost | None:
        """What became of the block behind the first `held` ones of a prompt, where the engine had it, as far as this
        gateway heard of it."""
        return self._memory.lost.find(incarnation, digests, held)

    def computed(self, incarnation: str, digests: bytes) -> None:
        """An engine whose events take their time has computed a prompt with these blocks."""
        ttl_s = TTL_S if self._memory.knows(incarnation) else SHARED_TTL_S
        self._recent.add(incarnation, digests, self._memory.prefix(incarnation, digests), ttl_s)

    def drop(self, incarnation: str) -> None:
        """What memory has of an engine is gone, or wrong."""
        self._memory.drop(incarnation)
        self._recent.drop(incarnation)

    def start(self) -> None:
        """Begins to probe Redis: it comes back, and goes away, without a request."""
        if self._calls is not None:
            self._watching = tasks.spawn(self._watch(self._calls), name="watch redis")

    async def close(self) -> None:
        """Stops probing."""
        await tasks.cancel(self._watching)

    async def _watch(self, calls: RedisCalls) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(calls.breaker.wait_s() or self._retry_s)
            with suppress(RedisDownError):
                # Not PING, which a node answers that its cluster has cut off.
                await calls.ask(calls.redis.execute_command("EXISTS", ENGINES_KEY))  # type: ignore[no-untyped-call]
