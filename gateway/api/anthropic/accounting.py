"""What the cache did for the prompt of a message, in the terms of the Anthropic API, before its answer begins.

Where an entry was read that is at none of the request's breakpoints, the blocks before those are looked for in the
prompt, the nearest first: a conversation that is marked at its end reads what its turn before has written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Protocol

from engine.protocol import Breakpoint
from gateway.api.anthropic.caching import DEFAULT_TTL, HOUR_S, Cached, Caching, account
from gateway.api.anthropic.diagnosis import Diagnosis
from gateway.api.anthropic.response import MessageShape
from gateway.config import duration_s
from gateway.types import ChatPrompt, Marker, Request

NEAR: Final = 4
"""Blocks before a breakpoint that are looked for first."""


class Pipeline(Protocol):
    """The pipeline."""

    async def breakpoints(self, request: Request) -> tuple[Breakpoint, ...]:
        """Where the markers of its prompt are, in tokens."""
        ...


class MessageAccount:
    """A stream.Account, of one message."""

    def __init__(self, pipeline: Pipeline, caching: Caching, shape: MessageShape, diagnosis: Diagnosis | None) -> None:
        """`diagnosis` None: nobody asks for one, and nothing is remembered."""
        self._pipeline = pipeline
        self._caching = caching
        self._shape = shape
        self._diagnosis = diagnosis

    async def finished(self, request: Request) -> None:
        if self._diagnosis is not None:
            await self._diagnosis.remember(request, self._shape.cached)

    async def started(self, request: Request) -> None:
        """Fills the figures into the shape."""
        shape, trace = self._shape, request.trace
        shape.cached = cached = await self._cached(request)
        trace.told_cached_tokens, trace.cache_write_tokens = cached.read, cached.written
        trace.lease_writes = ((duration_s(DEFAULT_TTL), cached.written_5m), (HOUR_S, cached.written_1h))
        shape.lease = trace.lease.state if trace.lease is not None else None
        if self._diagnosis is not None:
            shape.more = {"diagnostics": await self._diagnosis.tell(request, shape.cached)}

    async def _cached(self, request: Request) -> Cached:
        trace = request.trace
        if trace.hit is not None:
            return Cached(trace.prompt_tokens)
        points, reads = trace.breakpoints, trace.lease_reads
        entries = {point.tokens for point in points}
        near, far = self._caching.places[:NEAR], self._caching.places[NEAR:]
        for places in (near, far):
            if places and points and reads and reads[0] not in entries:
                entries |= await self._entries(request, places)
        return account(reads, entries, points, trace.kept_tokens)

    async def _entries(self, request: Request, places: tuple[Marker, ...]) -> set[int]:
        assert isinstance(request.prompt, ChatPrompt)
        asked = replace(request, prompt=replace(request.prompt, markers=places))
        return {point.tokens for point in await self._pipeline.breakpoints(asked)}
