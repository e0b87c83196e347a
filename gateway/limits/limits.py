"""The limits of tenants and of single keys: an estimate is reserved before a request is answered, and corrected
afterwards. A request has to fit its tenant's and its key's: all of both is taken at once, or nothing.

Knows no wire format and no Redis: counters.py counts, amounts.py has the amounts, the dialects write the headers. A
owner without limits costs nothing; one or both with limits, a call of the counters before the answer and one after it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple

from gateway import tasks
from gateway.config import LimitSettings, TenantSettings
from gateway.errors import BudgetError, RateLimitError
from gateway.limits.amounts import Amounts, Limits, costs, limits_of, refusal, to_set_aside, used, waits_us
from gateway.limits.budgets import Budgets
from gateway.limits.counters import Costs, Counters, SharedCounters, Take, Taken, quiet, room
from gateway.limits.holds import Hold
from gateway.types import LimitKind, Need, Room, Usage, owner_in_words, tenant_of

CLOSE_LIMIT_S: Final = 2.0
"""Seconds for unsent corrections when the gateway ends."""


@dataclass(slots=True)
class _Account:
    """An owner that has limits, as this gateway knows it.

    taken       the last answer of its counters
    updated_s   when that was, by the monotonic clock
    flights     leases that this gateway holds for it, and their counters
    """

    owner: str
    limits: Limits
    taken: Taken = field(default_factory=lambda: Taken(True, 0, {}))
    updated_s: float = 0.0
    flights: dict[str, Counters] = field(default_factory=dict)


class _Part(NamedTuple):
    """What a request takes of one owner."""

    account: _Account
    limits: Limits
    amounts: Amounts
    flight: str | None

    @property
    def take(self) -> Take:
        limits = self.limits
        return Take(costs(self.amounts, limits), self.flight, limits.max_in_flight, limits.burst_us)


class TenantLimits:
    """Limits of [limits], [[tenants]] and keys. Owners are names of types.owners_of. Between `start` and `close` leases
    are renewed."""

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
        self._refused: dict[str, Counter[str]] = {}  # requests since the start, by tenant and limit
        self._gateway = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._started = False
        self._renewing: asyncio.Task[None] | None = None
        self._sending = set[asyncio.Task[None]]()
        self.replace(settings, tenants)

    def replace(
        self, settings: LimitSettings, tenants: Sequence[TenantSettings], keys: Sequence[TenantSettings] = ()
    ) -> None:
        """From now on these limits hold. What was set aside for a request is settled by those that it began with.
        `keys` are those that have any, as Directory.limited_keys tells them."""
        self._settings = settings
        if self.budgets is not None:
            self.budgets.replace((*tenants, *keys))
        old, self._accounts = self._accounts, {}
        for owner, limits in limits_of(settings, tenants, keys):
            account = self._accounts[owner] = old.get(owner) or _Account(owner, limits)
            account.limits = limits
        if self._started:
            self.start()

    async def refresh(self) -> None:
        """Learns what all gateways have spent of budgets. Never raises."""
        if self.budgets is not None:
            await self.budgets.refresh()

    @property
    def has_any(self) -> bool:
        """Whether any owner has a limit or a budget."""
        return bool(self._accounts) or (self.budgets is not None and self.budgets.has_any)

    def has(self, *owners: str) -> bool:
        """Whether any has any limit."""
        return not self._accounts.keys().isdisjoint(owners)

    def rooms(self, *owners: str) -> dict[LimitKind, Room]:
        """What is left of each limit, by the last answer of the counters and the clock; of several owners what the one
        has that has least. No I/O."""
        rooms: dict[LimitKind, Room] = {}
        for owner in owners:
            if (account := self._accounts.get(owner)) is not None:
                for kind, one in self._rooms(account).items():
                    rooms[kind] = min(one, rooms.get(kind, one), key=lambda room: (room.remaining, -room.reset_s))
        return rooms

    def _rooms(self, account: _Account) -> dict[LimitKind, Room]:
        taken = account.taken
        now_us = taken.now_us + round((self._clock() - account.updated_s) * 1e6)
        limits, full_us = account.limits, taken.full_us
        return {
            kind: room(limit, full_us.get(kind, 0), now_us, limits.burst_us)
            for kind, limit in limits.per_minute.items()
        }

    async def set_aside(self, owners: Sequence[str], need: Need) -> Hold | None:
        """Reserves until the hold is settled, of a tenant and perhaps a key of it. None without limits. Raises
        RateLimitError and nothing else: without Redis the counters of this gateway decide."""
        accounts = [account for owner in owners if (account := self._accounts.get(owner)) is not None]
        if not accounts:
            return None
        try:
            return await self._set_aside(accounts, need)
        except RateLimitError as error:
            self._note(owners[0], error)
            raise

    async def set_money_aside(
        self, owners: Sequence[str], model: str, need: Need, *, at_batch_price: bool = False
    ) -> Hold | None:
        """As `set_aside`, of their budgets. An answer without a maximum is as long as `assumed_completion_tokens`.
        Raises BudgetError."""
        if (budgets := self.budgets) is None or not need.generates:
            return None
        each = self._settings.assumed_completion_tokens if need.answer_tokens is None else need.answer_tokens
        outputs = need.answers * each
        try:
            return await budgets.set_aside(owners, model, need.input_tokens, outputs, at_batch_price=at_batch_price)
        except BudgetError as error:
            self._note(owners[0], error)
            raise

    async def _set_aside(self, accounts: Sequence[_Account], need: Need) -> Hold:
        flight = f"{self._gateway}-{next(self._numbers)}" if need.generates else None
        parts = [
            _Part(
                one,
                one.limits,
                to_set_aside(need, one.limits, self._settings),
                flight if one.limits.max_in_flight else None,
            )
            for one in accounts
        ]
        first, *more = parts
        also = (more[0].account.owner, more[0].take) if more else None
        taken, counters = await self._counters.take(first.account.owner, first.take, also)
        of_each = (taken, replace(taken, full_us=taken.also_us))
        for part, its in zip(parts, of_each, strict=False):
            part.account.taken, part.account.updated_s = its, self._clock()
        if not taken.admitted:
            raise _refusal(list(zip(parts, of_each, strict=False)))
        for part in parts:
            if part.flight is not None:
                part.account.flights[part.flight] = counters
        return Hold(partial(self._settle, parts, counters))

    def _note(self, owner: str, error: RateLimitError) -> None:
        self._refused.setdefault(tenant_of(owner), Counter())[error.limit] += 1

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
        for owner, account in list(self._accounts.items()):
            for counters in set(account.flights.values()):
                flights = [flight for flight, counts in account.flights.items() if counts is counters]
                await quiet(counters.renew(owner, flights))

    def figures(self) -> dict[str, Any]:
        """For /metrics and /admin/stats, as of the last answers of the counters: of tenants, as keys may be many. What
        a limit of a key refused is among what its tenant was refused."""
        figures = {name: self._figures(account) for name, account in self._accounts.items() if tenant_of(name) == name}
        for name, budget in ({} if self.budgets is None else self.budgets.figures()).items():
            figures.setdefault(name, {"refused": {}})["budget"] = budget
        for name, refused in self._refused.items():
            figures.setdefault(name, {})["refused"] = dict(refused)
        return {"tenants": figures}

    def _figures(self, account: _Account) -> dict[str, Any]:
        figures: dict[str, Any] = {
            kind: {"limit": one.limit, "remaining": one.remaining, "reset_s": round(one.reset_s, 3)}
            for kind, one in self._rooms(account).items()
        }
        if most := account.limits.max_in_flight:
            figures["in_flight"] = {"limit": most, "of_this_gateway": len(account.flights)}
        return {**figures, "refused": {}}

    async def _renew_always(self) -> None:
        while not tasks.was_cancelled():
            await asyncio.sleep(self._settings.lease_s / 3)
            await self.renew()

    def _settle(self, parts: Sequence[_Part], counters: Counters, usage: Usage | None) -> None:
        changes, flights = list[tuple[str, Costs]](), dict[str, None]()
        for account, limits, amounts, flight in parts:
            spent = amounts if usage is None else used(usage, self._settings)
            before, after = costs(amounts, limits), costs(spent, limits)
            own = {kind: cost - after[kind] for kind, cost in before.items() if cost != after[kind]}
            if flight is not None:
                account.flights.pop(flight, None)
                flights[flight] = None
            if own or flight is not None:
                changes.append((account.owner, own))
        if changes:
            first, also = changes[0], changes[1] if changes[1:] else None
            sending = tasks.spawn(quiet(counters.give_back(*first, list(flights), also)), name="settle limits")
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)


def _refusal(asked: Sequence[tuple[_Part, Taken]]) -> RateLimitError:
    """Of the owner that needs the longer wait, where it is one of time."""

    def wait(one: tuple[_Part, Taken]) -> int:
        part, taken = one
        return max(waits_us(part.limits, part.amounts, taken).values(), default=0)

    longest = max(asked, key=wait)
    part, taken = longest if wait(longest) else asked[longest[1].refused_by]
    return refusal(part.limits, part.amounts, taken, owner_in_words(part.account.owner))
