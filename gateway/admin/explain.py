"""POST /admin/explain: why a request missed, or what two pasted requests do not have in common. Texts are those that
were pasted; of requests that were answered there are only digests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from aiohttp import web

from engine.protocol import TOKEN_BYTES
from gateway.admin.ledger import money_of
from gateway.admin.requests import RequestLog
from gateway.api.answering import Answering
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, invalid, read, takes, text
from gateway.api.gemini.request import parse_generate, to_call
from gateway.api.gemini.wire import GEMINI
from gateway.api.lines import Body, Endpoint
from gateway.api.openai.wire import OPENAI
from gateway.api.record import BODY, RECORD, Record
from gateway.api.replies import reply_json
from gateway.errors import BadRequestError, NotFoundError
from gateway.explain.causes import Verdict, View, common, computed_again, equal_by_parts, explain, likeness, view_of
from gateway.explain.parts import Digests, Part, parts_of
from gateway.ledger.base import Entry, Figures
from gateway.types import ANONYMOUS, Tenant

EXCERPT: Final = 80
"""Characters that are shown around the first that differs."""

DAY_S: Final = 86_400.0
LEAST_WINDOW_S: Final = 60.0
"""Of requests that a rate is told from."""

_GEMINI: Final = ":generateContent"
_name = text(200, 1)


@takes({"type": "object"})
def _body(value: Any, path: str) -> Body:
    if not isinstance(value, dict):
        raise invalid(path, "the body of a request is an object")
    return value


FIELDS: Final[Mapping[str, Parameter]] = {
    one.name: one
    for one in (
        Parameter("id", _name, "string", "Of a request among the latest 2,000; then nothing else is given."),
        Parameter("a", _body, "object", "The body of the earlier request."),
        Parameter("b", _body, "object", "The body of the later one."),
        Parameter(
            "endpoint",
            _name,
            "path of a route; default: told by the bodies",
            "Where both are sent; of Gemini `/v1beta/models/NAME:generateContent`.",
        ),
        Parameter("tenant_a", _name, "string", "Who sends the earlier one; default `anonymous`."),
        Parameter("tenant_b", _name, "string", "Who sends the later one; default `anonymous`."),
    )
}


class _Pasted(NamedTuple):
    view: View
    tokens: bytes  # empty for a model of an upstream


class ExplainPage:
    """Holds what its handler needs."""

    def __init__(
        self,
        answering: Answering,
        endpoints: Mapping[str, Endpoint],
        log: RequestLog,
        priced: Callable[[Entry], tuple[str, Figures]],
    ) -> None:
        """`endpoints` are those of lines, by name. `priced`: currency and figures of one entry."""
        self._answering = answering
        self._endpoints = {one.path: one for one in endpoints.values()}
        self._log = log
        self._priced = priced

    def routes(self) -> list[Route]:
        summary = "Why a request missed the cache, or where two requests stop being equal."
        asked = [{"role": "user", "content": "What day is it?"}]
        said = [[{"role": "system", "content": f"It is 2026-11-{day}."}, *asked] for day in (23, 24)]
        example = {side: {"model": "demo", "messages": messages} for side, messages in zip("ab", said, strict=True)}
        return [
            Route("POST", "/admin/explain", self.explain, summary, FIELDS, example=example, key="admin", changes="")
        ]

    async def explain(self, http: web.Request) -> web.Response:
        """POST /admin/explain"""
        body: Body = http[BODY]
        values = read(body, FIELDS, ())
        if "id" in values:
            if len(values) > 1:
                raise BadRequestError("`id` is given alone, or `a` and `b` without it.", param="id")
            return reply_json(await self._by_id(values["id"]))
        if not ("a" in values and "b" in values):
            raise BadRequestError("Give `id`, or `a` and `b`.", param="id")
        return reply_json(await self._pasted(http[RECORD], values))

    # -- two that were pasted -----------------------------------------------------------------------------------------

    async def _pasted(self, record: Record, values: Mapping[str, Any]) -> dict[str, Any]:
        digests = Digests(b"")
        before, now = [await self._view(record, values, side, digests) for side in ("a", "b")]
        same = common(array("I", before.tokens), array("I", now.tokens))
        equal = same if before.tokens and now.tokens else None
        verdict = explain(before.view, now.view, same)
        rate = await self._rate(now.view.tenant, now.view.model)
        told = self._told(verdict, before.view, now.view, equal, rate)
        return {**told, "differs": _differs(verdict, before.view, now.view, equal)}

    async def _view(self, record: Record, values: Mapping[str, Any], side: str, digests: Digests) -> _Pasted:
        body: Body = values[side]
        tenant = Tenant(values.get(f"tenant_{side}", ANONYMOUS))
        path = values.get("endpoint") or _endpoint_of(body)
        own = Record(
            request_id=record.request_id,
            endpoint="/admin/explain",
            received_s=time.monotonic(),
            dialect=GEMINI if path.endswith(_GEMINI) else OPENAI,
            tenant=tenant.name,
            work=record.work,
        )
        try:
            if path.endswith(_GEMINI):
                name = path.removesuffix(_GEMINI).rpartition("/")[2] or str(body.get("model", ""))
                rest = {field: value for field, value in body.items() if field != "model"}
                call = to_call(name, parse_generate(rest), None)
            elif (endpoint := self._endpoints.get(path)) is None or endpoint.call is None:
                raise invalid("endpoint", "requests of this route have no prompt that is cached")
            else:
                call = await endpoint.call(own, tenant, body)
            model = self._answering.find_model(call.model)
            requests = [] if model is None else self._answering.requests(own, tenant, call, model)
            tokens = b""
            if model is not None:
                tokens = (await self._answering.decoders.encode(requests[0], model)).tokens
        except BadRequestError as error:
            error.param = f"{side}.{error.param}" if error.param and error.param != "endpoint" else error.param or side
            raise
        scope = requests[0].salt if requests else f"{call.cache_key}\0{call.cache_salt}"
        block = 16 if model is None else model.namespace.block_size
        parts = parts_of(call.prompts[0], digests, texts=True)
        return _Pasted(
            View(call.model, tenant.name, str(scope), parts, len(tokens) // TOKEN_BYTES, block_size=block), tokens
        )

    # -- one that was answered ----------------------------------------------------------------------------------------

    async def _by_id(self, wanted: str) -> dict[str, Any]:
        rows, stale = await self._log.read()
        at = next((n for n, row in enumerate(rows) if wanted in (row["row"], row.get("id"), row.get("shown_id"))), None)
        if at is None:
            raise NotFoundError("No such request among the latest 2,000.", code="request_not_found")
        now = rows[at]
        view, older = view_of(now), [row for row in rows[at + 1 :] if not row.get("uncached")]
        before = max(older, key=lambda row: likeness(view_of(row), view), default=None)
        rate = _rate(rows, now.get("tenant"), now.get("model"))
        if not view.parts or before is None:
            verdict = Verdict("never_seen", "No request before it is known.") if view.parts else _NOTHING_KNOWN
            other = View("", "", "", ())
            return {**self._told(verdict, other, view, None, rate), "stale": stale, "before": None}
        other = view_of(before)
        equal = max(equal_by_parts(other, view), view.cached_tokens or 0)
        verdict = explain(other, view, equal)
        return {
            **self._told(verdict, other, view, equal, rate),
            "differs": _differs(verdict, other, view, equal),
            "before": before["id"],
            "stale": stale,
        }

    async def _rate(self, tenant: str, model: str) -> float:
        return _rate((await self._log.read())[0], tenant, model)

    def _told(self, verdict: Verdict, before: View, now: View, equal: int | None, per_day: float) -> dict[str, Any]:
        again = None if equal is None else computed_again(verdict.cause, before, now, equal)
        currency, figures = self._priced(Entry(now.tenant, now.model, prompt_tokens=round((again or 0) * per_day)))
        return {
            "verdict": verdict.cause,
            "text": verdict.text,
            "advice": verdict.advice,
            "a": [_shown(part, before) for part in before.parts],
            "b": [_shown(part, now) for part in now.parts],
            "differs": None,
            "equal_tokens": equal,
            "computed_again_tokens": again,
            "per_day": {
                "requests": round(per_day),
                "tokens": round((again or 0) * per_day),
                "money": money_of({currency: figures}, "cost_nano"),
            },
        }


_NOTHING_KNOWN: Final = Verdict(
    "unknown", "Of this request no parts are known: it is too large, or its bytes were known and not looked at."
)


def _rate(rows: Sequence[Mapping[str, Any]], tenant: str | None, model: str | None) -> float:
    """Requests of a tenant for a model in a day, at the rate of those that are kept."""
    if not rows:
        return 0.0
    window_s = max(LEAST_WINDOW_S, rows[0]["at_s"] - rows[-1]["at_s"])
    own = sum(row.get("tenant") == tenant and row.get("model") == model for row in rows)
    return float(own * DAY_S / window_s)


def _endpoint_of(body: Body) -> str:
    if "contents" in body:
        return _GEMINI
    if "input" in body:
        return "/v1/responses"
    if "prompt" in body:
        return "/v1/completions"
    blocks = [part for one in body.get("messages", ()) if isinstance(one, dict) for part in _blocks(one)]
    of_messages = "system" in body or any("cache_control" in one or one.get("type") == "tool_use" for one in blocks)
    return "/v1/messages" if of_messages else "/v1/chat/completions"


def _blocks(message: Body) -> list[Body]:
    content = message.get("content")
    return [one for one in content if isinstance(one, dict)] if isinstance(content, list) else []


def _shown(part: Part, view: View) -> dict[str, Any]:
    share = part.chars / (sum(one.chars for one in view.parts) or 1)
    return {
        "part": part.section,
        "role": part.role,
        "message": part.message,
        "chars": part.chars,
        "tokens": round(share * view.num_tokens) if view.num_tokens else None,
        "hash": part.digest,
        "marked": part.marked,
    }


def _differs(verdict: Verdict, before: View, now: View, equal: int | None) -> dict[str, Any] | None:
    if verdict.part is None:
        return None
    one, other = before.parts[verdict.part], now.parts[verdict.part]

    def excerpt(text: str | None) -> str | None:
        return None if text is None or verdict.char is None else text[max(0, verdict.char - 20) :][:EXCERPT]

    return {
        "segment": verdict.part,
        "message": other.message,
        "char": verdict.char,
        "token": equal,
        "a": excerpt(one.text),
        "b": excerpt(other.text),
    }
