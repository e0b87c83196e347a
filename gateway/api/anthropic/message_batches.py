"""/v1/messages/batches of the Anthropic API, and the rows of its batches. The body of a new batch goes to disk while it
arrives, split by batch_body.py; the batch queue keeps the jobs and runs them.
"""

from __future__ import annotations

from contextlib import aclosing
from functools import partial
from typing import Any, BinaryIO, Final

import orjson
from aiohttp import web

from gateway.api.anthropic.batch_body import REQUESTS, RequestSplitter
from gateway.api.anthropic.handlers import endpoint_name
from gateway.api.anthropic.wire import ANTHROPIC, DEFAULT_LIMIT, MAX_LIMIT, error_json, read_version, time_text
from gateway.api.batches import BatchRoutes
from gateway.api.body import BodyLimit, body_chunks
from gateway.api.dialect import EXAMPLE_MODEL, JSONL, Route
from gateway.api.fields import in_url, integer, invalid, read_query, shown, table, text, used
from gateway.api.lines import OK, Answered, Row, RowFormat
from gateway.api.passthrough import Headers
from gateway.api.record import RECORD, TENANT
from gateway.api.replies import reply_json
from gateway.api.structure import work_of_json
from gateway.api.tenants import Namespaces
from gateway.api.uploads import send_chunks
from gateway.config import BatchSettings, ServerSettings
from gateway.errors import BadRequestError, KvasirError, NotFoundError
from gateway.queues.batch.base import Checked, Counts, Job, Line, Unrun
from gateway.queues.batch.store import BatchStore
from gateway.tasks import off_loop

PREFIX: Final = "msgbatch_"
ENDPOINT: Final = "/v1/messages"
ROOT: Final = "/v1/messages/batches"
_PARAMS: Final = {"model": EXAMPLE_MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "Hello."}]}
CREATE: Final = table(
    used(
        "requests",
        REQUESTS,
        "array of objects: `custom_id`, `params`",
        "The requests, with `params` as in `POST /v1/messages`.",
    )
)
LIST: Final = table(
    used("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Batches of one page, at most."),
    used("after_id", text(), "string", "The page right after this batch: older ones."),
    used("before_id", text(), "string", "The page right before this batch: newer ones."),
)


class MessageBatches:
    """Handlers of /v1/messages/batches."""

    def __init__(
        self,
        server: ServerSettings,
        settings: BatchSettings,
        namespaces: Namespaces,
        batches: BatchStore,
        upload_timeout_s: float,
    ) -> None:
        self._max_requests, self._max_request_bytes = settings.max_requests, server.max_body_bytes
        self._body_limit = BodyLimit(settings.max_request_bytes, "batches.max_request_bytes")
        self._namespaces = namespaces
        self._batches = batches
        self._routes = BatchRoutes(batches, ANTHROPIC.name, PREFIX, job_json, _not_found)
        self._upload_timeout_s = upload_timeout_s

    def routes(self) -> list[Route]:
        one = f"{ROOT}/{{batch_id}}"
        made: Any = {"example": {"requests": [{"custom_id": "first", "params": _PARAMS}]}, "json": False}
        return [
            Route("POST", ROOT, self.create, "Creates a batch of messages.", CREATE, ("requests",), **made),
            Route("GET", ROOT, self.list_batches, "The batches, newest first.", query=LIST),
            Route("GET", one, self._routes.get, "State of a batch."),
            Route("DELETE", one, self.delete, "Deletes a batch that has ended, with its results."),
            Route("POST", f"{one}/cancel", self._routes.cancel, "Cancels a batch."),
            Route("GET", f"{one}/results", self.results, "Results of a batch.", media=(JSONL,)),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages/batches"""
        tenant, version = http[TENANT], read_version(http)
        self._namespaces.scope(http[RECORD].namespace, tenant)  # refuses one that the tenant may not use
        splitter = RequestSplitter(self._max_requests, self._max_request_bytes)
        arriving = body_chunks(http, self._body_limit, self._upload_timeout_s)
        async with self._batches.input(tenant.name) as rows, aclosing(arriving) as chunks:
            async for chunk in chunks:
                if requests := splitter.feed(chunk):
                    work = sum(map(work_of_json, requests))
                    await rows.write(await off_loop(work, partial(splitter.rows, requests)))
            splitter.close()
            draft = Job(
                id="",
                tenant=tenant.name,
                dialect=ANTHROPIC.name,
                endpoint=ENDPOINT,
                namespace=http[RECORD].namespace or None,
                key=http[RECORD].key,
                metadata={"version": version, "betas": _betas(http)},
                counts=Counts(splitter.num_requests),
            )
            return reply_json(job_json(await self._batches.create(draft, rows)))

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


def _betas(http: web.Request) -> str:
    """The beta names to send with each request to upstreams, without that of batches themselves."""
    named = [name.strip() for value in http.headers.getall("anthropic-beta", ()) for name in value.split(",")]
    return ",".join(name for name in named if name and not name.startswith("message-batches-"))


def job_json(job: Job) -> dict[str, Any]:
    """A batch as all routes write it. All requests are processing until the batch has ended."""
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


# -- rows -------------------------------------------------------------------------------------------------------------

_UNRUN: Final[dict[Unrun, dict[str, Any]]] = {
    "cancelled": {"type": "canceled"},
    "expired": {"type": "expired"},
    "failed": {"type": "errored", "error": error_json(KvasirError("The server could not run this request."), "")},
}


def _check(job: Job, rows: BinaryIO) -> Checked:
    """Where the rows are; they were checked when they arrived."""
    lines: list[Line] = []
    offset = 0
    for row in rows:
        lines.append(Line(offset, len(row)))
        offset += len(row)
    return Checked(lines, [])


def _answered(row: Row, request_id: str, answered: Answered) -> bytes:
    """The result of a request that ran, also of one that failed."""
    body = orjson.Fragment(answered.body)
    result = {"type": "succeeded", "message": body} if answered.status == OK else {"type": "errored", "error": body}
    return orjson.dumps({"custom_id": row["custom_id"], "result": result})


def _headers(job: Job) -> Headers:
    betas: str = job.metadata.get("betas", "")
    return (("anthropic-beta", betas),) if betas else ()


ROWS: Final = RowFormat(
    check=_check,
    request=lambda job, row: (endpoint_name(job.metadata["version"]), row["params"]),
    answered=_answered,
    unrun=lambda row, why: orjson.dumps({"custom_id": row.get("custom_id", ""), "result": _UNRUN[why]}),
    headers=_headers,
)
