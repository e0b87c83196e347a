"""Memory of request bodies: bounded for all requests together, and for those of each tenant.

A request claims what its body takes while it arrives, as it is decoded and as it is parsed, and gives all of it back
when it is over: middleware.py does, whatever became of it. Belongs to the event loop.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from aiohttp import web

from gateway.errors import OverloadedError, QueueFullError

TENANT_SHARE: Final = 2
"""One tenant has a half at most, so that no tenant alone can shut out the others. A body of the largest size that is
allowed fits in any case."""

RETRY_AFTER_S: Final = 1.0
"""Most requests are over by then, or generate; a client with a refused body loses little by waiting."""


class Bodies:
    """Bytes that bodies in flight take, of all and by tenant."""

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.max_bytes = max(max_bytes, max_body_bytes)
        self.max_tenant_bytes = max(self.max_bytes // TENANT_SHARE, max_body_bytes)
        self._by_tenant: Counter[str] = Counter()
        self.num_bytes = 0

    def add(self, tenant: str, num_bytes: int) -> None:
        """For claims, as `remove`. Raises QueueFullError and OverloadedError."""
        if self._by_tenant[tenant] + num_bytes > self.max_tenant_bytes:
            raise QueueFullError(
                f"The bodies of your requests in flight take {_mib(self._by_tenant[tenant])} MiB of memory, of "
                f"{_mib(self.max_tenant_bytes)} that one tenant may use (server.max_bodies_bytes). Please try again "
                f"when fewer of them are in flight.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self.num_bytes + num_bytes > self.max_bytes:
            raise OverloadedError(
                f"The bodies of requests in flight take all of the {_mib(self.max_bytes)} MiB that they may "
                "(server.max_bodies_bytes). Please try again soon.",
                retry_after_s=RETRY_AFTER_S,
            )
        self._by_tenant[tenant] += num_bytes
        self.num_bytes += num_bytes

    def remove(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self._by_tenant[tenant] -= num_bytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


class Claim:
    """What one request's body takes."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies = bodies
        self._tenant = tenant
        self.num_bytes = 0

    def grow_to(self, num_bytes: int, text_bytes: int = 0) -> None:
        """So many in all, unless there are more already. With its parsed texts it is at most the tenant's share, so
        that they alone never refuse a body. Raises QueueFullError for the tenant's share, OverloadedError for that
        of all; what was claimed before stays."""
        num_bytes = max(num_bytes, min(num_bytes + text_bytes, self._bodies.max_tenant_bytes))
        if num_bytes > self.num_bytes:
            self._bodies.add(self._tenant, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes

    def release(self) -> None:
        """All of it. Does nothing the second time."""
        self._bodies.remove(self._tenant, self.num_bytes)
        self.num_bytes = 0


BODIES: web.AppKey[Bodies] = web.AppKey("bodies", Bodies)
"""Those of one application."""


def _mib(num_bytes: int) -> int:
    return math.ceil(num_bytes / (1 << 20))
