"""GET /v1/me: what a tenant's key may do, and what it and its tenant have used, for whoever has the key. Of that tenant
only; of the key itself where an admin made it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from aiohttp import web

from gateway.admin.ledger import decimal, grouped, totals_json
from gateway.admin.sources import Ledger
from gateway.api.dialect import Route
from gateway.api.record import ISSUED, RECORD, TENANT
from gateway.api.replies import reply_json
from gateway.errors import RedisDownError
from gateway.issued.base import IssuedKey
from gateway.issued.directory import Directory
from gateway.ledger.base import Figures, Row
from gateway.limits.budgets import BudgetState
from gateway.limits.limits import TenantLimits

KEPT_S: Final = 10.0
"""For which rows that were read answer all tenants: clients may ask as often as they like, and a month is long."""


class MePage:
    """Holds what its handler needs. `now` is in seconds since 1970."""

    def __init__(self, directory: Directory, limits: TenantLimits, ledger: Ledger, now: Callable[[], float]) -> None:
        self._directory = directory
        self._limits = limits
        self._ledger = ledger
        self._now = now
        self._reading = asyncio.Lock()
        self._read_s = float("-inf")
        self._month = ""
        self._rows: dict[str, dict[Row, Figures]] = {}  # by tenant

    def routes(self) -> list[Route]:
        return [Route("GET", "/v1/me", self.show, "What the key is for, limits, budgets and use of it and its tenant.")]

    async def show(self, http: web.Request) -> web.Response:
        """GET /v1/me"""
        tenant, key = http[TENANT].name, http.get(ISSUED)
        today = datetime.fromtimestamp(self._now(), UTC).date().isoformat()
        rows, stale = await self._rows_of(tenant, today)
        owners = http[RECORD].owners
        budgets = await self._limits.budgets.look(*owners) if self._limits.budgets else [None] * len(owners)
        of_tenant, *of_key = [
            self._of(owner, state, mine, today)
            for owner, state, mine in zip(owners, budgets, (rows, _of_key(rows, key)), strict=False)
        ]
        named = None if key is None else {"id": key.id, "name": key.name, "expires_s": key.expires_s}
        return reply_json(
            {
                "tenant": tenant,
                "key": named if named is None else {**named, **of_key[0]},
                "models": [list(one) for one in self._directory.lists(tenant, key)],
                **of_tenant,
                "stale": stale,
            },
            {"Cache-Control": "no-store"},
        )

    def _of(self, owner: str, state: BudgetState | None, rows: Mapping[Row, Figures], today: str) -> dict[str, Any]:
        return {
            "limits": {
                kind: {"limit": room.limit, "remaining": room.remaining, "reset_s": round(room.reset_s, 3)}
                for kind, room in self._limits.rooms(owner).items()
            },
            "budget": budget_json(state),
            "today": _used({row: figures for row, figures in rows.items() if row.day == today}),
            "month": _used(rows),
        }

    async def _rows_of(self, tenant: str, today: str) -> tuple[Mapping[Row, Figures], bool]:
        """Of this month (UTC), and whether they are the last known, as the ledger cannot be read."""
        month, stale = today[:7], False
        async with self._reading:
            if month != self._month:
                self._rows, self._month, self._read_s = {}, month, float("-inf")
            if self._now() - self._read_s >= KEPT_S:
                try:
                    read = await self._ledger.read(f"{month}-01", today)
                except RedisDownError:
                    stale = True
                else:
                    self._read_s, self._rows = self._now(), {}
                    for row, figures in read.items():
                        self._rows.setdefault(row.tenant, {})[row] = figures
        return self._rows.get(tenant, {}), stale


def _of_key(rows: Mapping[Row, Figures], key: IssuedKey | None) -> Mapping[Row, Figures]:
    return {row: figures for row, figures in rows.items() if key is not None and row.key == key.id}


def budget_json(state: BudgetState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    left = max(0, state.limit - state.used)
    return {
        "period": state.period,
        "hard": state.hard,
        "currency": state.currency,
        **{name: decimal(nano) for name, nano in (("limit", state.limit), ("used", state.used), ("left", left))},
        "reset_s": state.reset_s,
    }


def _used(rows: Mapping[Row, Figures]) -> dict[str, Any]:
    return totals_json(grouped(rows, ()).get((), {}))
