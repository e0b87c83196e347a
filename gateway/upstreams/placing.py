"""A request gets its place at an upstream, in which it is tried: a line of a batch what online requests leave
(places.py), an online request its turn where those are bounded (online_places.py). The stage asks here.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from gateway.errors import DeadlineError, QueueFullError
from gateway.types import Ask, UpstreamRequest
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.online_places import OnlinePlaces
from gateway.upstreams.upstream import Upstream

PLACE_S: Final = 60.0
"""That a line of a batch waits for a place, until its job is looked at again, which may be cancelled by then."""


async def take_place(
    request: UpstreamRequest, upstream: Upstream, place: ExitStack, max_wait_s: float
) -> UpstreamRequest:
    """The request, whose time at the upstream begins when it has its place, which `place` gives back.

    max_wait_s  of an online request, in front of all the upstreams that it comes to
    Raises AttemptFailed, and for an online request QueueFullError and DeadlineError.
    """
    began_s = time.monotonic()
    if upstream.breaker.state == "open":
        raise AttemptFailed("open", f"{upstream.name} is left alone", again=False)
    try:
        if request.lane == "online":
            assert upstream.online is not None, "who needs no place asks for none"
            await _take_turn(request, upstream, upstream.online, place, max_wait_s)
        elif await upstream.places.take(min(PLACE_S, request.deadline_s - began_s)):
            place.callback(upstream.places.release)
        else:
            raise AttemptFailed("busy", f"{upstream.name} has no place for the batch lane", again=False)
    finally:
        now_s = time.monotonic()
        request.trace.queue_ms += (now_s - began_s) * 1e3
    return replace(request, received_s=now_s)


async def _take_turn(
    request: UpstreamRequest, upstream: Upstream, places: OnlinePlaces, place: ExitStack, max_wait_s: float
) -> None:
    tenant, waited_s = request.tenant, request.trace.queue_ms / 1e3
    deadline_s = min(request.deadline_s, time.monotonic() + max_wait_s - waited_s)
    ask = Ask(tenant.name, 0, deadline_s, tier=request.tier, priority=request.priority, weight=tenant.weight)
    try:
        await places.take(ask)
    except (QueueFullError, DeadlineError) as error:
        upstream.errors["full" if isinstance(error, QueueFullError) else "late"] += 1
        raise
    place.callback(places.release, tenant.name)
