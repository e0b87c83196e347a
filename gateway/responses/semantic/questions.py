"""Questions that were answered, so that others can be compared with them: their bytes, and those in Redis, by the name
of a space.

    kvasir:{questions:NAME}.changes    sorted set: id, number of its last change
    kvasir:{questions:NAME}.questions  hash: id, bytes (AnsweredQuestion.to_bytes); empty when it is gone
    kvasir:{questions:NAME}.sequence   number of the last change
    kvasir:{questions:NAME}.bytes      of all questions
    kvasir:{questions:NAME}.budget     what was learned (Budget.to_state), as the last writer knew it

NAME is an owner, a model, and the digest of the encoder whose vectors these are. Each gateway reads what changed since
it looked last. What did not fit any more is gone here and still known to gateways that had it, until its time is over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from gateway.config import SemanticCacheSettings
from gateway.storage.redis_calls import RedisCalls, read_or_skip

KEPT_ANSWER_CHARS: Final = 2000
"""Of an answer, for comparing it with another. The whole answer is in the exact cache, under the key."""

ENTRY_OVERHEAD_BYTES: Final = 12288
"""What an entry takes in memory besides its bytes: objects, and a scope of its own."""
TEXT_CHAR_BYTES: Final = 40
"""Of each character of a text, with its features for the guard: at most, where every word is new and short."""

_VERSION: Final = 2
"""Of an entry's bytes: a JSON array, a line end, and the vector."""

READ_AT_A_TIME: Final = 256

LARGEST_NUMBER: Final = 1 << 53
"""Of a change: a larger one is none of ours, and after it no other would be found."""

_STORE: Final = "questions"

BUDGET_S: Final = 30 * 86400
"""Seconds that a budget is stored after the last question; at most some 500 KB for an owner and model."""


@dataclass(frozen=True, slots=True)
class AnsweredQuestion:
    """A question and what was answered.

    key        of its answer in the exact cache
    scope      digest of the rest of the request; only questions of one scope are compared
    group      key of the first question that had the same answer, as far as it is known
    text       the question
    vector     of the text, little-endian float32 of length 1
    answer     its first KEPT_ANSWER_CHARS; `digest` is of all of it
    created_s  seconds since 1970, as expires_s
    """

    key: bytes
    scope: bytes
    group: bytes
    text: str
    vector: bytes
    answer: str
    digest: bytes
    created_s: float
    expires_s: float

    @property
    def num_bytes(self) -> int:
        """In memory, at most, with its vector once more to be compared."""
        texts = TEXT_CHAR_BYTES * len(self.text) + 4 * len(self.answer)
        return ENTRY_OVERHEAD_BYTES + 3 * len(self.vector) + texts

    def to_bytes(self) -> bytes:
        keys = [one.hex() for one in (self.key, self.scope, self.group, self.digest)]
        head = [_VERSION, *keys, self.text, self.answer, self.created_s, self.expires_s]
        return orjson.dumps(head) + b"\n" + self.vector

    @classmethod
    def from_bytes(cls, data: bytes) -> AnsweredQuestion:
        """Raises ValueError for what `to_bytes` of this version did not write."""
        head, _, vector = data.partition(b"\n")
        try:
            version, *keys, text, answer, created_s, expires_s = orjson.loads(head)
            key, scope, group, digest = map(bytes.fromhex, keys)
            times = float(created_s), float(expires_s)
        except TypeError as error:
            raise ValueError(f"an entry has other values: {error}") from error
        if version != _VERSION or not vector or len(vector) % 4:
            raise ValueError("an entry is of another version, or cut short")
        return cls(key, scope, group, str(text), vector, str(answer), digest, *times)


def digest_of(answer: str) -> bytes:
    """Equal for answers that are equal but for white space at the ends."""
    return hashlib.sha256(answer.strip().encode(errors="surrogatepass")).digest()


class RedisQuestions:
    """Methods raise RedisDownError."""

    def __init__(self, calls: RedisCalls, settings: SemanticCacheSettings) -> None:
        self._redis = calls.redis
        self._settings = settings
        self._calls = calls
        self._put = calls.script(__package__, "questions_put.lua")

    async def put(self, name: str, key: bytes, body: bytes) -> None:
        """In place of the one with this key; an empty body marks it as removed."""
        settings = self._settings
        if len(body) > settings.max_redis_bytes:
            return
        limits = [settings.max_entries, settings.max_redis_bytes, max(int(settings.ttl_s), 1)]
        await self._calls.ask(self._put(keys=_keys(name), args=[key.hex(), body, *limits]))

    async def changes(self, name: str, since: int) -> tuple[int, Sequence[tuple[bytes, bytes]]]:
        """Keys and bodies of what changed after this number, oldest first and READ_AT_A_TIME at most; and the number of
        the last of them. A Redis that lost everything begins with 1 again, and so does its reader."""
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
