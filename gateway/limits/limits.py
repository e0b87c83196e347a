"""The limits of tenants: an estimate is reserved before a request is answered, and corrected afterwards.

Knows no wire format and no Redis: counters.py counts, amounts.py has the amounts, the dialects write the headers. A
tenant without limits costs nothing; one with limits, a call of the counters before the answer and one after it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gateway import tasks
from gateway.config import LimitSettings, TenantSettings
from gateway.errors import RateLimitError
from gateway.limits.amounts import Amounts, Limits, costs, limits_of, refusal, to_set_aside, used
from gateway.limits.budgets import Budgets
from gateway.limits.counters import Counters, SharedCounters, Take, Taken, quiet, room
from gateway.limits.holds import Hold
from gateway.types import LimitKind, Need, Room, Usage

CLOSE_LIMIT_S: Final = 2.0
"""Seconds for unsent corrections when the gateway ends."""


@dataclass(slots=True)
class _Account:
    """A tenant that has limits, as this gateway knows it.

    taken       the last answer of its counters
    updated_s   when that was, by the monotonic clock
    flights     leases that this gateway holds for it, and their counters
    refused     requests since the start, by the limit
    """

    limits: Limits
    taken: Taken = field(default_factory=lambda: Taken(True, 0, {}))
    updated_s: float = 0.0
    flights: dict[str, Counters] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)


class TenantLimits:
    """Limits of [limits] and [[tenants]]. Between `start` and `close` leases are renewed."""

    def __init__(
        self,
        settings: LimitSettings,
        tenants: Sequence[TenantSettings],
        counters: SharedCounters,
        clock: Callable[[], float] = time.monotonic,
        budgets: Budgets | None = None,
    ) -> None:
        self.budgets = budgets
        self._counters = counters
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        self._gateway = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._started = False
        self._renewing: asyncio.Task[None] | None = None
        self._sending = set[asyncio.Task[None]]()
        self.replace(settings, tenants)

    def replace(self, settings: LimitSettings, tenants: Sequence[TenantSettings]) -> None:
        """From now on these limits hold. What was set aside for a request is settled by those that it began with."""
        self._settings = settings
        if self.budgets is not None:
            self.budgets.replace(tenants)
        old, self._accounts = self._accounts, {}
        for name, limits in limits_of(settings, tenants):
            account = self._accounts[name] = old.get(name) or _Account(limits)
            account.limits = limits
        if self._started:
            self.start()

    def has(self, tenant: str) -> bool:
        """Whether it has any limit."""
        return tenant in self._accounts

    def rooms(self, tenant: str) -> dict[LimitKind, Room]:
        """What is left of each limit, by the last answer of the counters and the clock. No I/O."""
        account = self._accounts.get(tenant)
        if account is None:
            return {}
        taken = account.taken
        now_us = taken.now_us + round((self._clock() - account.updated_s) * 1e6)
        limits, full_us = account.limits, taken.full_us
        return {
            kind: room(limit, full_us.get(kind, 0), now_us, limits.burst_us)
            for kind, limit in limits.per_minute.items()
        }

    async def set_aside(self, tenant: str, need: Need) -> Hold | None:
        """Reserves until the hold is settled. None for a tenant without limits. Raises RateLimitError and nothing
        else: without Redis the counters of this gateway decide."""
        if (account := self._accounts.get(tenant)) is None:
            return None
        try:
            return await self._set_aside(tenant, account, need)
        except RateLimitError as error:
            account.refused[error.limit] += 1
            raise

    async def set_money_aside(self, tenant: str, model: str, need: Need) -> Hold | None:
        """As `set_aside`, of its budget, at the price of the online lane. An answer without a maximum is as long as
        `assumed_completion_tokens`. Raises BudgetError."""
        if (budgets := self.budgets) is None or not need.generates:
            return None
        each = self._settings.assumed_completion_tokens if need.answer_tokens is None else need.answer_tokens
        return await budgets.set_aside(tenant, model, need.input_tokens, need.answers * each)

    async def _set_aside(self, tenant: str, account: _Account, need: Need) -> Hold:
        limits = account.limits
        amounts = to_set_aside(need, limits, self._settings)
        flight = f"{self._gateway}-{next(self._numbers)}" if need.generates and limits.max_in_flight else None
        take = Take(costs(amounts, limits), flight, limits.max_in_flight, limits.burst_us)
        taken, counters = await self._counters.take(tenant, take)
        account.taken, account.updated_s = taken, self._clock()
        if not taken.admitted:
            raise refusal(limits, amounts, taken, tenant)
        if flight is not None:
            account.flights[flight] = counters
        return Hold(partial(self._settle, tenant, account, limits, counters, amounts, flight))

    def start(self) -> None:
        self._started = True
        if self._renewing is None and any(account.limits.max_in_flight for account in self._accounts.values()):
            self._renewing = tasks.spawn(self._renew_always(), name="renew leases of requests in flight")

    async def close(self) -> None:
        """Waits for what is on its way to the counters, CLOSE_LIMIT_S at most."""
        await tasks.cancel(self._renewing)
        if self.budgets is not None:
            await self.budgets.close()
        if sending := self._sending | self._counters.ending:
            await asyncio.wait(sending, timeout=CLOSE_LIMIT_S)

    async def renew(self) -> None:
        """Moves the ends of all leases of this gateway on. Never raises."""
        for tenant, account in self._accounts.items():
            for counters in set(account.flights.values()):
                flights = [flight for flight, counts in account.flights.items() if counts is counters]
                await quiet(counters.renew(tenant, flights))

    def figures(self) -> dict[str, Any]:
        """For /metrics and /admin/stats, as of the last answers of the counters."""
        figures = {name: self._figures(name) for name in self._accounts}
        for name, budget in ({} if self.budgets is None else self.budgets.figures()).items():
            figures.setdefault(name, {"refused": {}})["budget"] = budget
        return {"tenants": figures}

    def _figures(self, tenant: str) -> dict[str, Any]:
        account = self._accounts[tenant]
        figures: dict[str, Any] = {
            kind: {"limit": one.limit, "remaining": one.remaining, "reset_s": round(one.reset_s, 3)}
            for kind, one in self.rooms(tenant).items()
        }
        if most := account.limits.max_in_flight:
            figures["in_flight"] = {"limit": most, "of_this_gateway": len(account.flights)}
        return {**figures, "refused": dict(account.refused)}

    async def _renew_always(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._settings.lease_s / 3)
            await self.renew()

    def _settle(
        self,
        tenant: str,
        account: _Account,
        limits: Limits,
        counters: Counters,
        amounts: Amounts,
        flight: str | None,
        usage: Usage | None,
    ) -> None:
        spent = amounts if usage is None else used(usage, self._settings)
        before, after = costs(amounts, limits), costs(spent, limits)
        changes = {kind: cost - after[kind] for kind, cost in before.items() if cost != after[kind]}
        flights = [] if flight is None else [flight]
        for one in flights:
            account.flights.pop(one, None)
        if changes or flights:
            sending = tasks.spawn(quiet(counters.give_back(tenant, changes, flights)), name="settle limits")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
