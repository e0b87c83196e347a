"""POST /admin/reload: the settings are read again (gateway/reload.py)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.admin.audit import said
from gateway.api.dialect import Route
from gateway.api.record import CHANGED
from gateway.api.replies import reply_json
from gateway.config import ConfigError, Reloaded
from gateway.errors import BadRequestError


class ReloadPage:
    """Holds what its handler needs."""

    def __init__(self, reload: Callable[[], Awaitable[Reloaded]]) -> None:
        """`reload` raises ConfigError for settings that cannot be used, and KvasirError."""
        self._reload = reload

    def routes(self) -> list[Route]:
        summary = "Reads the settings again: tenants, keys, limits, prices, upstreams and aliases change at once."
        return [Route("POST", "/admin/reload", self.reload, summary, key="admin", changes="settings reloaded")]

    async def reload(self, http: web.Request) -> web.Response:
        """POST /admin/reload"""
        try:
            report = await self._reload()
        except ConfigError as error:
            raise BadRequestError(str(error), code="invalid_settings") from None
        http[CHANGED] = said(report) if report.changed else None
        return reply_json({"changed": list(report.changed), "needs_restart": list(report.needs_restart)})
