"""Stands between the pipeline and the answer to a message: it finds out what the cache did for the prompt, in the terms
of the Anthropic API, before the answer begins.

Where an entry was read that is at none of the request's breakpoints, the blocks before those are looked for in the
prompt, the nearest first: a conversation that is marked at its end reads what its turn before has written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final, Protocol

from engine.protocol import Breakpoint
from gateway.api.anthropic.caching import DEFAULT_TTL, HOUR_S, Cached, Caching, account
from gateway.api.anthropic.diagnosis import Diagnosis
from gateway.api.anthropic.response import MessageShape
from gateway.config import duration_s
from gateway.types import ChatPrompt, Event, Finished, Marker, Request, Started

NEAR: Final = 4
"""Blocks before a breakpoint that are looked for first."""


class Pipeline(Protocol):
    """The pipeline."""

    def answer(self, request: Request) -> AsyncGenerator[Event, None]: ...

    async def breakpoints(self, request: Request) -> tuple[Breakpoint, ...]:
        """Where the markers of its prompt are, in tokens."""
        ...


class Accounted:
    """The pipeline, for one message."""

    def __init__(self, pipeline: Pipeline, caching: Caching, shape: MessageShape, diagnosis: Diagnosis | None) -> None:
        """`diagnosis` None: nobody asks for one, and nothing is remembered."""
        self._pipeline = pipeline
        self._caching = caching
        self._shape = shape
        self._diagnosis = diagnosis

    async def answer(self, request: Request) -> AsyncGenerator[Event, None]:
        """The events of the pipeline. The shape knows the figures before the first of them is written."""
        async with aclosing(self._pipeline.answer(request)) as events:
            async for event in events:
                if type(event) is Started:
                    await self._begin(request)
                elif type(event) is Finished and self._diagnosis is not None:
                    await self._diagnosis.remember(request, self._shape.cached)
                yield event

    async def _begin(self, request: Request) -> None:
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
