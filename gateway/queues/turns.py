"""Whose turn it is among tenants (start-time fair queueing). Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from gateway.types import Ask

MAX_IDLE_TENANTS: Final = 1024
"""Tenants without requests whose turns are remembered, until the next look at who need not be."""


class Served(Protocol):
    """See lane.Waiter."""

    @property
    def ask(self) -> Ask: ...

    @property
    def cost_s(self) -> float: ...

    @property
    def since_s(self) -> float: ...


class Turns:
    """Whose turn it is, in seconds of engines' time. Who comes back after a while has saved nothing up, and who used
    more than the others waits until they have had as much."""

    def __init__(self) -> None:
        self.now_s = 0.0  # where those stand whose turn it was last
        self._next_s: dict[str, float] = {}

    def start_s(self, waiter: Served) -> float:
        """Where its tenant stands with it: where everybody stood when it arrived, or behind what the tenant used."""
        return max(waiter.since_s, self._next_s.get(waiter.ask.tenant, 0.0))

    def took(self, waiter: Served) -> None:
        start_s = self.start_s(waiter)
        self.now_s = max(self.now_s, start_s)
        self._next_s[waiter.ask.tenant] = start_s + waiter.cost_s / waiter.ask.weight

    def forget_all_but(self, tenants: Iterable[str]) -> None:
        """Those who would stand where everybody begins need not be remembered."""
        if len(self._next_s) > MAX_IDLE_TENANTS:
            kept = set(tenants)
            self._next_s = {
                tenant: next_s for tenant, next_s in self._next_s.items() if tenant in kept or next_s > self.now_s
            }
