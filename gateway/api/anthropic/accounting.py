"""What the cache did for the prompt of a message, in the terms of the Anthropic API, before its answer begins.

Where an entry was read that is at none of the request's breakpoints, the blocks before those are looked for in the
prompt: a conversation that is marked at its end reads what its turn before has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from engine.protocol.frozen import dataclass
from gateway.api.anthropic.caching import DEFAULT_TTL, HOUR_S, Cached, Caching, account
from gateway.api.anthropic.fingerprint import Fingerprint, PromptPart, compare, same_scope, store_key, take
from gateway.api.anthropic.response import MessageShape
from gateway.api.anthropic.wire import dotted
from gateway.api.stream import Account
from gateway.config import duration_s
from gateway.errors import RedisDownError
from gateway.pipeline import Pipeline
from gateway.storage.byte_store import ByteStore
from gateway.storage.redis_calls import read_or_skip
from gateway.types import ChatPrompt, Request, Trace


@dataclass(frozen=True, slots=True)
class DiagnosisRequest:
    """A request for diagnostics: the prompt, and the earlier message to compare it with; None on the first turn."""

    parts: Sequence[PromptPart]
    previous_message_id: str | None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Compares a message's prompt with an earlier one by the fingerprint in the store."""

    store: ByteStore
    request: DiagnosisRequest
    message_id: str

    async def report(self, request: Request, cached: Cached) -> dict[str, Any] | None:
        """The `diagnostics` of the answer. None for a first turn, and where nothing was changed and all was read."""
        previous = self.request.previous_message_id
        if previous is None:
            return None
        try:
            written = await self.store.find(request.tenant.name, store_key(previous))
        except RedisDownError:
            return _reason("unavailable", detail="the store of fingerprints is unreachable")
        known = None if written is None else read_or_skip("fingerprints", partial(Fingerprint.from_json, written))
        if known is None:
            return _reason("previous_message_not_found")
        return self._compared(known, previous, request, cached)

    async def remember(self, request: Request, cached: Cached) -> None:
        """For the next message. Never raises."""
        parts = self.request.parts
        taken = take(self.message_id, request.model, request.salt, parts, cached.read + cached.written)
        with suppress(RedisDownError):
            await self.store.put(request.tenant.name, store_key(self.message_id), taken.to_json())

    def _compared(self, before: Fingerprint, previous: str, request: Request, cached: Cached) -> dict[str, Any] | None:
        change = compare(before, previous, request.model, self.request.parts)
        missed = max(0, before.cached_tokens - cached.read)
        if change is not None:
            known = {name: value for name, value in change._asdict().items() if value is not None}
            kind = f"{known.pop('section', 'model')}_changed"
            if change.path is not None:
                known["path"] = dotted(change.path)
            return _reason(kind, cache_missed_input_tokens=missed, **known)
        if not missed or not (request.trace.breakpoints or request.trace.lease):
            return None
        return _reason("unavailable", detail=self._why(before, previous, request))

    def _why(self, before: Fingerprint, previous: str, request: Request) -> str:
        """Why the prefix was not read although the prompt begins as the earlier one did."""
        if not same_scope(before, previous, request.salt):
            return "the requests are in different namespaces"
        if any(tokens >= before.cached_tokens for tokens in request.trace.lease_reads):
            return "the entry is further before the breakpoints than the look back goes"
        return "the entry has expired, or there was no room to keep it"


def _reason(kind: str, **more: Any) -> dict[str, Any]:
    return {"cache_miss_reason": {"type": kind, **more}}


def cached_of(trace: Trace) -> Cached:
    """What an upstream of another API read and wrote; without a time to live it is as the API's default."""
    hour = sum(tokens for ttl_s, tokens in trace.lease_writes if ttl_s >= HOUR_S)
    return Cached(trace.reported_cached_tokens, trace.cache_write_tokens - hour, hour)


@dataclass(frozen=True, slots=True)
class MessageAccount(Account):
    """Fills the cache figures of one message into its shape. `diagnosis` None: no fingerprint is stored."""

    pipeline: Pipeline
    caching: Caching
    shape: MessageShape
    diagnosis: Diagnosis | None

    async def finished(self, request: Request) -> None:
        if request.trace.by_upstream:  # which says with the end of its answer what it read and wrote
            self.shape.cached = cached_of(request.trace)
        elif self.shape.is_predicted:
            await self.started(request)
        if self.diagnosis is not None:
            await self.diagnosis.remember(request, self.shape.cached)

    async def started(self, request: Request) -> None:
        """Fills the figures into the shape. An engine that says with its last token what it reused is taken to reuse
        what the index says, until then."""
        shape, trace = self.shape, request.trace
        if trace.by_upstream:
            return
        shape.is_predicted = trace.cached_late
        shape.cached = cached = await self._cached(request)
        trace.reported_cached_tokens, trace.cache_write_tokens = cached.read, cached.written
        trace.lease_writes = ((duration_s(DEFAULT_TTL), cached.written_5m), (HOUR_S, cached.written_1h))
        shape.lease = trace.lease.state if trace.lease is not None else None
        if self.diagnosis is not None:
            shape.more = {"diagnostics": await self.diagnosis.report(request, shape.cached)}

    async def _cached(self, request: Request) -> Cached:
        trace = request.trace
        if trace.hit is not None:
            return Cached(trace.prompt_tokens)
        points, reads = trace.breakpoints, trace.lease_reads
        entries = {point.tokens for point in points}
        if self.caching.places and points and reads and reads[0] not in entries:
            assert isinstance(request.prompt, ChatPrompt)
            before = replace(request, prompt=replace(request.prompt, markers=self.caching.places))
            entries |= {point.tokens for point in await self.pipeline.breakpoints(before)}
        return account(reads, entries, points, trace.kept_tokens)
