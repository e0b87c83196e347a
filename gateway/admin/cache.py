"""/admin/cache: lists and removes the answers in the response cache, by tenant or namespace.

Nothing is removed that was not shown before: the first POST tells how many answers it would remove and gives a token,
the second one sends the token back with the same choice. What was remembered between the two stays.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from gateway.api.dialect import Route
from gateway.api.fields import (
    Check,
    Parameter,
    boolean,
    in_url,
    integer,
    invalid,
    number,
    read,
    read_query,
    shown,
    takes,
    text,
)
from gateway.api.record import ADMIN_KEY, BODY, CHANGED
from gateway.api.replies import reply_json
from gateway.errors import ForbiddenError, NotFoundError
from gateway.responses.entries import About, Answers, Chosen, Content

DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
SHOWN: Final = 20
"""Answers that a dry run names; it counts all."""

LIFE_S: Final = 120.0
"""Seconds in which what was shown can be confirmed."""

_TOKEN: Final = re.compile(r"([0-9]{1,13})-([0-9a-f]{64})", re.ASCII)

LONGEST_S: Final = 1e9
_ID: Final = re.compile(r"[0-9a-f]{1,32}", re.ASCII)
_PLACE: Final = re.compile(r"([0-9]{1,18})-([0-9a-f]{32})", re.ASCII)

Place = tuple[int, str]
"""Microsecond at which an answer was made, and its id: the order of pages, backwards."""


@takes({"type": "string", "pattern": "^[0-9a-f]{1,32}$"})
def _prefix(value: Any, path: str) -> str:
    if not _ID.fullmatch(text()(value, path)):
        raise invalid(path, "an id has 32 characters, 0-9 and a-f; its beginning will do")
    return str(value)


_age = number(0, LONGEST_S)


def _choices(age: Check[float]) -> tuple[Parameter, ...]:
    return (
        Parameter("tenant", text(), "string", "Only this tenant's own."),
        Parameter("namespace", text(), "string", "Only those that this namespace shares."),
        Parameter("model", text(), "string", "Only of this model."),
        Parameter("id", _prefix, "1 to 32 characters, `0-9a-f`", "Only this one, or those whose ids begin so."),
        Parameter("older_than_s", age, "number", "Only those that were made so long ago, or longer."),
        Parameter("younger_than_s", age, "number", "Only those that were made so long ago, or later."),
    )


IN_URL: Final = {one.name: one for one in _choices(in_url(_age))}
IN_BODY: Final = {one.name: one for one in _choices(_age)}


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
            changes="answers removed",
        )
        return [
            *(
                Route("GET", path, handler, summary, query=query, key="admin")
                for path, handler, summary, query in pages
            ),
            invalidate,
        ]

    async def page(self, http: web.Request) -> web.Response:
        """GET /admin/cache"""
        query, now_s = read_query(http.query, PAGE), self._now()
        after, limit = query.get("after"), query.get("limit", DEFAULT_LIMIT)
        latest: list[tuple[Place, str, About]] = []  # a heap of one more than are asked for
        async for kept in self._answers.scan(chosen_by(query), now_s):
            if after is None or _place_of(kept) < after:
                heapq.heappush(latest, (_place_of(kept), kept.owner, kept))
                if len(latest) > limit + 1:
                    heapq.heappop(latest)
        latest.sort(reverse=True)
        page = [kept for _, _, kept in latest[:limit]]
        following = "{}-{}".format(*_place_of(page[-1])) if len(latest) > limit else None
        return reply_json({"data": [_about_json(kept, now_s) for kept in page], "next": following})

    async def stats(self, http: web.Request) -> web.Response:
        """GET /admin/cache/stats"""
        chosen, now_s = chosen_by(read_query(http.query, IN_URL)), self._now()
        found = [kept async for kept in self._answers.scan(chosen, now_s)]
        groups: dict[tuple[str, str], list[About]] = {}
        for kept in found:
            groups.setdefault((kept.owner, kept.model), []).append(kept)
        rows = [
            {**_owner_json(owner), "model": model, **_sum(group, now_s)}
            for (owner, model), group in sorted(groups.items())
        ]
        return reply_json({"rows": rows, "total": _sum(found, now_s)})

    async def one(self, http: web.Request) -> web.Response:
        """GET /admin/cache/{id}"""
        name, now_s = http.match_info["id"], self._now()
        content = read_query(http.query, ONE).get("content", False)
        if content and not self._content:
            raise ForbiddenError("What remembered answers say is shown where auth.admin_content is set.")
        found = [kept async for kept in self._answers.scan(Chosen(id=name), now_s) if kept.id == name]
        answer = await self._answers.content(found[0]) if found else None
        if answer is None:
            raise NotFoundError(f"No answer is remembered under the id '{shown(name)}'.", param="id")
        return reply_json({**_about_json(found[0], now_s), **_content_json(answer, content=content)})

    async def invalidate(self, http: web.Request) -> web.Response:
        """POST /admin/cache/invalidate"""
        key, body = http[ADMIN_KEY], http[BODY]
        query = read(body, INVALIDATE, ())
        now_s = math.ceil(self._now() * 1e3) / 1e3  # as a token can say it
        chosen = chosen_by(query)
        if chosen.everything != query.get("everything", False):
            why = "nothing is chosen, which has to be said" if chosen.everything else "something else is chosen, too"
            raise invalid("everything", why)
        if (token := query.get("confirm")) is None:
            http[CHANGED] = None
            return await self._dry_run(chosen, key, now_s)
        at_s = token_time(token, key, repr(chosen), now_s)
        if at_s is None:
            why = "it has expired, or was given for another key or choice; send the request without it first"
            raise invalid("confirm", why)
        removed = await self._answers.remove(chosen, at_s)
        return reply_json({"dry_run": False, "removed": removed})

    async def _dry_run(self, chosen: Chosen, key: bytes, now_s: float) -> web.Response:
        found = [kept async for kept in self._answers.scan(chosen, now_s)]
        latest = heapq.nlargest(SHOWN, found, key=_place_of)
        body = {
            "dry_run": True,
            "would_remove": len(found),
            "bytes": sum(kept.num_bytes for kept in found),
            "latest": [_about_json(kept, now_s) for kept in latest],
            "confirm": token_for(key, repr(chosen), now_s),
            "confirm_within_s": LIFE_S,
        }
        return reply_json(body)


def _sum(found: list[About], now_s: float) -> dict[str, Any]:
    oldest_s = max((round(now_s - kept.created_s, 3) for kept in found), default=0.0)
    return {"entries": len(found), "bytes": sum(kept.num_bytes for kept in found), "oldest_s": max(oldest_s, 0.0)}


def _place_of(kept: About) -> Place:
    return round(kept.created_s * 1e6), kept.id


def _owner_json(owner: str) -> dict[str, str | None]:
    kind, _, name = owner.partition(":")
    return {"tenant": name if kind == "tenant" else None, "namespace": name if kind == "namespace" else None}


def _about_json(kept: About, now_s: float) -> dict[str, Any]:
    return {
        "id": kept.id,
        **_owner_json(kept.owner),
        "model": kept.model,
        "created_s": kept.created_s,
        "age_s": round(now_s - kept.created_s, 3),
        "expires_s": kept.expires_s,
        "bytes": kept.num_bytes,
    }


def _content_json(answer: Content, *, content: bool) -> dict[str, Any]:
    more = {"text": answer.text, "calls": [{"name": name, "arguments": said} for name, said in answer.calls]}
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish": answer.finish,
        "tool_calls": None if answer.finish is None else len(answer.calls),
        **({"content": more} if content else {}),
    }


def chosen_by(values: Mapping[str, Any]) -> Chosen:
    """Of checked parameters. Raises BadRequestError for a tenant and a namespace together."""
    tenant, namespace = values.get("tenant"), values.get("namespace")
    if tenant is not None and namespace is not None:
        raise invalid("namespace", "an answer is a tenant's own or a namespace's, and not both")
    owner = f"tenant:{tenant}" if tenant is not None else None
    return Chosen(
        owner=owner if namespace is None else f"namespace:{namespace}",
        model=values.get("model"),
        id=values.get("id", ""),
        older_than_s=values.get("older_than_s", 0.0),
        younger_than_s=values.get("younger_than_s"),
    )


def token_for(key: bytes, what: str, at_s: float) -> str:
    """`key` is the asker's, `what` all that is asked for; `at_s` in seconds since 1970, to the millisecond."""
    at_ms = round(at_s * 1e3)
    return f"{at_ms}-{_signed(key, what, at_ms)}"


def token_time(token: str, key: bytes, what: str, now_s: float) -> float | None:
    """The second at which the same asker was shown the same. None if it is not theirs, for something else, or over."""
    found = _TOKEN.fullmatch(token)
    if found is None or not hmac.compare_digest(found[2], _signed(key, what, int(found[1]))):
        return None
    at_s = int(found[1]) / 1e3
    return at_s if at_s <= now_s + LIFE_S and now_s - at_s <= LIFE_S else None


def _signed(key: bytes, what: str, at_ms: int) -> str:
    return hmac.new(key, f"{at_ms}\n{what}".encode(), hashlib.sha256).hexdigest()
