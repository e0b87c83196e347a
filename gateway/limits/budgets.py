"""Budgets of tenants in money, of a day or a month (UTC): what the ledger counts, in NANO units, over all gateways.

A request sets its estimate aside, and is let in while what was spent and set aside is below the budget: however many
come at once, no more than the cost of one is spent beyond it. While Redis is away what it said last and what this
gateway has spent since decide, which is never more than was spent; Redis gets that afterwards, once.

    kvasir:limits:{TENANT}:PERIOD        hash: period, spent, aside; of:GATEWAY -> the number of its last message
    kvasir:limits:{TENANT}:PERIOD:aside  sorted set: NANO:ID of what is set aside, millisecond at which it ends
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from gateway import tasks
from gateway.config import TenantSettings
from gateway.errors import BudgetError, RedisDownError
from gateway.limits.holds import Hold
from gateway.storage.redis_calls import RedisCalls
from gateway.types import NANO

ASIDE_S: Final = 3600.0
"""After which what a gateway set aside that was killed is there again."""
RETRY_S: Final = 1.0
"""Retry-After while requests in flight have set the rest aside."""
CLOSE_LIMIT_S: Final = 2.0

Cost = Callable[[str, int, int], int | None]


class BudgetState(NamedTuple):
    """What is spent of a budget. Money is in NANO units; `reset_s` is in seconds since 1970."""

    period: Literal["day", "month"]
    hard: bool
    limit: int
    used: int
    reset_s: float

    def header(self, now_s: float) -> str:
        used, limit = _money(self.used), _money(self.limit)
        return f"used={used}; limit={limit}; reset={max(1, round(self.reset_s - now_s))}"


@dataclass(slots=True)
class _Account:
    """A tenant's budget, as this gateway knows it.

    period, spent  as Redis said last
    owed, ended    what it does not know yet: spent money, and what is no longer set aside
    sending        the same, with its number, while it may have arrived
    aside          by requests of this gateway
    """

    tenant: str
    kind: Literal["day", "month"]
    hard: bool
    limit: int
    period: str = ""
    spent: int = 0
    owed: int = 0
    ended: list[str] = field(default_factory=list)
    sending: tuple[int, int, list[str]] | None = None
    aside: int = 0
    sender: asyncio.Task[None] | None = None

    @property
    def used(self) -> int:
        return self.spent + self.owed + (0 if self.sending is None else self.sending[1])


class Budgets:
    """Those of [[tenants]]. A tenant without one costs a look into a dictionary."""

    def __init__(
        self, tenants: Sequence[TenantSettings], calls: RedisCalls | None, now: Callable[[], float], cost: Cost
    ) -> None:
        """`calls` None: there is no Redis. `now` is in seconds since 1970. `cost` is Prices.estimate."""
        self._calls = calls
        self._now = now
        self._cost = cost
        self._script = None if calls is None else calls.script(__package__, "budget.lua")
        self._gateway = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._accounts: dict[str, _Account] = {}
        self._senders = set[asyncio.Task[None]]()
        self.replace(tenants)

    def replace(self, tenants: Sequence[TenantSettings]) -> None:
        """From now on these hold."""
        old, self._accounts = self._accounts, {}
        for one in tenants:
            if one.budget is not None:
                limit = round(one.budget * NANO)
                account = old.get(one.name) or _Account(one.name, one.budget_period, one.budget_hard, limit)
                account.kind, account.hard, account.limit = one.budget_period, one.budget_hard, limit
                self._accounts[one.name] = account

    def has(self, tenant: str) -> bool:
        return tenant in self._accounts

    def state(self, tenant: str) -> BudgetState | None:
        """As this gateway knows it. No I/O."""
        if (account := self._accounts.get(tenant)) is None:
            return None
        _, reset_s = self._roll(account)
        return BudgetState(account.kind, account.hard, account.limit, account.used, reset_s)

    def header(self, tenant: str) -> str:
        state = self.state(tenant)
        return "" if state is None else state.header(self._now())

    def figures(self) -> dict[str, dict[str, float]]:
        """By tenant, for /metrics and /admin/stats, in money."""
        now_s, figures = self._now(), dict[str, dict[str, float]]()
        for name in self._accounts:
            if (state := self.state(name)) is not None:
                left, reset_s = (state.limit - state.used) / NANO, max(0.0, state.reset_s - now_s)
                figures[name] = {"limit": state.limit / NANO, "remaining": left, "reset_s": round(reset_s, 3)}
        return figures

    async def look(self, tenant: str) -> BudgetState | None:
        """As all gateways know it, if Redis can be asked."""
        if (account := self._accounts.get(tenant)) is not None and self._calls is not None:
            with suppress(RedisDownError):
                await self._step(account)
        return self.state(tenant)

    async def set_aside(self, tenant: str, model: str, input_tokens: int, output_tokens: int) -> Hold | None:
        """Until the hold is settled. None without a budget, or a price. Raises BudgetError and nothing else."""
        rates = self._cost(model, input_tokens, output_tokens)
        if (account := self._accounts.get(tenant)) is None or rates is None:
            return None
        nano = -(-rates // 1_000_000)
        id_, known = f"{nano}:{self._gateway}-{next(self._numbers)}", False
        admitted = True
        if self._calls is not None:
            if account.owed or account.sending:
                self._tell(account)
            try:
                admitted = await self._step(account, take=id_)
                known = True
            except RedisDownError as error:
                if error.asked:
                    account.ended.append(id_)
            except BaseException:
                account.ended.append(id_)
                self._tell(account)
                raise
        self._roll(account)
        if not known:
            admitted = not account.hard or account.used + account.aside < account.limit
        if not admitted:
            raise self._refusal(account)
        account.aside += nano
        return Hold(partial(self._settle, account, id_ if known else "", nano))

    def spent(self, tenant: str, cost: Callable[[], int]) -> None:
        """The ledger counted an entry; `cost` is only called for a tenant with a budget."""
        if (account := self._accounts.get(tenant)) is not None and (nano := cost()):
            self._roll(account)
            account.owed += nano
            self._tell(account)

    async def close(self) -> None:
        """Waits for what is on its way to Redis, CLOSE_LIMIT_S at most."""
        if self._senders:
            await asyncio.wait(self._senders, timeout=CLOSE_LIMIT_S)

    def _refusal(self, account: _Account) -> BudgetError:
        _, reset_s = self._roll(account)
        limit, used = _money(account.limit), _money(account.used)
        reset = datetime.fromtimestamp(reset_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = f"The budget of {account.tenant} for this {account.kind} is spent: Limit {limit}, Used {used}. "
        if account.used < account.limit:
            text = f"Requests in flight may need what is left of the budget of {account.tenant}: Limit {limit}. "
            return BudgetError(f"{text}Please try again in {RETRY_S:g}s; it starts anew at {reset}.", RETRY_S)
        return BudgetError(f"{text}It starts anew at {reset}.", max(1.0, reset_s - self._now()))

    def _settle(self, account: _Account, id_: str, nano: int, _: object) -> None:
        account.aside -= nano
        if id_:
            account.ended.append(id_)
            self._tell(account)

    def _roll(self, account: _Account) -> tuple[str, float]:
        """The period, and when it ends; a new one has nothing spent."""
        period, reset_s = period_of(account.kind, self._now())
        if period != account.period:
            account.period, account.spent, account.owed = period, 0, 0
            if account.sending is not None:
                account.sending = (account.sending[0], 0, account.sending[2])
        return period, reset_s

    def _tell(self, account: _Account) -> None:
        if self._calls is None:
            account.spent, account.owed = account.spent + account.owed, 0
            account.ended.clear()
        elif account.sender is None:
            account.sender = task = tasks.spawn(self._send(account), name="settle budget")
            self._senders.add(task)
            task.add_done_callback(self._senders.discard)

    async def _send(self, account: _Account) -> None:
        try:
            while account.owed or account.ended or account.sending:
                if account.sending is None:
                    account.sending = (next(self._numbers), account.owed, account.ended[:1000])
                    account.owed, account.ended = 0, account.ended[1000:]
                number, owed, ended = account.sending
                await self._step(account, number=number, spent=owed, ended=ended)
        except RedisDownError:
            return  # with the next request
        finally:
            account.sender = None

    async def _step(
        self, account: _Account, *, take: str = "", number: int = 0, spent: int = 0, ended: Sequence[str] = ()
    ) -> bool:
        """One call of the script: whether `take` was set aside. Raises RedisDownError."""
        assert self._calls is not None
        assert self._script is not None
        period, _ = self._roll(account)
        key = f"kvasir:limits:{{{account.tenant}}}:{account.kind}"
        limit = account.limit if account.hard else -1
        args: list[str | int] = [
            round(self._now() * 1e3),
            period,
            limit,
            take,
            round(ASIDE_S * 1e3),
            self._gateway,
            number,
            spent,
        ]
        call = self._script(keys=[key, f"{key}:aside"], args=[*args, *ended])
        answer: Any = await self._calls.ask_or_skip("budgets", call, None)
        if answer is None:
            raise RedisDownError(f"the budget of {account.tenant} holds what no gateway wrote", asked=False)
        admitted, total = answer
        if number:
            account.sending = None
        if period == account.period:  # spent money only grows: of two answers the larger one is the later
            account.spent = max(account.spent, total)
        return bool(admitted)


def period_of(kind: Literal["day", "month"], now_s: float) -> tuple[str, float]:
    """Its name, and the second since 1970 at which the next one begins."""
    begin = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return begin.date().isoformat(), (begin + timedelta(days=1)).timestamp()
    begin = begin.replace(day=1)
    return begin.date().isoformat()[:7], (begin + timedelta(days=32)).replace(day=1).timestamp()


def _money(nano: int) -> str:
    whole = f"{nano / NANO:.9f}".rstrip("0")
    return whole.rstrip(".")
