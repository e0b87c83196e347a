"""Budgets of tenants and keys in money, of a day or a month (UTC): what the ledger counts, in NANO units, over all
gateways.

A request sets its estimate aside, and is let in while what was spent and set aside is below the budget, its tenant's
and its key's: however many come at once, no more than the cost of one is spent beyond it. While Redis is away what it
said last and what this gateway has spent since decide, which is never more than was spent; Redis gets that afterwards,
once. A budget is in the currency of the prices (Prices.currency); what costs another one is not counted, as it could
not be added.

    kvasir:limits:{TENANT}:PERIOD:CURRENCY        hash: period, spent, aside; of:GATEWAY -> the number of its last
                                                  message; of a key {TENANT}/KEY
    kvasir:limits:{TENANT}:PERIOD:CURRENCY:aside  sorted set: NANO:ID of what is set aside, millisecond at which it ends
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Literal, NamedTuple, Protocol

from gateway import tasks
from gateway.config import TenantSettings
from gateway.errors import BudgetError, RedisDownError
from gateway.limits.counters import redis_key
from gateway.limits.holds import Hold
from gateway.storage.redis_calls import RedisCalls, read_or_skip
from gateway.types import NANO, owner_in_words, tenant_of

log = logging.getLogger(__name__)

ASIDE_S: Final = 3600.0
"""After which what a gateway set aside that was killed is there again."""
RETRY_S: Final = 1.0
"""Retry-After while requests in flight have set the rest aside."""
CLOSE_LIMIT_S: Final = 2.0
AT_ONCE: Final = 50
"""Budgets in one call: of a tenant and its keys."""
READ_AT_ONCE: Final = 500
REFRESH_S: Final = 2.0
"""For which pages show what they have read."""

_STORE: Final = "budgets"


class Prices(Protocol):
    """Of the ledger."""

    currency: str
    """That budgets are in."""
    several_currencies: str
    """Those of [[prices]], where there is more than one."""

    def expected(self, model: str, inputs: int, outputs: int, *, at_batch_price: bool) -> int | None:
        """What so many tokens cost, in NANO units of that currency; None without a price in it."""
        ...


class BudgetState(NamedTuple):
    """What is spent of a budget. Money is in NANO units of `currency`; `reset_s` is in seconds since 1970."""

    period: Literal["day", "month"]
    hard: bool
    limit: int
    used: int
    reset_s: float
    currency: str

    def header(self, now_s: float) -> str:
        used, limit = _money(self.used), _money(self.limit)
        return f"used={used}; limit={limit}; reset={max(1, round(self.reset_s - now_s))}"


@dataclass(slots=True, eq=False)
class _Account:
    """The budget of a tenant or key, as this gateway knows it.

    period, spent  as Redis said last
    owed, ended    what it does not know yet: spent money, and what is no longer set aside
    sending        the same, with its number, while it may have arrived
    aside          by requests of this gateway
    """

    owner: str
    currency: str
    kind: Literal["day", "month"]
    hard: bool
    limit: int
    period: str = ""
    spent: int = 0
    owed: int = 0
    ended: list[str] = field(default_factory=list)
    sending: tuple[int, int, list[str]] | None = None
    aside: int = 0

    @property
    def tenant(self) -> str:
        return tenant_of(self.owner)

    @property
    def book(self) -> str:
        """Its key in Redis."""
        return f"{redis_key(self.owner)}:{self.kind}:{self.currency}"

    @property
    def used(self) -> int:
        return self.spent + self.owed + (0 if self.sending is None else self.sending[1])


class Budgets:
    """Those of tenants and keys, by owner (types.owners_of). One without a budget costs a look into a dictionary."""

    def __init__(
        self, tenants: Sequence[TenantSettings], calls: RedisCalls | None, now: Callable[[], float], prices: Prices
    ) -> None:
        """`calls` None: there is no Redis. `now` is in seconds since 1970."""
        self._calls = calls
        self._now = now
        self._prices = prices
        self._script = None if calls is None else calls.script(__package__, "budget.lua")
        self._gateway = secrets.token_hex(6)
        self._numbers = itertools.count(1)
        self._accounts: dict[str, _Account] = {}
        self._telling: dict[str, dict[_Account, None]] = {}  # what Redis is to be told, by tenant
        self._senders = set[asyncio.Task[None]]()
        self._reading = asyncio.Lock()
        self._read_s = float("-inf")
        self._warned = False
        self.replace(tenants)

    def replace(self, owners: Sequence[TenantSettings]) -> None:
        """From now on these hold, in the currency that prices have now."""
        old, self._accounts, currency = self._accounts, {}, self._prices.currency
        for one in owners:
            if one.budget is not None:
                limit = round(one.budget * NANO)
                account = old.get(one.name)
                if account is None or account.currency != currency:
                    account = _Account(one.name, currency, one.budget_period, one.budget_hard, limit)
                account.kind, account.hard, account.limit = one.budget_period, one.budget_hard, limit
                self._accounts[one.name] = account
        if self._accounts and self.several_currencies and not self._warned:
            self._warned = True
            log.warning(
                "budgets count what costs %s and nothing else, as [[prices]] are in %s: use one currency",
                currency,
                self.several_currencies,
            )

    @property
    def several_currencies(self) -> str:
        """Of prices, where there is more than one: then no budget may be set."""
        return self._prices.several_currencies

    @property
    def has_any(self) -> bool:
        return bool(self._accounts)

    def has(self, *owners: str) -> bool:
        """Whether any has one."""
        return not self._accounts.keys().isdisjoint(owners)

    def state(self, owner: str) -> BudgetState | None:
        """As this gateway knows it. No I/O."""
        if (account := self._accounts.get(owner)) is None:
            return None
        _, reset_s = self._roll(account)
        return BudgetState(account.kind, account.hard, account.limit, account.used, reset_s, account.currency)

    def header(self, *owners: str) -> str:
        """Of the one that has least left."""
        states = [state for owner in owners if (state := self.state(owner)) is not None]
        return min(states, key=lambda state: state.limit - state.used).header(self._now()) if states else ""

    def figures(self) -> dict[str, dict[str, float]]:
        """By tenant, for /metrics and /admin/stats, in money."""
        now_s, figures = self._now(), dict[str, dict[str, float]]()
        for name, account in self._accounts.items():
            if name == account.tenant and (state := self.state(name)) is not None:
                left, reset_s = (state.limit - state.used) / NANO, max(0.0, state.reset_s - now_s)
                figures[name] = {"limit": state.limit / NANO, "remaining": left, "reset_s": round(reset_s, 3)}
        return figures

    async def refresh(self, *, max_age_s: float = REFRESH_S) -> None:
        """Learns what all gateways have spent, of every budget, if Redis can be asked. Never raises."""
        if (calls := self._calls) is None:
            return
        async with self._reading:
            if self._now() - self._read_s < max_age_s:
                return
            self._read_s, accounts = self._now(), list(self._accounts.values())
            with suppress(RedisDownError):
                for first in range(0, len(accounts), READ_AT_ONCE):
                    some = accounts[first : first + READ_AT_ONCE]
                    pipe = calls.redis.pipeline(transaction=False)
                    for account in some:
                        pipe.hmget(account.book, "period", "spent")
                    for account, found in zip(some, await calls.ask_each(_STORE, pipe), strict=True):
                        period, spent = found or (None, None)
                        if period and (total := read_or_skip(_STORE, partial(int, spent or 0))) is not None:
                            self._learn(account, period.decode("utf-8", "replace"), total)

    async def look(self, *owners: str) -> list[BudgetState | None]:
        """As all gateways know them now, if Redis can be asked. Of one tenant."""
        accounts = [account for owner in owners if (account := self._accounts.get(owner)) is not None]
        if accounts and self._calls is not None:
            with suppress(RedisDownError):
                await self._step(accounts)
        return [self.state(owner) for owner in owners]

    async def set_aside(
        self, owners: Sequence[str], model: str, inputs: int, outputs: int, *, at_batch_price: bool = False
    ) -> Hold | None:
        """Until the hold is settled. None without a budget, or a price. Raises BudgetError and nothing else."""
        accounts = [account for owner in owners if (account := self._accounts.get(owner)) is not None]
        if not accounts:
            return None
        if (nano := self._prices.expected(model, inputs, outputs, at_batch_price=at_batch_price)) is None:
            return None
        id_, known = f"{nano}:{self._gateway}-{next(self._numbers)}", False
        refused: _Account | None = None
        if self._calls is not None:
            self._tell([account for account in accounts if account.owed or account.sending])
            try:
                refused = await self._step(accounts, take=id_)
                known = True
            except RedisDownError as error:
                if error.asked:
                    self._end(accounts, id_)
            except BaseException:
                self._end(accounts, id_)
                self._tell(accounts)
                raise
        for account in accounts:
            self._roll(account)
            if not known and account.hard and account.used + account.aside >= account.limit:
                refused = account
        if refused is not None:
            raise self._refusal(refused)
        for account in accounts:
            account.aside += nano
        return Hold(partial(self._settle, accounts, id_ if known else "", nano))

    def spent(self, owners: Sequence[str], priced: Callable[[], tuple[str, Mapping[str, int]]]) -> None:
        """The ledger counted an entry; `priced`, its currency and figures, is only called where there is a budget."""
        if not self._accounts:
            return
        accounts = [account for owner in owners if (account := self._accounts.get(owner)) is not None]
        if not accounts:
            return
        currency, figures = priced()
        paying = [account for account in accounts if account.currency == currency]
        if paying and (nano := figures.get("cost_nano", 0)):
            for account in paying:
                self._roll(account)
                account.owed += nano
            self._tell(paying)

    async def close(self) -> None:
        """Waits for what is on its way to Redis, CLOSE_LIMIT_S at most."""
        if self._senders:
            await asyncio.wait(self._senders, timeout=CLOSE_LIMIT_S)

    def _refusal(self, account: _Account) -> BudgetError:
        _, reset_s = self._roll(account)
        limit, used = _money(account.limit), _money(account.used)
        name = owner_in_words(account.owner)
        reset = datetime.fromtimestamp(reset_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = f"The budget of {name} for this {account.kind} is spent: Limit {limit}, Used {used}. "
        if account.used < account.limit:
            text = f"Requests in flight may need what is left of the budget of {name}: Limit {limit}. "
            return BudgetError(f"{text}Please try again in {RETRY_S:g}s; it starts anew at {reset}.", RETRY_S)
        return BudgetError(f"{text}It starts anew at {reset}.", max(1.0, reset_s - self._now()))

    def _settle(self, accounts: Sequence[_Account], id_: str, nano: int, _: object) -> None:
        for account in accounts:
            account.aside -= nano
        if id_:
            self._end(accounts, id_)
            self._tell(accounts)

    def _end(self, accounts: Sequence[_Account], id_: str) -> None:
        for account in accounts:
            account.ended.append(id_)

    def _roll(self, account: _Account) -> tuple[str, float]:
        """The period, and when it ends; a new one has nothing spent."""
        period, reset_s = period_of(account.kind, self._now())
        if period != account.period:
            account.period, account.spent, account.owed = period, 0, 0
            if account.sending is not None:
                account.sending = (account.sending[0], 0, account.sending[2])
        return period, reset_s

    def _learn(self, account: _Account, period: str, spent: int) -> None:
        if period == self._roll(account)[0]:  # spent money only grows: of two answers the larger one is the later
            account.spent = max(account.spent, spent)

    def _tell(self, accounts: Sequence[_Account]) -> None:
        """Redis what was spent and has ended, of one tenant."""
        if self._calls is None:
            for account in accounts:
                account.spent, account.owed = account.spent + account.owed, 0
                account.ended.clear()
        elif accounts:
            tenant = accounts[0].tenant
            if (waiting := self._telling.get(tenant)) is None:
                waiting = self._telling[tenant] = {}
                task = tasks.spawn(self._send(tenant, waiting), name="settle budgets")
                self._senders.add(task)
                task.add_done_callback(self._senders.discard)
            waiting.update(dict.fromkeys(accounts))

    async def _send(self, tenant: str, waiting: dict[_Account, None]) -> None:
        try:
            while waiting:
                accounts = list(itertools.islice(waiting, AT_ONCE))
                for account in accounts:
                    del waiting[account]
                    if account.sending is None:
                        account.sending = (next(self._numbers), account.owed, account.ended[:1000])
                        account.owed, account.ended = 0, account.ended[1000:]
                await self._step(accounts, tells=True)
                waiting.update(dict.fromkeys(account for account in accounts if account.owed or account.ended))
        except RedisDownError:
            return  # with the next request
        finally:
            del self._telling[tenant]

    async def _step(self, accounts: Sequence[_Account], *, take: str = "", tells: bool = False) -> _Account | None:
        """One call of the script: the account that has nothing left for `take`, if any. Raises RedisDownError."""
        assert self._calls is not None
        assert self._script is not None
        args: list[str | int] = [round(self._now() * 1e3), round(ASIDE_S * 1e3), self._gateway, take]
        books, periods = [account.book for account in accounts], [self._roll(account)[0] for account in accounts]
        for account, period in zip(accounts, periods, strict=True):
            number, spent, ended = account.sending if tells and account.sending is not None else (0, 0, [])
            limit = account.limit if account.hard else -1
            args += [period, limit, number, spent, len(ended), *ended]
        call = self._script(keys=[key for book in books for key in (book, f"{book}:aside")], args=args)
        answer: Any = await self._calls.ask_or_skip(_STORE, call, None)
        if answer is None:
            raise RedisDownError(f"a budget of {accounts[0].tenant} holds what no gateway wrote", asked=False)
        refused, *totals = answer
        for account, period, total in zip(accounts, periods, totals, strict=True):
            if tells:
                account.sending = None
            self._learn(account, period, total)
        return accounts[refused - 1] if refused else None


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
