"""Which requests the response cache is for, and which answers it keeps. Pure."""

from __future__ import annotations

from typing import Literal

from gateway.config import ResponseCacheSettings
from gateway.responses.recording import Recording
from gateway.types import Request, Reuse

Mode = Literal["on", "ask", "off"]


def find_bypass(request: Request, settings: ResponseCacheSettings, mode: Mode) -> str | None:
    """Why the cache has no part in it, as one word for headers and metrics; None where it has. `mode` is its tenant's.

    off        the operator does not want it for this tenant, or the client for this request
    not-asked  the tenant's requests have to ask for it
    no-store   neither read nor kept, as the client wants
    prewarm    nothing is generated
    uncached   the client wants nothing to be reused, not even blocks
    tools      the answer may call tools, which somebody then runs
    sampling   the next answer to it would be another
    """
    reuse = request.reuse
    if (reason := find_refusal(reuse, mode)) is not None:
        return reason
    if request.prewarm:
        return "prewarm"
    if not request.use_cache:
        return "uncached"
    if request.tool_use is not None and not (settings.tool_calls or reuse.asked):
        return "tools"
    if not (settings.requests == "all" or reuse.asked or deterministic(request)):
        return "sampling"
    return None


def find_refusal(reuse: Reuse, mode: Mode) -> str | None:
    """Why the operator or the client does not want it: `off`, `not-asked` or `no-store`."""
    if mode == "off" or reuse.asked is False:
        return "off"
    if mode == "ask" and not reuse.asked:
        return "not-asked"
    return None if reuse.read or reuse.write else "no-store"


def deterministic(request: Request) -> bool:
    """Whether an engine would give the same answer again: the likeliest tokens, or a seed, which engines keep to."""
    return request.sampling.temperature == 0 or request.sampling.seed is not None


def may_keep(recording: Recording, settings: ResponseCacheSettings) -> bool:
    """Of complete answers. One that was cut at its limit says less than its request asked for."""
    return recording.reason != "length" or settings.truncated
