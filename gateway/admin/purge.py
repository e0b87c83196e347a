"""POST /admin/cache/blocks/purge: a tenant's or a namespace's KV blocks and leases go from all engines of this gateway.

Each engine purges by itself (engine/protocol/values.py:PURGE_PATH) and can purge its own folder of blocks, and
those of engines that are gone. So a purge is complete when all engines have answered that theirs is, and no folder that
they share belongs to an engine without a request. Repeating one does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from aiohttp import web

from gateway.api.dialect import Route
from gateway.api.fields import Parameter, invalid, missing, read, takes, text
from gateway.api.record import BODY, RECORD, failed
from gateway.api.replies import reply_json
from gateway.config import NamespaceSettings
from gateway.errors import EngineLostError
from gateway.types import Scope

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_REPEAT: Final = (
    "Not everything is gone. Repeat the purge when all engines answer: `engines` says which did not, `in_use` has the "
    "owners of folders beside theirs whose engines this gateway does not reach."
)
_NO_ENGINE: Final = "This gateway knows no engine. Repeat the purge when GET /admin/stats shows them."


class Engine(Protocol):
    """See engines/bundled.py."""

    name: str

    async def purge(self, salt_prefix: str) -> Mapping[str, Any]:
        """What the engine answers. Takes a bounded time. Raises EngineLostError with why there is no answer."""
        ...


@takes({"type": "string", "pattern": f"^{_NAME.pattern}$"})
def _name(value: Any, path: str) -> str:
    if not _NAME.fullmatch(text()(value, path)):
        raise invalid(path, "a name has 1 to 64 letters, digits and `._-`, and begins with a letter or digit")
    return str(value)


PURGE: Final[Mapping[str, Parameter]] = {
    "tenant": Parameter("tenant", _name, "string", "The tenant's own blocks, also of one that is not configured now."),
    "namespace": Parameter("namespace", _name, "string", "Those that this configured namespace shares."),
}


class PurgePage:
    """Holds what its handler needs. `engines`: all that are known, joined or not."""

    def __init__(
        self,
        namespaces: Sequence[NamespaceSettings],
        engines: Callable[[], Sequence[Engine]],
    ) -> None:
        self._engines = engines
        self.replace(namespaces)

    def replace(self, namespaces: Sequence[NamespaceSettings]) -> None:
        """From now on there are these."""
        self._namespaces = frozenset(one.name for one in namespaces)

    def routes(self) -> list[Route]:
        route = Route(
            "POST",
            "/admin/cache/blocks/purge",
            self.purge,
            "Removes a tenant's or a namespace's KV blocks and leases from all engines; 502 unless all are gone.",
            parameters=PURGE,
            example={"tenant": "anonymous"},
            key="admin",
            changes="blocks purged",
        )
        return [route]

    async def purge(self, http: web.Request) -> web.Response:
        """POST /admin/cache/blocks/purge"""
        body = http[BODY]
        scope = self._scope(read(body, PURGE, ()))
        engines = self._engines()
        total = _summed(await asyncio.gather(*(_ask(engine, scope.salt) for engine in engines)))
        log.info("purge of blocks of %s complete=%s", scope.salt, total["complete"])
        if total["complete"]:
            return reply_json(total)
        record, error = http[RECORD], EngineLostError(total["message"])
        failed(record, error)
        return reply_json(record.dialect.error_json(error, record.request_id) | total, status=record.status)

    def _scope(self, wanted: Mapping[str, str]) -> Scope:
        """Raises BadRequestError."""
        if len(wanted) > 1:
            raise invalid("namespace", "blocks are a tenant's own or a namespace's: purge one, then the other")
        if not wanted:
            raise missing("tenant")
        namespace = wanted.get("namespace")
        if namespace is not None and namespace not in self._namespaces:
            raise invalid("namespace", "no namespace of that name is configured")
        return Scope(**wanted)


async def _ask(engine: Engine, salt_prefix: str) -> dict[str, Any]:
    try:
        return {"name": engine.name, **await engine.purge(salt_prefix)}
    except EngineLostError as error:
        return {"name": engine.name, "complete": False, "reason": error.message}


def _summed(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The engines' answers, and whether the purge is complete."""
    answered = {one.get("owner") for one in answers}
    in_use = sorted({owner for one in answers for owner in one.get("in_use", ())} - answered)
    complete = bool(answers) and not in_use and all(one["complete"] for one in answers)
    message = "Everything is gone." if complete else _REPEAT if answers else _NO_ENGINE
    return {"complete": complete, "message": message, "engines": answers, "in_use": in_use}
