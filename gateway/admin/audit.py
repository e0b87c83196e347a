"""The audit log: each change that an admin makes is a line of JSON in data_dir/audit.jsonl. GET /admin/audit reads it.

The routes say what they change (Route.changes), and the prologue notes it: who, as a short digest of the admin key,
what, which, when, from where and how it ended. What was refused (4xx) has changed nothing and is not there, nor is
anything of a request without an admin's key: such requests cannot fill the log. Workers of a gateway share the file:
lines are appended whole, under a lock of the file that its rotation takes, too. All of it happens in threads.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson
from aiohttp import web

from gateway import tasks
from gateway.api.dialect import Handler, Route
from gateway.api.fields import Parameter, in_url, integer, read_query
from gateway.api.record import ADMIN_KEY, BODY, CHANGED, CLIENT_LEFT, RECORD
from gateway.api.replies import reply_json
from gateway.config import Reloaded
from gateway.disk import write_all
from gateway.errors import KvasirError

log = logging.getLogger(__name__)

MAX_BYTES: Final = 4 << 20
"""Of the file; then it becomes audit.jsonl.1, in place of an older one. Some 20,000 changes."""

NAMES: Final = frozenset(
    (
        *("name", "id", "tenant", "namespace", "model", "kind", "url", "force", "undo"),
        *("everything", "older_than_s", "younger_than_s"),
    )
)
"""Of parameters that say which one is changed. Any other may be a secret or somebody's text, and is not written."""

MAX_CHARS: Final = 256
"""Of one value that is written."""

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
QUERY: Final[Mapping[str, Parameter]] = {
    "limit": Parameter("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 100", "Changes of a page."),
}

_DIGEST_CHARS: Final = 12
_OPEN: Final = hashlib.sha256(b"").digest()


class AuditLog:
    """`path` is that of the file; its folder may come later."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        """`now` is in seconds since 1970."""
        self._path = path
        self._now = now
        self.lost = 0
        """Changes since the start that could not be written."""

    def routes(self) -> list[Route]:
        summary = "Changes by admins at this gateway, the latest first."
        return [Route("GET", "/admin/audit", self.show, summary, query=QUERY, key="admin")]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/audit"""
        limit = read_query(http.query, QUERY).get("limit", DEFAULT_LIMIT)
        return reply_json({"changes": await self.latest(limit), "lost": self.lost})

    async def add(self, what: str, which: Mapping[str, Any], *, who: str, where: str, status: int, id_: str) -> None:
        """Writes one change. Never raises: what cannot be written is logged and counted."""
        change = {
            "at_s": round(self._now(), 3),
            "who": who,
            "from": where,
            "what": what,
            "which": which,
            "status": status,
            "request_id": id_,
        }
        try:
            await asyncio.to_thread(_append, self._path, orjson.dumps(change) + b"\n")
        except OSError as error:
            self.lost += 1
            log.error("change of an admin is not in the audit log (server.data_dir): %s: %s", what, error)

    async def reloaded(self, report: Reloaded) -> None:
        """Notes a reload that no request asked for."""
        if report.changed:
            await self.add("settings reloaded", said(report), who="signal", where="", status=200, id_="")

    async def latest(self, limit: int) -> list[dict[str, Any]]:
        """The latest first. What is no line of ours is left out."""
        return await asyncio.to_thread(_latest, self._path, limit)

    def noting(self, what: str, handler: Handler) -> Handler:
        """The handler of a route that makes a change. The change is written before the answer is sent, and also when
        the client has left."""

        async def noted(http: web.Request) -> web.StreamResponse:
            http[CHANGED] = {}
            status = 500
            try:
                response = await handler(http)
                status = response.status
            except KvasirError as error:
                status = error.status
                raise
            except asyncio.CancelledError:
                status = CLIENT_LEFT
                raise
            finally:
                if ADMIN_KEY in http and (status < 400 or status >= CLIENT_LEFT) and http[CHANGED] is not None:
                    await asyncio.shield(tasks.spawn(self._note(http, what, status), name="note a change"))
            return response

        return noted

    async def _note(self, http: web.Request, what: str, status: int) -> None:
        key = http[ADMIN_KEY]
        await self.add(
            what,
            _which(http),
            who="open" if key == _OPEN else key.hex()[:_DIGEST_CHARS],
            where=http.remote or "",
            status=status,
            id_=http[RECORD].request_id,
        )


def said(report: Reloaded) -> dict[str, str]:
    """What a reload has changed."""
    return {"settings": ", ".join(report.changed)}


def _which(http: web.Request) -> dict[str, Any]:
    """What the request names, and what its handler added."""
    body: Mapping[str, Any] = http.get(BODY, {})
    changed = http[CHANGED]
    given = {**http.query, **body, **http.match_info}
    named = {**{name: value for name, value in given.items() if name in NAMES}, **(changed or {})}
    return {
        name: value[:MAX_CHARS] if isinstance(value, str) else value
        for name, value in named.items()
        if isinstance(value, str | int | float)
    }


def _append(path: Path, line: bytes) -> None:
    """Raises OSError."""
    with _locked(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size and size + len(line) > MAX_BYTES:
            os.replace(path, _older(path))
        else:
            torn = size and os.pread(descriptor, 1, size - 1) != b"\n"  # a process was killed while it wrote
            write_all(descriptor, b"\n" + line if torn else line)
            return
    _append(path, line)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A descriptor of the file that is at the path as long as the lock is held."""
    while True:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):  # else another process has rotated it
                    yield descriptor
                    return
        finally:
            os.close(descriptor)


def _latest(path: Path, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in (path, _older(path)):
        with suppress(OSError):
            for line in reversed(one.read_bytes().splitlines()):
                if len(found) == limit:
                    return found
                with suppress(orjson.JSONDecodeError):
                    found.append(orjson.loads(line))
    return found


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
