"""Cached contents of the Gemini API: create, get, list, patch, delete, and their use by generateContent.

A cached content becomes a lease: the prompt is computed up to its end, with a breakpoint there that has the cached
content's time to live. Every use sets the breakpoint again, with the time that is left, and so renews a lost lease.
For a model of an upstream it is stored, and each use of it becomes a hint for that upstream.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web

from engine.protocol import Sampling
from gateway.api.answering import Answering, parsed
from gateway.api.call import Call, take_thoughts
from gateway.api.dialect import EXAMPLE_MODEL, Route
from gateway.api.fields import (
    anything,
    invalid,
    missing,
    no_effect,
    read_query,
    refused,
    shown,
    table,
    takes,
    text,
    used,
)
from gateway.api.gemini.content_store import ContentStore
from gateway.api.gemini.contents import to_messages
from gateway.api.gemini.files import VERSIONS, GeminiFiles
from gateway.api.gemini.parameters import GENERATE
from gateway.api.gemini.proto import given, read
from gateway.api.gemini.request import CachedPrefix, model_name
from gateway.api.gemini.tools import strict, tool_use
from gateway.api.gemini.wire import PAGE, duration, duration_s, page, timestamp, timestamp_s
from gateway.api.media import refusal
from gateway.api.record import BODY, RECORD, TENANT, kvasir_headers
from gateway.api.replies import reply_json
from gateway.api.tenants import ONLY_COUNTED, need_of, set_aside
from gateway.config import GeminiSettings
from gateway.config import duration_s as setting_s
from gateway.errors import NotFoundError
from gateway.tasks import off_loop
from gateway.types import CachedContent, ChatPrompt, Lease, Marker, Tenant

MS_DIGITS: Final = 3  # stores keep milliseconds, so that a time is shown the same whenever it is read
LEAST_S: Final = 1e-3  # of a breakpoint, where a cached content ends while it is used
_STORED: Final = ("systemInstruction", "contents", "tools", "toolConfig")
_string = text()
_OURS: Final = "The server writes it."
_FIXED: Final = "Only the end of a cached content can be changed."
_TTL: Final = ("string like `3.5s`", "For how long it is kept from now; default `gemini.default_ttl`.")
_EXPIRES: Final = ("RFC 3339 timestamp", "Until when it is kept; not together with `ttl`.")

CREATE: Final = table(
    used("model", _string, "string, required", "Name of a served model, with or without `models/`."),
    *(GENERATE[name] for name in _STORED),
    used("ttl", duration_s, *_TTL),
    used("expireTime", timestamp_s, *_EXPIRES),
    used("displayName", text(128), "string of up to 128 characters", "For people."),
    *(no_effect(name, anything, "-", _OURS) for name in ("name", "createTime", "updateTime", "usageMetadata")),
    refused("kmsKeyName", "Nothing is encrypted with keys of others."),
)
CHANGE: Final = table(
    used("ttl", duration_s, *_TTL),
    used("expireTime", timestamp_s, *_EXPIRES),
    *(no_effect(name, anything, "-", _OURS) for name in ("name", "createTime", "updateTime", "usageMetadata")),
    *(refused(name, _FIXED) for name in ("model", "displayName", *_STORED)),
)


@takes({"type": "string"})
def check_mask(value: Any, path: str) -> str:
    """An updateMask: the fields that a change is about."""
    for name in _string(value, path).split(","):
        if name not in ("ttl", "expireTime", "expire_time", "*", ""):
            raise invalid(path, f"'{shown(name)}' cannot be changed")
    return str(value)


MASK: Final = table(
    used("updateMask", check_mask, "`ttl` or `expireTime`", "What is changed; the body says it as well."),
)


def stored_body(body: dict[str, Any], limits: GeminiSettings) -> bytes:
    """The stored fields of a checked body, unchanged. Raises BadRequestError when they are too large."""
    found = given(body, CREATE)
    kept = orjson.dumps({name: found[name] for name in _STORED if name in found})
    if len(kept) > limits.max_content_bytes:
        raise invalid("contents", f"{len(kept)} bytes of JSON, and {limits.max_content_bytes} are possible")
    return kept


def stored_values(content: CachedContent) -> dict[str, Any]:
    """The checked values of a cached content."""
    return read(orjson.loads(content.body), GENERATE)


def expires_s(values: dict[str, Any], now_s: float, limits: GeminiSettings, *, default: bool) -> float:
    """When it ends, in seconds since 1970. Raises BadRequestError for a time that is too near or too far, and for
    none where there is no default."""
    if "ttl" in values and "expireTime" in values:
        raise invalid("expireTime", "it is there besides 'ttl'")
    if "ttl" in values:
        path, ttl_s = "ttl", values["ttl"]
    elif "expireTime" in values:
        path, ttl_s = "expireTime", values["expireTime"] - now_s
    elif default:
        path, ttl_s = "ttl", setting_s(limits.default_ttl)
    else:
        raise missing("ttl")
    least_s = setting_s(limits.min_ttl)
    if not least_s <= ttl_s <= limits.longest_s:
        possible = f"{duration(least_s)} to {duration(limits.longest_s)} (gemini.max_ttl)"
        raise invalid(path, f"it is {duration(ttl_s)} from now, and may be {possible}")
    return float(round(now_s + ttl_s, MS_DIGITS))


def marker(values: dict[str, Any], ttl_s: float) -> Marker:
    """The breakpoint at the end of a cached content."""
    messages = _messages(values)
    return Marker(len(messages) - 1, len(messages[-1]["content"]), max(ttl_s, LEAST_S))


def _messages(values: dict[str, Any]) -> list[dict[str, Any]]:
    messages, media = to_messages(values.get("systemInstruction"), values.get("contents", ()))
    if media:
        raise refusal(media[0])
    if not messages:
        raise missing("contents")
    take_thoughts(messages)
    return messages


def prefix_call(model: str, values: dict[str, Any], ttl_s: float) -> Call:
    """Computes the prefix, and generates nothing. Raises BadRequestError for what no request could use."""
    declared = strict(values.get("tools", ()), values.get("toolConfig", {}))
    tool_use(declared, values.get("toolConfig", {}), "toolConfig")
    markers = (marker(values, ttl_s),)
    prompt = ChatPrompt(_messages(values), add_generation_prompt=False, markers=markers, tools=declared)
    return Call(model=model, prompts=(prompt,), prompt_param="contents", sampling=Sampling(max_tokens=0), prewarm=True)


def resource_json(content: CachedContent, lease: Lease | None = None) -> dict[str, Any]:
    """The resource; without its contents. `cacheLease` is ours, and present after an engine has computed the prefix;
    where none has, there is `tokensEstimated`."""
    return {
        "name": f"cachedContents/{content.name}",
        "model": f"models/{content.model}",
        **({"displayName": content.display_name} if content.display_name else {}),
        "createTime": timestamp(content.created_s),
        "updateTime": timestamp(content.updated_s),
        "expireTime": timestamp(content.expires_s),
        "usageMetadata": {"totalTokenCount": content.tokens},
        **({"cacheLease": lease.state} if lease is not None else {}),
        **({"tokensEstimated": True} if content.estimated else {}),
    }


# -- routes -----------------------------------------------------------------------------------------------------------

EXAMPLE: Final = {
    "model": f"models/{EXAMPLE_MODEL}",
    "contents": [{"role": "user", "parts": [{"text": "A long document."}]}],
    "ttl": "300s",
}


@dataclass(frozen=True, slots=True)
class CachedContents:
    """Handlers of /v1/cachedContents. `now` is the store's clock, in seconds since 1970."""

    settings: GeminiSettings
    answering: Answering
    files: GeminiFiles
    store: ContentStore
    now: Callable[[], float]

    def routes(self) -> list[Route]:
        return [route for version in VERSIONS for route in self._routes(f"/{version}/cachedContents")]

    def _routes(self, root: str) -> Iterator[Route]:
        one = f"{root}/{{name}}"
        summary = "Creates a cached content: the beginning of prompts."
        yield Route("POST", root, self.create, summary, CREATE, required=("model",), example=EXAMPLE)
        yield Route("GET", root, self.list_all, "Cached contents.", query=PAGE)
        yield Route("GET", one, self.get, "One of them.")
        yield Route("PATCH", one, self.change, "Changes its end.", CHANGE, query=MASK, example={"ttl": "600s"})
        yield Route("DELETE", one, self.delete, "Deletes it.")

    async def use(self, tenant: Tenant, name: str, model: str) -> tuple[CachedContent, CachedPrefix]:
        """For a request to this model. Raises NotFoundError, and BadRequestError when it belongs to another model."""
        content = await self._find(tenant, name)
        if content.model != model:
            raise invalid("cachedContent", f"it is of models/{content.model}, and the request of models/{shown(model)}")
        values = await off_loop(content.num_bytes, lambda: stored_values(content))
        return content, CachedPrefix(values, marker(values, content.expires_s - self.now()))

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/cachedContents"""
        tenant, body = http[TENANT], http[BODY]
        await self.files.put(http[RECORD], tenant, body)
        values = await parsed(http[RECORD], lambda _, body: read(body, CREATE), body)
        if not values.get("model"):
            raise missing("model")
        name, now_s = model_name(values["model"]), round(self.now(), MS_DIGITS)
        end_s = expires_s(values, now_s, self.settings, default=True)
        stored = await parsed(http[RECORD], lambda _, body: stored_body(body, self.settings), body)
        hosted = self.answering.pipeline.find_hosted(name, tenant.name) is not None
        tokens, lease = await self._lease(http, tenant, name, values, end_s - now_s, hosted=hosted)
        content = CachedContent(
            name=secrets.token_hex(16),
            model=name,
            body=stored,
            num_bytes=len(stored),
            tokens=tokens,
            created_s=now_s,
            updated_s=now_s,
            expires_s=end_s,
            display_name=values.get("displayName", ""),
            estimated=hosted,
        )
        await self.store.put(tenant.name, content)
        return _reply(http, resource_json(content, lease))

    async def list_all(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/cachedContents"""
        stored = await self.store.all_of(http[TENANT].name)
        items = {f"{one.created_s:020.6f} {one.name}": one for one in stored}
        listed, token = page(items, http.query)
        contents = [resource_json(content) for _, content in listed]
        return _reply(http, {"cachedContents": contents, **({"nextPageToken": token} if token else {})})

    async def get(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/cachedContents/{name}"""
        return _reply(http, resource_json(await self._find(http[TENANT], http.match_info["name"])))

    async def change(self, http: web.Request) -> web.StreamResponse:
        """PATCH /v1/cachedContents/{name}"""
        tenant = http[TENANT]
        read_query(http.query, MASK)
        values = read(http[BODY], CHANGE)
        now_s = self.now()
        end_s = expires_s(values, now_s, self.settings, default=False)
        content = await self._find(tenant, http.match_info["name"])
        lease = None
        if end_s > content.expires_s:  # a lease cannot be made shorter; one that is long enough stays as it is
            http[RECORD].work += content.num_bytes
            values = await off_loop(content.num_bytes, lambda: stored_values(content))
            hosted = content.estimated
            _, lease = await self._lease(http, tenant, content.model, values, end_s - now_s, hosted=hosted)
        changed = await self.store.extend(tenant.name, content, end_s)
        if changed is None:
            raise _not_found(content.name)
        return _reply(http, resource_json(changed, lease))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1/cachedContents/{name}"""
        if not await self.store.delete(http[TENANT].name, http.match_info["name"]):
            raise _not_found(http.match_info["name"])
        return _reply(http, {})

    async def _lease(
        self, http: web.Request, tenant: Tenant, name: str, values: dict[str, Any], ttl_s: float, *, hosted: bool
    ) -> tuple[int, Lease | None]:
        """Has the prefix computed and leased. Its tokens up to the breakpoint, and what became of that. `hosted`: only
        estimates them, as the upstream of the model gets it with the first use."""
        call = await parsed(http[RECORD], lambda _, values: prefix_call(name, values, ttl_s), values)
        model = self.answering.model(name, http[RECORD])
        least, found = self.settings.min_tokens, 0
        if hosted:
            await set_aside(self.answering.limits, http[RECORD], lambda: ONLY_COUNTED)
            found = need_of(call, 0, model.context_tokens).input_tokens
        elif least:
            found = await self.answering.tokens(http[RECORD], tenant, call, model)
        if found < least:
            why = f"too small. total_token_count={found}, min_total_token_count={least} (gemini.min_tokens)"
            raise invalid("contents", why)
        if hosted:
            return found, None
        usage = await self.answering.prewarm(http[RECORD], tenant, call, model)
        lease = http[RECORD].trace.lease
        kept = lease.kept if lease is not None else None
        return usage.prompt_tokens if kept is None else kept.tokens, lease

    async def _find(self, tenant: Tenant, name: str) -> CachedContent:
        content = await self.store.find(tenant.name, name)
        if content is None:
            raise _not_found(name)
        return content


def _not_found(name: str) -> NotFoundError:
    """The same for unknown, expired and other tenants' names."""
    return NotFoundError(f"CachedContent not found (or permission denied): cachedContents/{shown(name)}.")


def _reply(http: web.Request, value: dict[str, Any]) -> web.Response:
    record = http[RECORD]
    return reply_json(value, kvasir_headers(record) if record.traces else {})
