"""/admin/batches: the jobs of all tenants, and their end. Ids are those that clients have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from gateway.api.anthropic import message_batches
from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, in_url, integer, invalid, read_query, shown, text
from gateway.api.openai.batches import handlers as openai_batches
from gateway.api.openai.wire import OPENAI
from gateway.api.replies import reply_json
from gateway.errors import NotFoundError
from gateway.queues.batch.base import Job
from gateway.queues.batch.store import BatchStore

DEFAULT_LIMIT, MAX_LIMIT = 50, 200
PREFIXES: Final[Mapping[str, str]] = {OPENAI.name: openai_batches.PREFIX, ANTHROPIC.name: message_batches.PREFIX}
"""Dialect -> what its ids begin with."""

QUERY: Final = {
    one.name: one
    for one in (
        Parameter("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 200, default 50", "Batches of one page."),
        Parameter("after", text(), "id of a batch", "Only those that are older than this one."),
    )
}


class BatchPages:
    """Holds what its handlers need."""

    def __init__(self, batches: BatchStore) -> None:
        self._batches = batches

    def routes(self) -> list[Route]:
        return [
            Route(
                "GET", "/admin/batches", self.show, "Batches of all tenants, newest first.", query=QUERY, key="admin"
            ),
            Route(
                "POST",
                "/admin/batches/{id}/cancel",
                self.cancel,
                "Cancels a batch of any tenant; requests that run are still answered.",
                key="admin",
                changes="batch cancelled",
            ),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """GET /admin/batches"""
        query = read_query(http.query, QUERY)
        after = query.get("after")
        place = None if after is None else _job_id(after)
        if place == "":
            raise invalid("after", "it is no id of a batch")
        jobs, has_more = await self._batches.page(None, None, limit=query.get("limit", DEFAULT_LIMIT), after=place)
        return reply_json({"batches": [_batch(job) for job in jobs], "has_more": has_more})

    async def cancel(self, http: web.Request) -> web.Response:
        """POST /admin/batches/{id}/cancel"""
        name = http.match_info["id"]
        job = await self._batches.cancel(None, None, _job_id(name))
        if job is None:
            raise NotFoundError(f"No batch found with id '{shown(name)}'.", param="id")
        return reply_json(_batch(job))


def _job_id(name: str) -> str:
    """Empty for what is no id of a batch."""
    return next((name[len(prefix) :] for prefix in PREFIXES.values() if name.startswith(prefix)), "")


def _batch(job: Job) -> dict[str, Any]:
    """`errors`: why the whole job failed, or what it waits for; requests that failed are in `counts`."""
    counts = job.counts
    return {
        "id": PREFIXES.get(job.dialect, "") + job.id,
        "tenant": job.tenant,
        "dialect": job.dialect,
        "endpoint": job.endpoint,
        "model": job.model,
        "status": job.state,
        "created_s": job.created_s,
        "expires_s": job.expires_s,
        "ended_s": max(job.reached.values(), default=None) if job.has_ended else None,
        "counts": {
            "total": counts.total,
            "succeeded": counts.succeeded,
            "failed": counts.failed,
            "cancelled": counts.cancelled,
            "expired": counts.expired,
            "processing": counts.processing,
        },
        "prompt_tokens": job.usage.prompt_tokens,
        "cached_tokens": job.usage.cached_tokens,
        "completion_tokens": job.usage.completion_tokens,
        "errors": len(job.errors),
    }
