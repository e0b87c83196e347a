"""Usage of a request: the first update of an engine becomes its trace, and the trace the usage for the client.

Knows no I/O. The pipeline calls it; admin/accounting.py reads the trace when the answer has ended.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from engine.protocol import TOKEN_BYTES, Breakpoint, SequenceUpdate
from gateway.types import ChatPrompt, EncodedPrompt, Lease, Request, Trace, elapsed_ms

log = logging.getLogger(__name__)

BEGINNING_TOKENS: Final = 1024
"""Prompts that share fewer are not worth an operator's attention; upstream APIs cache nothing shorter."""

MAX_BEGINNINGS: Final = 4096
"""Prompt beginnings that are remembered with their last key, about 200 bytes each."""


class KeyMisses:
    """Finds requests that reused nothing for one reason: an earlier prompt began like theirs and came with another
    `prompt_cache_key`, which separates. An agent that sends its session's id as the key never reuses its own prompt."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, str] = OrderedDict()
        self._logged: set[str] = set()  # tenants

    def look(self, request: Request, prompt: EncodedPrompt) -> None:
        """Call it after `meter_cached`. Sets `missed_by_key` of the trace; the first time for a tenant it is logged."""
        scope = request.scope
        if scope is None or not scope.key or prompt.num_tokens < BEGINNING_TOKENS or not request.use_cache:
            return
        shared = f"{len(request.model)}:{request.model}{replace(scope, key='').salt}".encode()
        beginning = prompt.tokens[: BEGINNING_TOKENS * TOKEN_BYTES]
        digest = hashlib.blake2b(beginning + shared, digest_size=16).digest()
        before = self._keys.pop(digest, scope.key)
        self._keys[digest] = scope.key
        if len(self._keys) > MAX_BEGINNINGS:
            self._keys.popitem(last=False)
        if before == scope.key or request.trace.cached_tokens:
            return
        request.trace.missed_by_key = True
        if request.tenant.name not in self._logged:
            self._logged.add(request.tenant.name)
            log.info(
                "request %s of tenant %s reused none of %d tokens: its first %d tokens came before with another "
                'prompt_cache_key. If keys are session ids, set cache_key = "hint" in [prompt] or for the tenant',
                request.request_id,
                request.tenant.name,
                prompt.num_tokens,
                BEGINNING_TOKENS,
            )


def meter_start(request: Request, update: SequenceUpdate) -> None:
    """With the first update of a sequence: when the first token came."""
    request.trace.first_token_ms = elapsed_ms(request)
    request.trace.queue_ms += update.queue_ms or 0.0


def meter_cached(request: Request, prompt: EncodedPrompt, block_size: int, update: SequenceUpdate) -> None:
    """With the first update, and again with the one that says what was reused, where that is a later one: what was
    reused and leased."""
    trace = request.trace
    trace.cached_tokens = update.cached_tokens or 0
    trace.lease_read_tokens = update.lease_read_tokens or 0
    trace.lease_write_tokens = update.lease_write_tokens or 0
    trace.reported_cached_tokens = _reported_cached(trace, only_leased=request.only_leased)
    if isinstance(request.prompt, ChatPrompt) and request.prompt.markers:
        points = prompt.breakpoints
        degraded = len(points) if update.leases_degraded is None else update.leases_degraded
        if points or not request.prompt.min_breakpoint_tokens:
            trace.lease = Lease(degraded, points[-1] if points and not degraded else None)
        trace.breakpoints, trace.lease_reads = points, tuple(update.lease_reads or ())
        if points and not degraded:
            trace.kept_tokens = points[-1].tokens
        elif trace.lease_write_tokens:
            trace.kept_tokens = trace.lease_read_tokens + trace.lease_write_tokens
        end = min(trace.lease_read_tokens + trace.lease_write_tokens, trace.prompt_tokens)
        trace.lease_writes = tuple(_lease_writes(points, trace.reported_cached_tokens, end))
    else:
        end = prompt.num_tokens // block_size * block_size if request.use_cache else 0
    trace.cache_write_tokens = max(0, end - trace.reported_cached_tokens)


def _lease_writes(points: Sequence[Breakpoint], read: int, end: int) -> Iterator[tuple[float, int]]:
    """Time to live and tokens of what each breakpoint adds to the one before it, between what is reported as cached and
    the last leased token."""
    for point in points:
        if read < point.tokens <= end:
            yield point.ttl_s, point.tokens - read
            read = point.tokens


def _reported_cached(trace: Trace, *, only_leased: bool) -> int:
    """Never less than a lease promised, however much of it was computed again."""
    reused = 0 if only_leased else trace.cached_tokens
    return min(max(reused, trace.lease_read_tokens), trace.prompt_tokens)
