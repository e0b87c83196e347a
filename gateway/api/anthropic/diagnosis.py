"""`diagnostics` of one message: what it changed against the one that its client names, and what is remembered of it for
the next. fingerprint.py compares; the store keeps bytes by tenant and key, for a while.

A store that is down costs no answer: nothing is remembered, and what cannot be known is `unavailable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.api.anthropic.caching import Cached
from gateway.api.anthropic.fingerprint import Fingerprint, Piece, compare, same_scope, store_key, take
from gateway.api.anthropic.wire import dotted
from gateway.errors import RedisDownError
from gateway.storage.byte_store import ByteStore
from gateway.storage.redis_calls import read_or_skip
from gateway.types import Request


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks: how this prompt differs from that of an earlier message; None on the first turn."""

    pieces: Sequence[Piece]
    previous_message_id: str | None


class Diagnosis:
    """For one message."""

    def __init__(self, store: ByteStore, question: Question, message_id: str) -> None:
        self._store = store
        self._question = question
        self._message_id = message_id

    async def tell(self, request: Request, cached: Cached) -> dict[str, Any] | None:
        """The `diagnostics` of the answer. None for a first turn, and where nothing was changed and all was read."""
        previous = self._question.previous_message_id
        if previous is None:
            return None
        try:
            written = await self._store.find(request.tenant.name, store_key(previous))
        except RedisDownError:
            return _reason("unavailable", detail="what is remembered cannot be reached")
        known = None if written is None else read_or_skip("fingerprints", partial(Fingerprint.from_json, written))
        if known is None:
            return _reason("previous_message_not_found")
        return self._compared(known, previous, request, cached)

    async def remember(self, request: Request, cached: Cached) -> None:
        """For the next message. Never raises."""
        pieces = self._question.pieces
        taken = take(self._message_id, request.model, request.salt, pieces, cached.read + cached.written)
        with suppress(RedisDownError):
            await self._store.put(request.tenant.name, store_key(self._message_id), taken.to_json())

    def _compared(self, before: Fingerprint, previous: str, request: Request, cached: Cached) -> dict[str, Any] | None:
        change = compare(before, previous, request.model, self._question.pieces)
        missed = max(0, before.cached_tokens - cached.read)
        if change is not None:
            path = None if change.path is None else dotted(change.path)
            told = {"path": path, "word": change.word, "text": change.text}
            known = {key: value for key, value in told.items() if value is not None}
            return _reason(f"{change.section or 'model'}_changed", cache_missed_input_tokens=missed, **known)
        if not missed or not (request.trace.breakpoints or request.trace.lease):
            return None
        return _reason("unavailable", detail=self._why(before, previous, request))

    def _why(self, before: Fingerprint, previous: str, request: Request) -> str:
        """Why a prompt was not read that begins as the one before did."""
        if not same_scope(before, previous, request.salt):
            return "the requests are in different namespaces"
        if any(tokens >= before.cached_tokens for tokens in request.trace.lease_reads):
            return "the entry is further before the breakpoints than the look back goes"
        return "the entry has expired, or there was no room to keep it"


def _reason(kind: str, **more: Any) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, **more}}
