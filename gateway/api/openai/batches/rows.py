"""The rows of a batch's files: what is a request in the input, what is wrong with it, and how its result is written.

Pure: bytes in, row by row, so that a file of any size is checked in bounded memory. What is wrong inside of a body is
found when the line runs, and becomes its result; what is wrong here fails the whole batch.
"""

from __future__ import annotations

import secrets
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import shown
from gateway.api.lines import Answered, Row, RowFormat
from gateway.api.structure import check_structure
from gateway.errors import BadRequestError
from gateway.queues.batch.base import Checked, JobError, Line, Unrun

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ERRORS: Final = 100
"""That are told; a file in the wrong format has one for each row."""
MAX_CUSTOM_ID_CHARS: Final = 512

_FIELDS: Final = frozenset({"custom_id", "method", "url", "body"})
_UNRUN: Final[dict[Unrun, tuple[str, str]]] = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was begun."),
    "expired": ("batch_expired", "The batch expired before this request was begun."),
    "failed": ("server_error", "The server could not run this request."),
}


class RowLimits(NamedTuple):
    """Of one batch, and of one row."""

    lines: int
    inputs: int  # of all lines, for vectors
    row_bytes: int
    depth: int


def row_format(limits: RowLimits) -> RowFormat:
    return RowFormat(
        check=lambda job, rows: check(rows, job.endpoint, limits),
        request=lambda job, row: (job.endpoint, row["body"]),
        answered=answered,
        unrun=unrun,
    )


def answered(row: Row, request_id: str, came: Answered) -> bytes:
    """A request that ran, whatever became of it."""
    response = {"status_code": came.status, "request_id": request_id, "body": orjson.Fragment(came.body)}
    return _result(row, request_id, {"response": response, "error": None})


def unrun(row: Row, why: Unrun) -> bytes:
    """A request that never ran."""
    code, message = _UNRUN[why]
    return _result(row, secrets.token_hex(16), {"response": None, "error": {"code": code, "message": message}})


def _result(row: Row, request_id: str, why: dict[str, Any]) -> bytes:
    result_id = f"batch_req_{request_id.removeprefix('req_')}"
    return orjson.dumps({"id": result_id, "custom_id": row.get("custom_id"), **why})


class _Seen(NamedTuple):
    """Of the rows before."""

    first_of: dict[str, int]  # custom_id -> number
    models: list[str]  # the one that is asked, once there was a line


def check(rows: BinaryIO, endpoint: str, limits: RowLimits) -> Checked:
    """`rows` are those of the file, from its beginning, of which none is read that is longer than one may be."""
    lines: list[Line] = []
    errors: list[JobError] = []
    seen = _Seen({}, [])
    offset, inputs = skip_mark(rows), 0
    for number, row in enumerate(iter(lambda: rows.readline(limits.row_bytes + 1), b""), 1):
        if row.strip():
            found = _read(row, number, endpoint, limits, seen)
            if isinstance(found, JobError):
                errors.append(found)
            else:
                seen.first_of[found["custom_id"]] = number
                seen.models[:] = [found["body"]["model"]]
                inputs += _num_inputs(found["body"]) if endpoint == "/v1/embeddings" else 0
                lines.append(Line(offset, len(row)))
        offset += len(row)
        if len(errors) >= MAX_ERRORS or len(row) > limits.row_bytes:
            break
        if (error := _beyond(len(lines), inputs, limits)) is not None:
            errors.append(error)
            break
    if not lines and not errors:
        errors.append(JobError("empty_file", "The input file has no requests."))
    return Checked(lines, errors, seen.models[0] if seen.models else None)


def skip_mark(rows: BinaryIO) -> int:
    """Goes from the beginning to the first row, behind the mark with which some programs begin a text in UTF-8. Where
    that is comes back."""
    begins_with_mark = rows.read(len(BOM_UTF8)) == BOM_UTF8
    return rows.seek(len(BOM_UTF8) if begins_with_mark else 0)


def _beyond(num_lines: int, num_inputs: int, limits: RowLimits) -> JobError | None:
    if num_lines > limits.lines:
        return JobError("too_many_tasks", f"There are more than {limits.lines} requests (batches.max_lines).")
    if num_inputs > limits.inputs:
        why = f"There are more than {limits.inputs} texts to embed in all requests."
        return JobError("too_many_inputs", why)
    return None


def _read(row: bytes, number: int, endpoint: str, limits: RowLimits, seen: _Seen) -> Row | JobError:
    """The row, or the first thing that is wrong with it."""
    if len(row) > limits.row_bytes:
        why = f"This line has more than {limits.row_bytes} bytes (server.max_body_bytes)."
        return JobError("line_too_long", why, None, number)
    try:
        check_structure(row, "This line")
        value = orjson.loads(row)
    except BadRequestError as error:
        return JobError("too_many_json_values", error.message, None, number)
    except orjson.JSONDecodeError as error:
        return JobError("invalid_json_line", f"This line is not parseable as valid JSON: {error.msg}.", None, number)
    if type(value) is not dict or deeper_than(value, limits.depth):
        return JobError("invalid_json_line", "This line is no JSON object, or is nested too deeply.", None, number)
    for code, message, param in _wrong(value, endpoint, seen):
        return JobError(code, message, param, number)
    return value


def _wrong(value: Row, endpoint: str, seen: _Seen) -> Iterator[tuple[str, str, str]]:
    """Code, message and field of everything that is wrong; what comes later takes what came before to be right."""
    custom_id, body = value.get("custom_id"), value.get("body")
    if custom_id is None:
        yield "missing_required_parameter", "Missing required parameter: 'custom_id'.", "custom_id"
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        why = f"'custom_id' has to be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        yield "invalid_custom_id", why, "custom_id"
    if custom_id in seen.first_of:
        why = f"The custom_id '{shown(custom_id)}' is that of line {seen.first_of[custom_id]}, too."
        yield "duplicate_custom_id", why, "custom_id"
    if value.get("method") != "POST":
        yield "invalid_method", "'method' has to be POST.", "method"
    if value.get("url") != endpoint:
        yield "mismatched_url", f"'url' has to be the endpoint of the batch, {endpoint}.", "url"
    if type(body) is not dict:
        yield "invalid_request_body", "'body' has to be an object.", "body"
        return
    if body.get("stream"):
        yield "unsupported_parameter", "A batch does not stream.", "body.stream"
    if type(body.get("model")) is not str:
        yield "missing_required_parameter", "Missing required parameter: 'body.model'.", "body.model"
    if seen.models and body["model"] != seen.models[0]:
        why = f"One batch asks one model: '{shown(seen.models[0])}' before, '{shown(body['model'])}' here."
        yield "mismatched_model", why, "body.model"
    if unknown := sorted(value.keys() - _FIELDS):
        yield "unknown_parameter", f"Unknown parameter: '{shown(unknown[0])}'.", shown(unknown[0])


def _num_inputs(body: dict[str, Any]) -> int:
    """Texts that it wants vectors of. An array of numbers is one text."""
    given = body.get("input")
    return len(given) if type(given) is list and given and type(given[0]) is not int else 1
