"""Stored responses: for GET, for input_items, and for `previous_response_id`.

A store belongs to tenants: what one has kept does not exist for another. It is bounded by count, bytes and time, and
what was kept first goes first. The bytes are in a ByteStore; one that is down keeps nothing, and costs no answer.

Also what stored responses are read for: items that an input only names, and diagnostics, which compare what belongs to
a prefix. Formats, effort, verbosity and service tier do not, and are never a reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import orjson

from gateway.api.fields import shown
from gateway.api.openai.responses.items import response_of
from gateway.api.openai.responses.tools import Item
from gateway.errors import BadRequestError, RedisDownError
from gateway.storage.byte_store import ByteStore, Put
from gateway.storage.redis_calls import read_or_skip
from gateway.tasks import off_loop, work_of
from gateway.types import Usage

_ID: Final = re.compile(r"resp_[0-9a-f]{32}")

_UPSTREAM: Final = "upstream:"
"""In front of ids of what an upstream keeps, responses and parts of them: what is kept of them here is its name."""

_UPSTREAM_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,256}")

OUTCOMES: Final = ("kept", "too_large", "failed")

MAX_REFERENCED: Final = 16
"""Responses whose items one input may refer to."""

_REASONS: Final = (
    ("model_changed", "model"),
    ("prompt_cache_key_changed", "prompt_cache_key"),
    ("tools_changed", "tools"),
    ("input_changed", "instructions"),
)
"""Looked at in this order, as they come in a namespace and a prompt; the items come last."""

_UNSEEN: Final = ("id", "status")  # of an item, which are no part of a prompt


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and all the items that it answered: those of earlier responses, then its own."""

    response: dict[str, Any]
    items: list[Item]

    @property
    def body(self) -> bytes:
        """As it is kept. The same bytes for what was found, until something of it is changed."""
        return orjson.dumps({"response": self.response, "items": self.items})

    @property
    def conversation(self) -> list[Item]:
        """What the next response continues."""
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

    async def put(self, tenant: str, stored: StoredResponse, before: bytes | None = None) -> bool:
        """Whether it is stored. `before`: only in place of what is stored as these bytes, not where that was deleted or
        replaced. Never raises."""
        body = await off_loop(work_of(0, len(stored.items)), lambda: stored.body)
        done = await self._put(self._store.put(tenant, stored.response["id"], body, expected=before))
        if done or (done is False and before is None):
            self._outcomes["kept" if done else "too_large"] += 1
        return bool(done)

    async def _put(self, put: Awaitable[Put]) -> bool | None:
        """Whether it is stored; None while Redis is unreachable."""
        try:
            return await put == "stored"
        except RedisDownError:
            self._outcomes["failed"] += 1
            return None

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
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

    async def remember_upstream(self, tenant: str, upstream: str, object_id: str) -> None:
        """That an upstream keeps a response, or something of one, which it made for the tenant. Never raises."""
        await self._put(self._store.put(tenant, _UPSTREAM + object_id, upstream.encode()))

    async def find_upstream(self, tenant: str, object_id: str) -> str | None:
        """Which upstream keeps it. Raises RedisDownError when it cannot be known."""
        if not _UPSTREAM_ID.fullmatch(object_id):
            return None
        name = await self._store.find(tenant, _UPSTREAM + object_id)
        return None if name is None else name.decode()

    async def forget_upstream(self, tenant: str, response_id: str) -> None:
        """It was deleted there. Never raises."""
        with suppress(RedisDownError):
            await self._store.remove(tenant, _UPSTREAM + response_id)


def _kept(body: bytes) -> StoredResponse:
    """Raises ValueError and others for what `StoredResponse.body` has not written."""
    read = orjson.loads(body)
    stored = StoredResponse(read["response"], read["items"])
    lists = (stored.items, stored.response["output"])
    texts = (stored.response["id"], stored.response["status"], stored.response["object"])
    if not all(isinstance(text, str) for text in texts) or not 0 <= stored.response["created_at"] < 1 << 53:
        raise ValueError("no response")
    if not all(isinstance(items, list) and all(isinstance(item, dict) for item in items) for items in lists):
        raise ValueError("no response")
    return stored


async def resolved(store: ResponseStore, tenant: str, items: Sequence[Item]) -> list[Item]:
    """`items`, with what is referred to in place of the references. Raises BadRequestError for what is not there, and
    for what is referred to twice: a prompt would be longer than all that was ever sent."""
    known: dict[str, dict[str, Item]] = {}
    found = []
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            response_id = response_of(item["id"]) or ""
            if response_id not in known:
                known[response_id] = await _by_id(store, tenant, response_id, len(known))
            item = known[response_id].pop(item["id"], {}) or _missing(index, item["id"])
        found.append(item)
    return found


async def _by_id(store: ResponseStore, tenant: str, response_id: str, number: int) -> dict[str, Item]:
    if number == MAX_REFERENCED:
        raise BadRequestError(
            f"Invalid 'input': it refers to items of more than {MAX_REFERENCED} responses.",
            param="input",
            code="invalid_value",
        )
    stored = await store.find(tenant, response_id)
    return {item["id"]: item for item in stored.conversation} if stored else {}


def _missing(index: int, item_id: str) -> NoReturn:
    path = f"input[{index}].id"
    message = f"Invalid '{path}': there is no item with the id '{shown(item_id)}', or it was in the input before."
    raise BadRequestError(message, param=path, code="invalid_value")


def diagnose(
    response: Mapping[str, Any],
    items: Sequence[Item],
    compared: StoredResponse | None,
    usage: Usage,
    *,
    keyed: bool = True,
) -> dict[str, Any]:
    """`prompt_cache_diagnostics` of a response to these items. `compared` is None when there is no such response;
    `keyed` says whether `prompt_cache_key` separates prefixes.

    A miss names the first change. Where nothing was changed and nothing reused, it is `unavailable`: what was there has
    been evicted, or was never kept.
    """
    if compared is None:
        return {"type": "comparison_response_not_found"}
    if (reason := _changed(response, items, compared, keyed)) is not None:
        missed = usage.prompt_tokens - usage.cached_tokens
        return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": missed}
    return {"type": "cache_hit" if usage.cached_tokens else "unavailable"}


def _changed(response: Mapping[str, Any], items: Sequence[Item], compared: StoredResponse, keyed: bool) -> str | None:
    for reason, name in _REASONS:
        if response[name] != compared.response[name] and (keyed or name != "prompt_cache_key"):
            return reason
    before = [_seen(item) for item in compared.items]
    return None if before == [_seen(item) for item in items[: len(before)]] else "input_changed"


def _seen(item: Item) -> Item:
    return {key: value for key, value in item.items() if key not in _UNSEEN}
