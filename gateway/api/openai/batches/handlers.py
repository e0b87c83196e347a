"""/v1/batches of the OpenAI API. Requests are checked here, the batch queue stores the jobs and runs them, and rows.py
reads and writes their files.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from gateway.api.batches import BatchRoutes
from gateway.api.dialect import Route
from gateway.api.fields import (
    choice,
    in_url,
    integer,
    invalid,
    made,
    read,
    read_query,
    record,
    shown,
    string_map,
    table,
    text,
    used,
)
from gateway.api.openai.batches.rows import ENDPOINTS
from gateway.api.openai.files import LONGEST_S, SHORTEST_S
from gateway.api.openai.files import PREFIX as FILE_PREFIX
from gateway.api.openai.wire import OPENAI
from gateway.api.record import BODY, RECORD, TENANT
from gateway.api.replies import reply_json
from gateway.api.tenants import Namespaces
from gateway.api.uploads import find_file
from gateway.errors import NotFoundError
from gateway.files.store import FileStore
from gateway.queues.batch.base import Job, State
from gateway.queues.batch.store import BatchStore

PREFIX: Final = "batch_"
WINDOW: Final = "24h"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
FILE_PURPOSE: Final = "batch"

_REACHED: Final[tuple[State, ...]] = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)
"""States of which a batch says when it reached them."""

_expires_after: Final = made(
    record(*("anchor", "seconds"), anchor=choice("created_at"), seconds=integer(SHORTEST_S, LONGEST_S)),
    lambda given, _: float(given["seconds"]),
)
CREATE: Final = table(
    used("input_file_id", text(), "id of a file", "The requests: a file with the purpose `batch`."),
    used("endpoint", choice(*ENDPOINTS), "", "What all requests of the file ask; their `url` is the same."),
    used(
        "completion_window",
        choice(WINDOW),
        f"`{WINDOW}`",
        "Requests that have not begun within `batches.window_s` expire.",
    ),
    used(
        "metadata",
        string_map(16, 64, 512),
        "up to 16 pairs, key up to 64, value up to 512 characters",
        "Returned with the batch.",
    ),
    used(
        "output_expires_after",
        _expires_after,
        f"object: `anchor` `created_at`, `seconds` {SHORTEST_S} to {LONGEST_S}",
        "For how long its output and error file are kept; without it `files.batch_ttl_s`.",
    ),
)
REQUIRED: Final = ("input_file_id", "endpoint", "completion_window")
LIST: Final = table(
    used("after", text(), "id of a batch", "Only those that are older than this one."),
    used("limit", in_url(integer(1, MAX_LIMIT)), f", default {DEFAULT_LIMIT}", "Batches at most."),
)


class OpenAIBatches:
    """Holds what its handlers need."""

    def __init__(self, namespaces: Namespaces, files: FileStore, batches: BatchStore) -> None:
        self._namespaces, self._files, self._batches = namespaces, files, batches
        self._routes = BatchRoutes(batches, OPENAI.name, PREFIX, job_json, _not_found)

    def routes(self) -> list[Route]:
        one = "/v1/batches/{batch_id}"
        return [
            Route(
                "POST",
                "/v1/batches",
                self.create,
                "Creates a batch from a file of requests.",
                CREATE,
                REQUIRED,
                example={"input_file_id": "file-0", "endpoint": ENDPOINTS[0], "completion_window": WINDOW},
            ),
            Route("GET", "/v1/batches", self.list_batches, "The batches, newest first.", query=LIST),
            Route("GET", one, self._routes.get, "State of a batch."),
            Route("POST", f"{one}/cancel", self._routes.cancel, "Cancels a batch."),
        ]

    async def create(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/batches"""
        tenant = http[TENANT]
        self._namespaces.scope(http[RECORD].namespace, tenant)  # one that it may use
        body = http[BODY]
        values = read(body, CREATE, REQUIRED)
        stored = await find_file(self._files, tenant, values["input_file_id"], "input_file_id")
        if stored.purpose != FILE_PURPOSE:
            raise invalid(
                "input_file_id", f"the file has the purpose '{stored.purpose}', and has to have '{FILE_PURPOSE}'"
            )
        draft = Job(
            id="",
            tenant=tenant.name,
            dialect=OPENAI.name,
            endpoint=values["endpoint"],
            namespace=http[RECORD].namespace or None,
            key=http[RECORD].key,
            metadata=values.get("metadata", {}),
            in_files=True,
            output_ttl_s=values.get("output_expires_after"),
        )
        return reply_json(job_json(await self._batches.create(draft, stored.id)))

    async def list_batches(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/batches"""
        values = read_query(http.query, LIST)
        after = values.get("after")
        if after is not None and not after.startswith(PREFIX):
            raise _not_found(after, "after")
        place = None if after is None else self._routes.job_id(after)
        return reply_json(
            {"object": "list", **await self._routes.page(http, values.get("limit", DEFAULT_LIMIT), place)}
        )


def job_json(job: Job) -> dict[str, Any]:
    """The batch object."""
    errors = [one._asdict() for one in job.errors]
    usage = job.usage
    return {
        "id": PREFIX + job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": _file_id(job.input_file_id),
        "completion_window": WINDOW,
        "status": job.state,
        "output_file_id": _file_id(job.output_file_id),
        "error_file_id": _file_id(job.error_file_id),
        "created_at": int(job.created_s),
        "expires_at": int(job.expires_s),
        **{f"{state}_at": int(job.reached[state]) if state in job.reached else None for state in _REACHED},
        "request_counts": {"total": job.counts.total, "completed": job.counts.succeeded, "failed": job.counts.failed},
        "metadata": dict(job.metadata) or None,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.total_tokens,
        },
    }


def _file_id(file_id: str | None) -> str | None:
    return None if file_id is None else FILE_PREFIX + file_id


def _not_found(batch_id: str, param: str = "batch_id") -> NotFoundError:
    return NotFoundError(f"No batch found with id '{shown(batch_id)}'.", param=param)
