"""/admin/cache: what the response cache remembers, by whose it is, and how to have it forgotten.

Nothing is removed that was not shown before: the first POST tells how many answers it would remove and gives a token,
the second one sends the token back with the same choice. What was remembered between the two stays.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import orjson
from aiohttp import web

from gateway.admin.cache.chosen import IN_BODY, IN_URL, chosen_by
from gateway.admin.cache.confirming import LIFE_S, asked_at, token_for
from gateway.api.dialect import JSON, Route
from gateway.api.fields import Parameter, boolean, in_url, integer, invalid, read, read_query, shown, takes, text
from gateway.api.record import ADMIN_KEY, BODY
from gateway.errors import ForbiddenError, NotFoundError
from gateway.responses.entries import About
from gateway.responses.listing import Answers, Chosen, Told

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
SHOWN: Final = 20
"""Answers that a dry run names; it counts all."""

_PLACE: Final = re.compile(r"([0-9]{1,18})-([0-9a-f]{32})", re.ASCII)

Place = tuple[int, str]
"""Microsecond at which an answer was made, and its id: the order of pages, backwards."""


@takes({"type": "string", "pattern": f"^{_PLACE.pattern}$"})
def _place(value: Any, path: str) -> Place:
    found = _PLACE.fullmatch(value)
    if found is None:
        raise invalid(path, "it is not the `next` of a page")
    return int(found[1]), found[2]


PAGE: Final[Mapping[str, Parameter]] = {
    **IN_URL,
    "limit": Parameter(
        "limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 100", "Answers of one page."
    ),
    "after": Parameter("after", _place, "string", "The `next` of the page before."),
}
ONE: Final[Mapping[str, Parameter]] = {
    "content": Parameter(
        "content",
        in_url(boolean),
        "`true` or `false`, the default",
        "With what the answer says; 403 unless `auth.admin_content` is set.",
    )
}
INVALIDATE: Final[Mapping[str, Parameter]] = {
    **IN_BODY,
    "everything": Parameter("everything", boolean, "boolean", "All answers; to be said where nothing else is chosen."),
    "confirm": Parameter("confirm", text(), "string", "The token of a dry run with the same choice."),
}


@dataclass(slots=True)
class _Sum:
    entries: int = 0
    bytes: int = 0
    oldest_s: float = 0.0  # its age

    def add(self, kept: About, now_s: float) -> None:
        self.entries += 1
        self.bytes += kept.num_bytes
        self.oldest_s = max(self.oldest_s, round(now_s - kept.created_s, 3))


class CachePages:
    """Holds what its handlers need. `now` is in seconds since 1970; `content`: whether answers may be read."""

    def __init__(self, answers: Answers, now: Callable[[], float], *, content: bool) -> None:
        self._answers = answers
        self._now = now
        self._content = content

    def routes(self) -> list[Route]:
        pages = (
            ("/admin/cache", self.page, "Remembered answers, the latest first.", PAGE),
            ("/admin/cache/stats", self.stats, "Counts remembered answers by tenant and model.", IN_URL),
            ("/admin/cache/{id}", self.one, "One remembered answer.", ONE),
        )
        invalidate = Route(
            "POST",
            "/admin/cache/invalidate",
            self.invalidate,
            "Removes remembered answers: a dry run, then again with the token that it gave.",
            parameters=INVALIDATE,
            example={"tenant": "anonymous"},
            key="admin",
        )
        return [
            *(Route("GET", path, handler, told, query=query, key="admin") for path, handler, told, query in pages),
            invalidate,
        ]

    async def page(self, http: web.Request) -> web.Response:
        """GET /admin/cache"""
        asked, now_s = read_query(http.query, PAGE), self._now()
        after, limit = asked.get("after"), asked.get("limit", DEFAULT_LIMIT)
        latest: list[tuple[Place, str, About]] = []  # a heap of one more than are asked for
        async for kept in self._answers.scan(chosen_by(asked), now_s):
            if after is None or _place_of(kept) < after:
                heapq.heappush(latest, (_place_of(kept), kept.owner, kept))
                if len(latest) > limit + 1:
                    heapq.heappop(latest)
        latest.sort(reverse=True)
        page = [kept for _, _, kept in latest[:limit]]
        following = "{}-{}".format(*_place_of(page[-1])) if len(latest) > limit else None
        return _json({"data": [_told(kept, now_s) for kept in page], "next": following})

    async def stats(self, http: web.Request) -> web.Response:
        """GET /admin/cache/stats"""
        chosen, now_s = chosen_by(read_query(http.query, IN_URL)), self._now()
        sums = _sums([kept async for kept in self._answers.scan(chosen, now_s)], now_s)
        total = sums.pop(("", ""))
        rows = [{**_whose(owner), "model": model, **asdict(one)} for (owner, model), one in sorted(sums.items())]
        return _json({"rows": rows, "total": asdict(total)})

    async def one(self, http: web.Request) -> web.Response:
        """GET /admin/cache/{id}"""
        name, now_s = http.match_info["id"], self._now()
        content = read_query(http.query, ONE).get("content", False)
        if content and not self._content:
            raise ForbiddenError("What remembered answers say is shown where auth.admin_content is set.")
        found = [kept async for kept in self._answers.scan(Chosen(id=name), now_s) if kept.id == name]
        told = await self._answers.find(found[0]) if found else None
        if told is None:
            raise NotFoundError(f"No answer is remembered under the id '{shown(name)}'.", param="id")
        return _json({**_told(found[0], now_s), **_said(told, content=content)})

    async def invalidate(self, http: web.Request) -> web.Response:
        """POST /admin/cache/invalidate"""
        key, body = http[ADMIN_KEY], http[BODY]
        asked = read(body, INVALIDATE, ())
        now_s = math.ceil(self._now() * 1e3) / 1e3  # as a token can say it
        chosen = chosen_by(asked)
        if chosen.everything != asked.get("everything", False):
            why = "nothing is chosen, which has to be said" if chosen.everything else "something else is chosen, too"
            raise invalid("everything", why)
        if (token := asked.get("confirm")) is None:
            return await self._dry_run(chosen, key, now_s)
        at_s = asked_at(token, key, repr(chosen), now_s)
        if at_s is None:
            why = "it is over, or was given to somebody else or for another choice; ask without it first"
            raise invalid("confirm", why)
        removed = await self._answers.remove(chosen, at_s)
        return _json({"dry_run": False, "removed": removed})

    async def _dry_run(self, chosen: Chosen, key: bytes, now_s: float) -> web.Response:
        found = [kept async for kept in self._answers.scan(chosen, now_s)]
        latest = heapq.nlargest(SHOWN, found, key=_place_of)
        body = {
            "dry_run": True,
            "would_remove": len(found),
            "bytes": sum(kept.num_bytes for kept in found),
            "latest": [_told(kept, now_s) for kept in latest],
            "confirm": token_for(key, repr(chosen), now_s),
            "confirm_within_s": LIFE_S,
        }
        return _json(body)


def _sums(found: list[About], now_s: float) -> dict[tuple[str, str], _Sum]:
    """By owner and model; that of all under no names."""
    sums = {("", ""): _Sum()}
    for kept in found:
        sums[("", "")].add(kept, now_s)
        sums.setdefault((kept.owner, kept.model), _Sum()).add(kept, now_s)
    return sums


def _place_of(kept: About) -> Place:
    return round(kept.created_s * 1e6), kept.id


def _whose(owner: str) -> dict[str, str | None]:
    kind, _, name = owner.partition(":")
    return {"tenant": name if kind == "tenant" else None, "namespace": name if kind == "namespace" else None}


def _told(kept: About, now_s: float) -> dict[str, Any]:
    return {
        "id": kept.id,
        **_whose(kept.owner),
        "model": kept.model,
        "created_s": kept.created_s,
        "age_s": round(now_s - kept.created_s, 3),
        "expires_s": kept.expires_s,
        "bytes": kept.num_bytes,
    }


def _said(told: Told, *, content: bool) -> dict[str, Any]:
    more = {"text": told.text, "calls": [{"name": name, "arguments": said} for name, said in told.calls]}
    return {
        "prompt_tokens": told.prompt_tokens,
        "completion_tokens": told.completion_tokens,
        "finish": told.finish,
        "tool_calls": None if told.finish is None else len(told.calls),
        **({"content": more} if content else {}),
    }


def _json(body: Any) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type=JSON)
