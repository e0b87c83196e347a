"""What is accounted for with requests that an upstream was not asked for, or not for them: into their traces, which
limits, metrics and ledger read.
"""

from __future__ import annotations

import time
from typing import Any

from gateway.responses.flights import Flight
from gateway.types import Hit, Trace, UpstreamRequest


def account_hit(request: UpstreamRequest, hit: Hit) -> None:
    """Nothing was asked of an upstream for it."""
    request.trace.first_token_ms = request.trace.overhead_ms = took_ms(request)
    _count(request, hit)


def account_shared(request: UpstreamRequest, flight: Flight[Any], hit: Hit) -> None:
    """The first to read to the end accounts for what was used, where the request that it was asked for has left."""
    paid, flight.unpaid = flight.unpaid, None
    if paid is None:
        _count(request, hit)
        return
    _pay(request, paid)


def account_given_up(request: UpstreamRequest, flight: Flight[Any]) -> None:
    """The last to leave accounts for what was used, where the request that it was asked for has left before."""
    paid, flight.unpaid = flight.unpaid, None
    if paid is not None and paid is not request.trace:
        _pay(request, paid)


def _pay(request: UpstreamRequest, paid: Trace) -> None:
    trace = request.trace
    trace.hit, trace.engine, trace.by_upstream, trace.untold = None, paid.engine, paid.by_upstream, paid.untold
    trace.prompt_tokens, trace.completion_tokens = paid.prompt_tokens, paid.completion_tokens
    trace.cached_tokens, trace.told_cached_tokens = paid.cached_tokens, paid.told_cached_tokens
    trace.cache_write_tokens, trace.lease_writes = paid.cache_write_tokens, paid.lease_writes


def _count(request: UpstreamRequest, hit: Hit) -> None:
    trace = request.trace
    trace.hit = hit
    trace.prompt_tokens = trace.cached_tokens = trace.told_cached_tokens = hit.prompt_tokens
    trace.completion_tokens = hit.completion_tokens


def took_ms(request: UpstreamRequest) -> float:
    """Milliseconds since it came."""
    return (time.monotonic() - request.received_s) * 1e3
