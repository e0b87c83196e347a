"""Routes that all dialects with batches have alike: one batch, its end, a page of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.api.record import TENANT
from gateway.api.replies import page_json, reply_json
from gateway.errors import NotFoundError
from gateway.queues.batch.base import Job
from gateway.queues.batch.store import BatchStore


@dataclass(frozen=True, slots=True)
class BatchRoutes:
    """Handlers of one dialect.

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
