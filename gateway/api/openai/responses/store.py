"""Where responses are kept: for GET, for input_items, and as what a next response goes on from.

A store belongs to tenants: what one has kept does not exist for another. It is bounded by count, bytes and time, and
what was kept first goes first. The bytes are in a ByteStore; one that is down keeps nothing, and costs no answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from gateway.api.openai.responses.items import Item
from gateway.errors import RedisDownError
from gateway.storage.byte_store import ByteStore, Put
from gateway.storage.redis_calls import read_or_skip
from gateway.tasks import off_loop, work_of

_ID: Final = re.compile(r"resp_[0-9a-f]{32}")

_UPSTREAM: Final = "upstream:"
"""In front of ids of what an upstream keeps, responses and parts of them: what is kept of them here is its name."""

_UPSTREAM_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}")

OUTCOMES: Final = ("kept", "too_large", "failed")


@dataclass(frozen=True, slots=True)
class Kept:
    """A response, and all the items that it answered: those of earlier responses, then its own."""

    response: dict[str, Any]
    items: list[Item]

    @property
    def body(self) -> bytes:
        """As it is kept. The same bytes for what was found, until something of it is changed."""
        return orjson.dumps({"response": self.response, "items": self.items})

    @property
    def conversation(self) -> list[Item]:
        """What a next response goes on from."""
        return [*self.items, *self.response["output"]]


class ResponseStore:
    """What the handlers see."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self._outcomes: Counter[str] = Counter()

    @property
    def outcomes(self) -> Mapping[str, int]:
        """Of responses that were to be kept, since the start."""
        return {outcome: self._outcomes[outcome] for outcome in OUTCOMES}

    async def put(self, tenant: str, kept: Kept) -> bool:
        """Whether it is kept. Never raises."""
        body = await off_loop(work_of(0, len(kept.items)), lambda: kept.body)
        done = await self._put(self._store.put(tenant, kept.response["id"], body))
        if done is not None:
            self._outcomes["kept" if done else "too_large"] += 1
        return bool(done)

    async def replace(self, tenant: str, before: bytes, kept: Kept) -> bool:
        """Whether it is kept now, in place of what was kept as `before`: not where that was deleted, or is another one
        by now. Never raises."""
        body = kept.body
        done = await self._put(self._store.put(tenant, kept.response["id"], body, expected=before))
        if done:
            self._outcomes["kept"] += 1
        return bool(done)

    async def _put(self, put: Awaitable[Put]) -> bool | None:
        """Whether it is stored; None while Redis is unreachable."""
        try:
            return await put == "stored"
        except RedisDownError:
            self._outcomes["failed"] += 1
            return None

    async def find(self, tenant: str, response_id: str) -> Kept | None:
        """Raises RedisDownError when it cannot be known. What is no id of ours is not there."""
        if not _ID.fullmatch(response_id):
            return None
        body = await self._store.find(tenant, response_id)
        if body is None:
            return None
        return await off_loop(len(body), lambda: read_or_skip("responses", partial(_kept, body)))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether it was there. Raises RedisDownError when it cannot be known."""
        if not _ID.fullmatch(response_id):
            return False
        return await self._store.remove(tenant, response_id)

    async def remember_upstream(self, tenant: str, upstream: str, kept_id: str) -> None:
        """That an upstream keeps a response, or something of one, which it made for the tenant. Never raises."""
        await self._put(self._store.put(tenant, _UPSTREAM + kept_id, upstream.encode()))

    async def find_upstream(self, tenant: str, kept_id: str) -> str | None:
        """Which upstream keeps it. Raises RedisDownError when it cannot be known."""
        if not _UPSTREAM_ID.fullmatch(kept_id):
            return None
        name = await self._store.find(tenant, _UPSTREAM + kept_id)
        return None if name is None else name.decode()

    async def forget_upstream(self, tenant: str, response_id: str) -> None:
        """It was deleted there. Never raises."""
        with suppress(RedisDownError):
            await self._store.remove(tenant, _UPSTREAM + response_id)


def _kept(body: bytes) -> Kept:
    """Raises ValueError and others for what `Kept.body` has not written."""
    read = orjson.loads(body)
    kept = Kept(read["response"], read["items"])
    lists = (kept.items, kept.response["output"])
    texts = (kept.response["id"], kept.response["status"], kept.response["object"])
    if not all(isinstance(text, str) for text in texts) or not 0 <= kept.response["created_at"] < 1 << 53:
        raise ValueError("no response")
    if not all(isinstance(items, list) and all(isinstance(item, dict) for item in items) for items in lists):
        raise ValueError("no response")
    return kept
