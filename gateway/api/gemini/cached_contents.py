"""The routes of cached contents: create, get, list, patch, delete, and their use by generateContent. caching.py reads
what comes in, answering.py has the prefix computed, a store keeps what was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from gateway.api.answering import Answering, parsed
from gateway.api.dialect import EXAMPLE_MODEL, Route
from gateway.api.fields import invalid, missing, read_query, shown
from gateway.api.gemini.caching import (
    CHANGE,
    CREATE,
    MASK,
    expires_s,
    in_ms,
    kept_part,
    kept_values,
    marker,
    new_name,
    prefix_call,
    resource_json,
)
from gateway.api.gemini.content_store import ContentStore
from gateway.api.gemini.files import VERSIONS, GeminiFiles
from gateway.api.gemini.proto import read
from gateway.api.gemini.request import CachedPrefix, model_name
from gateway.api.gemini.wire import PAGE, page
from gateway.api.record import BODY, RECORD, TENANT, kvasir_headers
from gateway.api.replies import reply_json
from gateway.config import GeminiSettings
from gateway.errors import NotFoundError
from gateway.tasks import off_loop
from gateway.types import CachedContent, Lease, Tenant

EXAMPLE: Final = {
    "model": f"models/{EXAMPLE_MODEL}",
    "contents": [{"role": "user", "parts": [{"text": "A long document."}]}],
    "ttl": "300s",
}


@dataclass(frozen=True, slots=True)
class CachedContents:
    """Holds what its handlers need. `now` is seconds since 1970, by the clock that the store goes by."""

    settings: GeminiSettings
    answering: Answering
    files: GeminiFiles
    store: ContentStore
    now: Callable[[], float]

    def routes(self) -> list[Route]:
        return [route for version in VERSIONS for route in self._routes(f"/{version}/cachedContents")]

    def _routes(self, root: str) -> Iterator[Route]:
        one = f"{root}/{{name}}"
        yield Route(
            "POST",
            root,
            self.create,
            "Creates a cached content: the beginning of prompts.",
            CREATE,
            required=("model",),
            example=EXAMPLE,
        )
        yield Route("GET", root, self.list_all, "Cached contents.", query=PAGE)
        yield Route("GET", one, self.get, "One of them.")
        yield Route("PATCH", one, self.change, "Changes its end.", CHANGE, query=MASK, example={"ttl": "600s"})
        yield Route("DELETE", one, self.delete, "Deletes it.")

    async def use(self, tenant: Tenant, name: str, model: str) -> tuple[CachedContent, CachedPrefix]:
        """For a request to this model. Raises NotFoundError, and BadRequestError when it belongs to another model."""
        content = await self._find(tenant, name)
        if content.model != model:
            raise invalid("cachedContent", f"it is of models/{content.model}, and the request of models/{shown(model)}")
        values = await off_loop(content.num_bytes, lambda: kept_values(content))
        return content, CachedPrefix(values, marker(values, content.expires_s - self.now()))

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/cachedContents"""
        tenant, body = http[TENANT], http[BODY]
        await self.files.put_texts(http[RECORD], tenant, body)
        values = await parsed(http[RECORD], lambda _, body: read(body, CREATE), body)
        if not values.get("model"):
            raise missing("model")
        name, now_s = model_name(values["model"]), in_ms(self.now())
        end_s = expires_s(values, now_s, self.settings, default=True)
        kept = await parsed(http[RECORD], lambda _, body: kept_part(body, self.settings), body)
        tokens, lease = await self._lease(http, tenant, name, values, end_s - now_s)
        content = CachedContent(
            name=new_name(),
            model=name,
            body=kept,
            num_bytes=len(kept),
            tokens=tokens,
            created_s=now_s,
            updated_s=now_s,
            expires_s=end_s,
            display_name=values.get("displayName", ""),
        )
        await self.store.put(tenant.name, content)
        return _reply(http, resource_json(content, lease))

    async def list_all(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/cachedContents"""
        tenant = http[TENANT]
        items = {f"{one.created_s:020.6f} {one.name}": one for one in await self.store.all_of(tenant.name)}
        listed, token = page(items, http.query)
        contents = [resource_json(content) for _, content in listed]
        return _reply(http, {"cachedContents": contents, **({"nextPageToken": token} if token else {})})

    async def get(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/cachedContents/{name}"""
        tenant = http[TENANT]
        return _reply(http, resource_json(await self._find(tenant, http.match_info["name"])))

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
            kept = await off_loop(content.num_bytes, lambda: kept_values(content))
            _, lease = await self._lease(http, tenant, content.model, kept, end_s - now_s)
        changed = await self.store.extend(tenant.name, content, end_s)
        if changed is None:
            raise _not_found(content.name)
        return _reply(http, resource_json(changed, lease))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1/cachedContents/{name}"""
        tenant = http[TENANT]
        if not await self.store.delete(tenant.name, http.match_info["name"]):
            raise _not_found(http.match_info["name"])
        return _reply(http, {})

    async def _lease(
        self, http: web.Request, tenant: Tenant, name: str, values: dict[str, Any], ttl_s: float
    ) -> tuple[int, Lease | None]:
        """Has the prefix computed and leased. Its tokens up to the breakpoint, and what became of that."""
        call = await parsed(http[RECORD], lambda _, values: prefix_call(name, values, ttl_s), values)
        model = self.answering.model(name, http[RECORD])
        least = self.settings.min_tokens
        if least and (found := await self.answering.tokens(http[RECORD], tenant, call, model)) < least:
            why = f"too small. total_token_count={found}, min_total_token_count={least} (gemini.min_tokens)"
            raise invalid("contents", why)
        usage = await self.answering.prewarm(http[RECORD], tenant, call, model)
        lease = http[RECORD].lease
        kept = lease.kept if lease is not None else None
        return usage.prompt_tokens if kept is None else kept.tokens, lease

    async def _find(self, tenant: Tenant, name: str) -> CachedContent:
        content = await self.store.find(tenant.name, name)
        if content is None:
            raise _not_found(name)
        return content


def _not_found(name: str) -> NotFoundError:
    """The same for what never was, what has ended and what is somebody else's."""
    return NotFoundError(f"CachedContent not found (or permission denied): cachedContents/{shown(name)}.")


def _reply(http: web.Request, value: dict[str, Any]) -> web.Response:
    record = http[RECORD]
    return reply_json(value, kvasir_headers(record) if record.traces else {})
