"""Questions in Redis, in the order of their changes: what gateways learn of each other, and start again with.

    kvasir:{questions:NAME}.changes    sorted set: id, number of its last change
    kvasir:{questions:NAME}.questions  hash: id, bytes (Entry.to_bytes); empty when it is gone
    kvasir:{questions:NAME}.sequence   number of the last change
    kvasir:{questions:NAME}.bytes      of all questions
    kvasir:{questions:NAME}.budget     what was learned (Budget.to_state), as the last writer knew it

NAME is an owner, a model, and the digest of the encoder whose vectors these are. Each gateway reads what changed since
it looked last. What did not fit any more is gone here and still known to gateways that had it, until its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from redis.asyncio import Redis

from gateway.config import SemanticCacheSettings
from gateway.storage.breaker import RedisBreaker
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.storage.scripts import script

READ_AT_A_TIME: Final = 256

LARGEST_NUMBER: Final = 1 << 53
"""Of a change: a larger one is none of ours, and after it no other would be found."""

_STORE: Final = "questions"

BUDGET_S: Final = 30 * 86400
"""Seconds that what was learned is kept when nobody asks any more; at most some 500 KB for an owner and model."""


class RedisQuestions:
    """Methods raise RedisDownError."""

    def __init__(
        self, redis: Redis, settings: SemanticCacheSettings, *, timeout_s: float, breaker: RedisBreaker | None = None
    ) -> None:
        """`redis` is the caller's: it is not closed here. `timeout_s` bounds every call."""
        self._redis = redis
        self._settings = settings
        self._calls = RedisCalls(timeout_s, breaker)
        self._put = redis.register_script(script(__package__, "questions_put.lua"))

    async def put(self, name: str, key: bytes, body: bytes) -> None:
        """In place of what has this key; an empty body says that it is gone."""
        settings = self._settings
        if len(body) > settings.max_redis_bytes:
            return
        limits = [settings.max_entries, settings.max_redis_bytes, max(int(settings.ttl_s), 1)]
        await self._calls.ask(self._put(keys=_keys(name), args=[key.hex(), body, *limits]))

    async def changes(self, name: str, since: int) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
        """Keys and bodies of what changed after this number, oldest first and READ_AT_A_TIME at most; and the number of
        the last of them. A Redis that lost everything begins with 1 again, and so does who asks it."""
        changes, questions, sequence, _ = _keys(name)
        last: Any = await self._calls.ask_or_skip(_STORE, self._redis.get(sequence), None)
        if since > (read_or_skip(_STORE, lambda: int(last or 0)) or 0):
            since = 0
        asked = self._redis.zrangebyscore(
            changes, f"({since}", LARGEST_NUMBER, start=0, num=READ_AT_A_TIME, withscores=True
        )
        found: Any = await self._calls.ask_or_skip(_STORE, asked, [])
        if not found:
            return since, []
        ids = [one for one, _ in found]
        bodies: Any = await self._calls.ask_or_skip(_STORE, self._redis.hmget(questions, ids), [None] * len(ids))
        keys = [read_or_skip(_STORE, partial(_key, one)) for one in ids]
        read = zip(keys, bodies, strict=True)
        return int(found[-1][1]), [(key, body) for key, body in read if key is not None and body is not None]

    async def load_budget(self, name: str) -> bytes | None:
        state: Any = await self._calls.ask_or_skip(_STORE, self._redis.get(_budget(name)), None)
        return None if state is None else bytes(state)

    async def save_budget(self, name: str, state: bytes) -> None:
        await self._calls.ask(self._redis.set(_budget(name), state, ex=BUDGET_S))


def _key(written: bytes) -> bytes:
    return bytes.fromhex(written.decode())


def _keys(name: str) -> list[str]:
    """KEYS of the script."""
    return [f"kvasir:{{questions:{name}}}.{part}" for part in ("changes", "questions", "sequence", "bytes")]


def _budget(name: str) -> str:
    return f"kvasir:{{questions:{name}}}.budget"
