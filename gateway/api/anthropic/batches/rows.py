"""The rows of a message batch: its requests, which were checked when they came, and how their results are written."""

from __future__ import annotations

from typing import Any, BinaryIO, Final

import orjson

from gateway.api.anthropic.handlers import endpoint_name
from gateway.api.anthropic.wire import error_json
from gateway.api.batches import Row, RowFormat
from gateway.api.lines import OK, Answered
from gateway.api.upstream_lines import Headers
from gateway.errors import KvasirError
from gateway.queues.batch.base import Checked, Job, Line, Unrun

_UNRUN: Final[dict[Unrun, dict[str, Any]]] = {
    "cancelled": {"type": "canceled"},
    "expired": {"type": "expired"},
    "failed": {"type": "errored", "error": error_json(KvasirError("The server could not run this request."), "")},
}


def check(job: Job, rows: BinaryIO) -> Checked:
    """Where they are: nothing can be wrong with them."""
    lines: list[Line] = []
    offset = 0
    for row in rows:
        lines.append(Line(offset, len(row)))
        offset += len(row)
    return Checked(lines, [])


def request(job: Job, row: Row) -> tuple[str, dict[str, Any]]:
    """As it was asked for in the version that the batch was made with."""
    return endpoint_name(job.metadata["version"]), row["params"]


def answered(row: Row, request_id: str, came: Answered) -> bytes:
    """A request that ran, whatever became of it."""
    body = orjson.Fragment(came.body)
    result = {"type": "succeeded", "message": body} if came.status == OK else {"type": "errored", "error": body}
    return orjson.dumps({"custom_id": row["custom_id"], "result": result})


def unrun(row: Row, why: Unrun) -> bytes:
    """A request that never ran."""
    return orjson.dumps({"custom_id": row.get("custom_id", ""), "result": _UNRUN[why]})


def headers(job: Job) -> Headers:
    """That a client would send with each of them."""
    betas: str = job.metadata.get("betas", "")
    return (("anthropic-beta", betas),) if betas else ()


ROWS: Final = RowFormat(check, request, answered, unrun, headers)
