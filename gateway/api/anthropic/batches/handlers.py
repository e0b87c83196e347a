"""/v1/messages/batches of the Anthropic API. The body of a new batch goes to disk while it comes, read by requests.py;
the batch lane keeps the jobs and runs them, and rows.py writes their results.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any, Final

from aiohttp import web

from gateway.api.anthropic.batches.requests import REQUESTS, RequestLimits, RequestReader
from gateway.api.anthropic.wire import ANTHROPIC, DEFAULT_LIMIT, MAX_LIMIT, read_version, time_text
from gateway.api.batches import BatchRoutes
from gateway.api.body import MAX_DEPTH, BodyLimit, body_chunks
from gateway.api.dialect import EXAMPLE_MODEL, JSONL, Route
from gateway.api.fields import Parameter, in_url, integer, invalid, read_query, shown, text
from gateway.api.record import RECORD, TENANT
from gateway.api.replies import reply_json
from gateway.api.tenants import Namespaces
from gateway.api.uploads import send_chunks
from gateway.config import BatchSettings, ServerSettings
from gateway.errors import BadRequestError, NotFoundError
from gateway.queues.batch.base import Job, Order
from gateway.queues.batch.store import BatchStore

PREFIX: Final = "msgbatch_"
ENDPOINT: Final = "/v1/messages"
ROOT: Final = "/v1/messages/batches"
THREAD_BYTES: Final = 64 << 10
"""From so many on the reader leaves the event loop for a thread."""

_PARAMS: Final = {"model": EXAMPLE_MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello."}]}
_create = (
    Parameter(
        "requests",
        REQUESTS,
        "array of objects: `custom_id`, `params`",
        "The requests, with `params` as in `POST /v1/messages`.",
    ),
)
CREATE: Final = {parameter.name: parameter for parameter in _create}
_list = (
    Parameter("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Batches of one page, at most."),
    Parameter("after_id", text(), "string", "The page right after this batch: older ones."),
    Parameter("before_id", text(), "string", "The page right before this batch: newer ones."),
)
LIST: Final = {parameter.name: parameter for parameter in _list}


class MessageBatches:
    """Holds what its handlers need."""

    def __init__(
        self,
        server: ServerSettings,
        settings: BatchSettings,
        namespaces: Namespaces,
        batches: BatchStore,
        upload_timeout_s: float,
    ) -> None:
        self._limits = RequestLimits(settings.max_requests, server.max_body_bytes, MAX_DEPTH)
        self._body_limit = BodyLimit(settings.max_request_bytes, "batches.max_request_bytes")
        self._namespaces = namespaces
        self._batches = batches
        self._routes = BatchRoutes(batches, ANTHROPIC.name, PREFIX, job_json, _not_found)
        self._upload_timeout_s = upload_timeout_s

    def routes(self) -> list[Route]:
        one = f"{ROOT}/{{batch_id}}"
        example = {"requests": [{"custom_id": "first", "params": _PARAMS}]}
        return [
            Route(
                "POST",
                ROOT,
                self.create,
                "Creates a batch of messages.",
                CREATE,
                ("requests",),
                example=example,
                json=False,
            ),
            Route("GET", ROOT, self.list_batches, "The batches, newest first.", query=LIST),
            Route("GET", one, self._routes.get, "State of a batch."),
            Route("DELETE", one, self.delete, "Deletes a batch that has ended, with its results."),
            Route("POST", f"{one}/cancel", self._routes.cancel, "Cancels a batch."),
            Route("GET", f"{one}/results", self.results, "Results of a batch.", media=(JSONL,)),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages/batches"""
        tenant, version = http[TENANT], read_version(http)
        self._namespaces.scope(http[RECORD].namespace, tenant)  # one that it may use
        reader = RequestReader(self._limits)
        arriving = body_chunks(http, self._body_limit, self._upload_timeout_s)
        async with self._batches.input(tenant.name) as rows, aclosing(arriving) as parts:
            loose = bytearray()
            async for chunk in parts:
                loose += chunk
                if len(loose) >= reader.least_bytes:
                    await rows.write(await _fed(reader, loose))
                    loose.clear()
            if loose:
                await rows.write(await _fed(reader, loose))
            reader.close()
            order = Order(
                tenant=tenant.name,
                dialect=ANTHROPIC.name,
                endpoint=ENDPOINT,
                namespace=http[RECORD].namespace or None,
                metadata={"version": version, "betas": _betas(http)},
                num_lines=reader.num_requests,
            )
            return reply_json(job_json(await self._batches.create(order, rows)))

    async def list_batches(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/messages/batches"""
        values = read_query(http.query, LIST)
        if "after_id" in values and "before_id" in values:
            raise invalid("before_id", "only one of `after_id` and `before_id` is possible")
        after, before = self._place(values, "after_id"), self._place(values, "before_id")
        return reply_json(await self._routes.page(http, values.get("limit", DEFAULT_LIMIT), after, before))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1/messages/batches/{batch_id}"""
        batch_id = http.match_info["batch_id"]
        if not await self._batches.delete(http[TENANT].name, ANTHROPIC.name, self._routes.job_id(batch_id)):
            raise _not_found(batch_id)
        return reply_json({"id": batch_id, "type": "message_batch_deleted"})

    async def results(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/messages/batches/{batch_id}/results"""
        job, batch_id = await self._routes.find(http), http.match_info["batch_id"]
        if not job.has_ended:
            raise BadRequestError(f"The batch {batch_id} has no results yet: it is {_status(job)}.")
        async with self._batches.results(http[TENANT].name, ANTHROPIC.name, job.id) as found:
            if found is None:
                raise _not_found(batch_id)
            return await send_chunks(http, found[1], {"Content-Type": JSONL})

    def _place(self, values: dict[str, Any], name: str) -> str | None:
        if name in values and not values[name].startswith(PREFIX):
            raise invalid(name, f"{shown(values[name])!r} is no id of a batch")
        return self._routes.job_id(values[name]) if name in values else None


async def _fed(reader: RequestReader, loose: bytearray) -> bytes:
    """Within a request of megabytes a piece may have megabytes, too, which take seconds: others have their turn."""
    data = bytes(loose)
    return reader.feed(data) if len(data) < THREAD_BYTES else await asyncio.to_thread(reader.feed, data)


def _betas(http: web.Request) -> str:
    """What the client wants with each request, for upstreams; not the name that batches themselves had as a beta."""
    named = [name.strip() for value in http.headers.getall("anthropic-beta", ()) for name in value.split(",")]
    return ",".join(name for name in named if name and not name.startswith("message-batches-"))


def job_json(job: Job) -> dict[str, Any]:
    """As every route tells it. All requests are processing until the batch has ended."""
    counts, ended = job.counts, job.has_ended
    errored = counts.failed + (counts.processing if job.state == "failed" else 0)
    cancelled_s = job.reached.get("cancelling")
    batch_id = PREFIX + job.id
    return {
        "id": batch_id,
        "type": "message_batch",
        "processing_status": _status(job),
        "request_counts": {
            "processing": 0 if ended else counts.total,
            "succeeded": counts.succeeded if ended else 0,
            "errored": errored if ended else 0,
            "canceled": counts.cancelled if ended else 0,
            "expired": counts.expired if ended else 0,
        },
        "created_at": time_text(job.created_s),
        "expires_at": time_text(job.expires_s),
        "ended_at": time_text(job.reached[job.state]) if ended else None,
        "cancel_initiated_at": None if cancelled_s is None else time_text(cancelled_s),
        "archived_at": None,
        "results_url": f"{ROOT}/{batch_id}/results" if ended else None,
    }


def _status(job: Job) -> str:
    if job.has_ended:
        return "ended"
    return "canceling" if job.state == "cancelling" else "in_progress"


def _not_found(batch_id: str) -> NotFoundError:
    return NotFoundError(f"There is no message batch {shown(batch_id)!r}.")
