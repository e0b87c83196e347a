"""The routes of the Responses API. request.py reads what comes in, shape.py writes what goes out, store.py keeps it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from engine.protocol import Hello
from gateway.api.answering import Answering, parsed
from gateway.api.call import Call
from gateway.api.dialect import EXAMPLE_MODEL, JSON, SSE, Handler, Route
from gateway.api.fields import read_query, shown
from gateway.api.lines import Endpoint
from gateway.api.openai.responses.items import with_ids
from gateway.api.openai.responses.keeping import RETRY_AFTER_S, Background, ResponseKeeper, settled
from gateway.api.openai.responses.parameters import IN_ITEMS_URL, IN_RESPONSE_URL, RESPONSE, TOKENS
from gateway.api.openai.responses.request import ResponsesRequest, parse, shortened, to_call, turns, with_tools
from gateway.api.openai.responses.shape import Diagnose, ResponseShape
from gateway.api.openai.responses.store import ResponseStore, StoredResponse, diagnose, resolved
from gateway.api.openai.responses.tools import Item
from gateway.api.openai.wire import OPENAI
from gateway.api.record import BODY, RECORD, TENANT, Record, kvasir_headers
from gateway.api.replies import page_json, reply, reply_json
from gateway.api.stream import Generation
from gateway.api.tiers import grant
from gateway.config import LeaseSettings, ServerSettings
from gateway.errors import BadRequestError, ContextLengthError, NotFoundError, OverloadedError, UnsupportedError
from gateway.tasks import off_loop, work_of
from gateway.types import Tenant


class _Wanted(NamedTuple):
    """A response that is to be made."""

    call: Call
    model: Hello
    keeper: ResponseKeeper


@dataclass(frozen=True, slots=True)
class Responses:
    """Holds what its handlers need."""

    server: ServerSettings
    leases: LeaseSettings
    answering: Answering
    store: ResponseStore
    background: Background

    def routes(self) -> list[Route]:
        example = {"model": EXAMPLE_MODEL, "input": "Hello."}
        required = ("model", "input")
        one = "/v1/responses/{response_id}"
        return [
            Route(
                "POST",
                "/v1/responses",
                self.create,
                "Answers a list of items with items.",
                RESPONSE,
                required,
                media=(JSON, SSE),
                example=example,
                passes="translated",
            ),
            Route(
                "POST",
                "/v1/responses/input_tokens",
                self.input_tokens,
                "Counts the tokens of an input.",
                TOKENS,
                required,
                example=example,
                passes="counted",
            ),
            Route("POST", "/v1/responses/compact", self.compact, "Refused: nothing is compacted.", refuses=True),
            Route("GET", one, self._stored(self.retrieve), "A stored response.", query=IN_RESPONSE_URL),
            Route("DELETE", one, self._stored(self.delete), "Deletes a stored response."),
            Route("POST", f"{one}/cancel", self._stored(self.cancel), "Ends a response that runs in the background."),
            Route(
                "GET",
                f"{one}/input_items",
                self._stored(self.input_items),
                "Input items of a response.",
                query=IN_ITEMS_URL,
            ),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses"""
        tenant, record = http[TENANT], http[RECORD]
        query = await parsed(record, lambda _, body: parse(body), http[BODY])
        wanted = await self._wanted(record, tenant, query)
        if query.values.get("background"):
            return await self._begin(http, tenant, wanted)
        if not wanted.call.stream:
            return reply(await self._whole(record, tenant, wanted), kvasir_headers(record))
        call, model, keeper = wanted
        try:
            return await self.answering.stream(http, Generation(call, model, keeper.shape, keeper))
        finally:
            keeper.abandoned()

    def endpoints(self) -> dict[str, Endpoint]:
        """What lines of a batch may ask for."""
        return {"/v1/responses": Endpoint(OPENAI, "/v1/responses", self._answer_line, self._call_of_line, chats=True)}

    async def _answer_line(self, record: Record, tenant: Tenant, body: dict[str, Any]) -> bytes:
        query = await parsed(record, lambda _, body: parse(body), body)
        return await self._whole(record, tenant, await self._wanted(record, tenant, query))

    async def _call_of_line(self, record: Record, tenant: Tenant, body: dict[str, Any]) -> Call:
        query = await parsed(record, lambda _, body: parse(body), body)
        return (await self._wanted(record, tenant, query)).call

    async def _wanted(self, record: Record, tenant: Tenant, query: ResponsesRequest) -> _Wanted:
        model = self.answering.model(query.values["model"], record)
        token = secrets.token_hex(16)  # what the ids of a response and of its items have in common
        found = await self._items(tenant, query)
        record.work = max(record.work, work_of(0, len(found)))
        items = await off_loop(record.work, lambda: with_ids(found, token))
        query = await off_loop(record.work, lambda: with_tools(query, items))
        whole = await self.answering.with_files(record, tenant, query.values["model"], items, "input")
        call = await self._call(record, tenant, query, whole, model)
        shape = ResponseShape(
            query,
            token,
            leases=self.leases,
            generated=lambda: record.trace.completion_tokens,
            tier=grant(call.tier, record),
            diagnose=await self._diagnosis(tenant, query, items),
        )
        store = self.store if query.values.get("store", True) else None
        return _Wanted(call, model, ResponseKeeper(store, tenant.name, shape, items))

    async def _whole(self, record: Record, tenant: Tenant, wanted: _Wanted) -> bytes:
        call, model, keeper = wanted
        requests = await self.answering.begun(record, tenant, call, model)
        (answer,), usage = await self.answering.collect(requests, call, model)
        await keeper.take(answer, usage)
        return orjson.dumps(keeper.shape.response)

    async def _begin(self, http: web.Request, tenant: Tenant, wanted: _Wanted) -> web.Response:
        """In the background. Answers with the response as it is then."""
        call, model, keeper = wanted
        self.background.admit()
        requests = await self.answering.begun(http[RECORD], tenant, call, model)
        begun = orjson.dumps(keeper.shape.response)
        await self.background.start(http[RECORD], keeper, self.answering.collect(requests, call, model))
        return reply(begun)

    async def input_tokens(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses/input_tokens"""
        tenant = http[TENANT]
        query = await parsed(http[RECORD], lambda _, body: parse(body, TOKENS), http[BODY])
        model = self.answering.model(query.values["model"], http[RECORD])
        items = await self._items(tenant, query)
        query = await off_loop(http[RECORD].work, lambda: with_tools(query, items))
        call = await self._call(http[RECORD], tenant, query, items, model)
        tokens = await self.answering.count(http[RECORD], tenant, call, model)
        return reply_json({"object": "response.input_tokens", "input_tokens": tokens})

    async def compact(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses/compact"""
        raise UnsupportedError("Conversations are not compacted here; `truncation: auto` drops their oldest turns.")

    def _stored(self, own: Handler) -> Handler:
        """Asks the upstream that keeps the response of the URL; `own` answers where that is none."""

        async def handler(http: web.Request) -> web.StreamResponse:
            tenant, response_id = http[TENANT], http.match_info["response_id"]
            if (upstream := await self.store.find_upstream(tenant.name, response_id)) is None:
                return await own(http)
            rest = http.path.partition(response_id)[2]
            reply = await self.answering.passthrough.kept(http, tenant, upstream, f"/v1/responses/{response_id}{rest}")
            if http.method == "DELETE" and reply.status == 200:
                await self.store.forget_upstream(tenant.name, response_id)
            return reply

        return handler

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{response_id}"""
        read_query(http.query, IN_RESPONSE_URL)
        return reply_json((await self._get(http, http[TENANT])).response)

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1/responses/{response_id}"""
        response_id = http.match_info["response_id"]
        if not await self.store.delete(http[TENANT].name, response_id):
            raise _not_found(response_id)
        await self.background.cancel(response_id)
        return reply_json({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses/{response_id}/cancel"""
        tenant = http[TENANT]
        stored = await self._get(http, tenant)
        if not stored.response["background"]:
            raise BadRequestError("Only a response that runs in the background can be cancelled; close the stream.")
        if stored.response["status"] == "in_progress":
            await self.background.cancel(stored.response["id"])
            stored = await self._get(http, tenant)
        if stored.response["status"] == "in_progress":  # another gateway works on it, and will find it cancelled
            stored = await self._cancelled(http, tenant, stored)
        return reply_json(stored.response)

    async def _cancelled(self, http: web.Request, tenant: Tenant, stored: StoredResponse) -> StoredResponse:
        """The response, which may be complete by now. Raises NotFoundError for one that was deleted meanwhile."""
        cancelled = StoredResponse({**stored.response, "status": "cancelled"}, stored.items)
        if await self.store.put(tenant.name, cancelled, stored.body):
            return cancelled
        stored = await self._get(http, tenant)
        if stored.response["status"] == "in_progress":  # it was not written
            raise OverloadedError("Stored responses cannot be reached at the moment.", retry_after_s=RETRY_AFTER_S)
        return stored

    async def input_items(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{response_id}/input_items"""
        query = read_query(http.query, IN_ITEMS_URL)
        items = (await self._get(http, http[TENANT])).items
        if query.get("order", "desc") == "desc":
            items = items[::-1]
        if (after := query.get("after")) is not None:
            items = _after(items, after)
        page = items[: query.get("limit", 20)]
        return reply_json({"object": "list", **page_json(page, has_more=len(items) > len(page))})

    async def _get(self, http: web.Request, tenant: Tenant) -> StoredResponse:
        """The response of the URL. Raises NotFoundError."""
        response_id = http.match_info["response_id"]
        if (stored := await self.store.find(tenant.name, response_id)) is None:
            raise _not_found(response_id)
        return settled(stored, self.server.request_timeout_s)

    async def _items(self, tenant: Tenant, query: ResponsesRequest) -> list[Item]:
        previous = await self._find_previous(tenant, query)
        return [*previous, *await resolved(self.store, tenant.name, query.items)]

    async def _find_previous(self, tenant: Tenant, query: ResponsesRequest) -> list[Item]:
        """The conversation of `previous_response_id`; empty without one."""
        previous = query.values.get("previous_response_id")
        if previous is None:
            return []
        if (stored := await self.store.find(tenant.name, previous)) is None:
            raise BadRequestError(
                f"Previous response with id '{shown(previous)}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if settled(stored, self.server.request_timeout_s).response["status"] == "in_progress":
            raise BadRequestError(
                f"The response '{previous}' is still in progress.", param="previous_response_id", code="invalid_value"
            )
        return stored.conversation

    async def _diagnosis(self, tenant: Tenant, query: ResponsesRequest, items: list[Item]) -> Diagnose | None:
        """None where no comparison is asked for."""
        compared = query.values.get("prompt_cache_options", {}).get("comparison_response_id")
        if compared is None:
            return None
        try:
            stored = await self.store.find(tenant.name, compared)
        except OverloadedError:
            return lambda response, usage: {"type": "unavailable"}
        keyed = bool(self.answering.namespaces.separating_key(tenant, "any"))
        return lambda response, usage: diagnose(response, items, stored, usage, keyed=keyed)

    async def _call(
        self, record: Record, tenant: Tenant, query: ResponsesRequest, items: list[Item], model: Hello
    ) -> Call:
        """With `truncation: auto`, of the most turns that fit; else, or if not even the last one fits, of all."""
        starts = turns(items) or [0]

        async def from_turn(index: int) -> Call:
            kept = shortened(items, starts[index])
            return await off_loop(record.work, lambda: to_call(query, kept, self.leases))

        whole = await from_turn(0)
        if query.values.get("truncation") != "auto" or await self._fits(record, tenant, whole, model):
            return whole
        first, last = 1, len(starts)  # the turn to begin with is one of these; the last is none
        while first < last:
            middle = (first + last) // 2
            if await self._fits(record, tenant, await from_turn(middle), model):
                last = middle
            else:
                first = middle + 1
        return whole if first == len(starts) else await from_turn(first)

    async def _fits(self, record: Record, tenant: Tenant, call: Call, model: Hello) -> bool:
        try:
            tokens = await self.answering.tokens(record, tenant, call, model)
        except ContextLengthError:
            return False
        return tokens + max(call.sampling.max_tokens, 1) <= model.context_tokens


def _after(items: Sequence[Item], after: str) -> list[Item]:
    for index, item in enumerate(items):
        if item["id"] == after:
            return list(items[index + 1 :])
    raise BadRequestError(f"There is no item with the id '{shown(after)}'.", param="after", code="invalid_value")


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{shown(response_id)}' not found.", param="response_id")
