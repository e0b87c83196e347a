"""Runs the lines of batches, for the batch lane: it brings rows, and takes results. Each dialect says how its rows are
read and written (`RowFormat`); lines.py answers what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple

import orjson
from aiohttp import web

from engine.protocol import TOKEN_BYTES
from gateway.api.beginnings import Beginning
from gateway.api.lines import OK, Answered, Line, Lines
from gateway.api.record import TENANT
from gateway.api.replies import page_json, reply_json
from gateway.api.structure import work_of_json
from gateway.api.upstream_lines import Headers
from gateway.errors import NotFoundError, OverloadedError
from gateway.queues.batch.base import Checked, Job, LinePlan, LineResult, Unrun
from gateway.queues.batch.store import BatchStore
from gateway.tasks import off_loop
from gateway.types import Tenant

COMPLETION_TOKENS: Final = 256
"""That an answer is taken to have for which no limit was asked."""

Row = dict[str, Any]


class RowFormat(NamedTuple):
    """How a dialect writes batches. Rows that passed its check are JSON objects with a `custom_id`.

    check     all rows of a job, blocking
    request   name of the endpoint that a row asks (Lines), and the body
    answered  row, request id and what became of it -> the result
    unrun     row, and why it never ran -> the result
    headers   that upstreams get with the requests of a job
    """

    check: Callable[[Job, BinaryIO], Checked]
    request: Callable[[Job, Row], tuple[str, dict[str, Any]]]
    answered: Callable[[Row, str, Answered], bytes]
    unrun: Callable[[Row, Unrun], bytes]
    headers: Callable[[Job], Headers] = lambda job: ()


@dataclass(frozen=True, slots=True)
class BatchRoutes:
    """What all dialects that have batches do alike with one, or with a page of them.

    prefix    of ids on the wire
    render    a job as its dialect writes it
    no_batch  the error for an id that is none of the tenant's
    """

    batches: BatchStore
    dialect: str
    prefix: str
    render: Callable[[Job], dict[str, Any]]
    no_batch: Callable[[str], NotFoundError]

    async def get(self, http: web.Request) -> web.StreamResponse:
        """State of a batch."""
        return reply_json(self.render(await self.find(http)))

    async def find(self, http: web.Request) -> Job:
        """The batch that the URL names. Raises NotFoundError."""
        batch_id = http.match_info["batch_id"]
        job = await self.batches.find(http[TENANT].name, self.dialect, self.job_id(batch_id))
        if job is None:
            raise self.no_batch(batch_id)
        return job

    async def cancel(self, http: web.Request) -> web.StreamResponse:
        """The body is empty whatever its type says."""
        batch_id = http.match_info["batch_id"]
        job = await self.batches.cancel(http[TENANT].name, self.dialect, self.job_id(batch_id))
        if job is None:
            raise self.no_batch(batch_id)
        return reply_json(self.render(job))

    async def page(self, http: web.Request, limit: int, after: str | None, before: str | None = None) -> dict[str, Any]:
        """`after` and `before` are ids of jobs."""
        jobs, has_more = await self.batches.page(
            http[TENANT].name, self.dialect, limit=limit, after=after, before=before
        )
        return page_json([self.render(job) for job in jobs], has_more=has_more)

    def job_id(self, batch_id: str) -> str:
        """Empty for what is no id of this dialect."""
        return batch_id[len(self.prefix) :] if batch_id.startswith(self.prefix) else ""


class BatchRunner:
    """queues.batch.base.Runner, of all dialects that have batches."""

    def __init__(self, lines: Lines, formats: Mapping[str, RowFormat]) -> None:
        """`formats` by the name of the dialect."""
        self.lines = lines
        self._formats = formats

    def check(self, job: Job, rows: BinaryIO) -> Checked:
        return self._formats[job.dialect].check(job, rows)

    async def plan(self, job: Job, row: bytes) -> LinePlan | None:
        line = self._line(job, *await _loaded(row), "", len(row))
        model = line.body.get("model")
        try:
            beginning = await self.lines.find_beginning(line)
        except OverloadedError:
            return None
        digests = b"" if beginning is None else beginning.digests
        return LinePlan(model if type(model) is str else "", digests, _expected_tokens(line.body, beginning, len(row)))

    async def run(self, job: Job, row: bytes, request_id: str) -> LineResult:
        value, work = await _loaded(row)
        answered = await self.lines.answer(self._line(job, value, work, request_id, len(row)))
        return LineResult(
            ok=answered.status == OK,
            body=self._formats[job.dialect].answered(value, request_id, answered),
            usage=answered.usage,
            retry=answered.retry,
            retry_after_s=answered.retry_after_s,
        )

    def unrun(self, job: Job, row: bytes, why: Unrun) -> bytes:
        return self._formats[job.dialect].unrun(orjson.loads(row) if row else {}, why)

    def _line(self, job: Job, row: Row, work: int, request_id: str, num_bytes: int) -> Line:
        rows = self._formats[job.dialect]
        endpoint, body = rows.request(job, row)
        tenant, headers = Tenant(job.tenant), rows.headers(job)
        return Line(endpoint, tenant, body, job.namespace or "", request_id, headers, num_bytes, work)


async def _loaded(row: bytes) -> tuple[Row, int]:
    """And the work that it makes. In a thread where it is large. It was counted and checked when it was read
    (RowFormat.check)."""
    return await off_loop(len(row), lambda: (orjson.loads(row), work_of_json(row)))


def _expected_tokens(body: Mapping[str, Any], beginning: Beginning | None, num_bytes: int) -> int:
    """A guess, for turns between tenants. What generates nothing has about a token for each four bytes."""
    if beginning is None:
        return num_bytes // TOKEN_BYTES
    limits = (body.get(name) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
    asked = next((limit for limit in limits if type(limit) is int and limit > 0), COMPLETION_TOKENS)
    return beginning.num_tokens + asked
