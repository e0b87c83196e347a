"""A request gets its slot at an upstream, in which it is tried: a line of a batch what online requests leave
(slots.py), an online request its turn where those are bounded (online_slots.py). The stage asks here.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from gateway.errors import DeadlineError, QueueFullError
from gateway.types import Ask, UpstreamRequest
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.online_slots import OnlineSlots
from gateway.upstreams.upstream import Upstream

PLACE_S: Final = 60.0
"""That a line of a batch waits for a slot, until its job is looked at again, which may be cancelled by then."""

JUST_NOW_S: Final = 0.01
"""A request that came so lately is not worth a copy with another beginning."""


async def take_place(
    request: UpstreamRequest, upstream: Upstream, place: ExitStack, max_wait_s: float, *, others: bool
) -> UpstreamRequest:
    """The request, whose time at the upstream begins when it has its place, which `place` gives back.

    max_wait_s  of an online request, in front of all the upstreams that it comes to
    others      whether another one can be asked instead
    Raises AttemptFailed, and for an online request QueueFullError and DeadlineError.
    """
    began_s = time.monotonic()
    if upstream.breaker.state == "open":
        raise AttemptFailed("open", f"{upstream.name} is left alone", again=False)
    try:
        if request.lane == "online":
            assert upstream.online is not None, "who needs no place asks for none"
            tenant = request.tenant
            if not upstream.online.take_free(tenant.name, tenant.weight):
                wait_s = max_wait_s - request.trace.queue_ms / 1e3
                if others and upstream.settings.overflow_s is not None:
                    wait_s = min(wait_s, upstream.settings.overflow_s)
                await _wait(request, upstream, upstream.online, wait_s)
            place.callback(upstream.online.release, tenant.name)
        elif await upstream.batch_slots.take(min(PLACE_S, request.deadline_s - began_s)):
            place.callback(upstream.batch_slots.release)
        else:
            raise AttemptFailed("busy", f"{upstream.name} has no slot for the batch lane", again=False)
    finally:
        now_s = time.monotonic()
        request.trace.queue_ms += (now_s - began_s) * 1e3
    return request if now_s - request.received_s < JUST_NOW_S else replace(request, received_s=now_s)


async def _wait(request: UpstreamRequest, upstream: Upstream, places: OnlineSlots, wait_s: float) -> None:
    tenant, deadline_s = request.tenant, min(request.deadline_s, time.monotonic() + wait_s)
    ask = Ask(tenant.name, 0, deadline_s, tier=request.tier, priority=request.priority, weight=tenant.weight)
    try:
        await places.take(ask)
    except (QueueFullError, DeadlineError) as error:
        upstream.errors["full" if isinstance(error, QueueFullError) else "late"] += 1
        raise
