"""The rows of a batch's files: what is a request in the input, what is wrong with it, and how its result is written.

Pure: bytes in, row by row, so that a file of any size is checked in bounded memory. What is wrong inside of a body is
found when the line runs, and becomes its result; what is wrong here fails the whole batch.
"""

from __future__ import annotations

import secrets
from codecs import BOM_UTF8
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from gateway.api.body import deeper_than
from gateway.api.fields import missing, shown, unknown_parameter
from gateway.api.lines import Answered, Row, RowFormat
from gateway.api.structure import check_structure
from gateway.errors import BadRequestError
from gateway.queues.batch.base import Checked, JobError, Line, Unrun

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_ERRORS: Final = 100
"""Reported at most; a file in the wrong format has one for each row."""
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


def answered(row: Row, request_id: str, result: Answered) -> bytes:
    """A request that ran, whatever became of it."""
    response = {"status_code": result.status, "request_id": request_id, "body": orjson.Fragment(result.body)}
    return _result(row, request_id, {"response": response, "error": None})


def unrun(row: Row, why: Unrun) -> bytes:
    """A request that never ran."""
    code, message = _UNRUN[why]
    return _result(row, secrets.token_hex(16), {"response": None, "error": {"code": code, "message": message}})


def _result(row: Row, request_id: str, why: dict[str, Any]) -> bytes:
    result_id = f"batch_req_{request_id.removeprefix('req_')}"
    return orjson.dumps({"id": result_id, "custom_id": row.get("custom_id"), **why})


def check(rows: BinaryIO, endpoint: str, limits: RowLimits) -> Checked:
    """`rows` are those of the file, from its beginning, of which none is read that is longer than one may be."""
    lines: list[Line] = []
    errors: list[JobError] = []
    first_of: dict[str, int] = {}  # custom_id -> number of its row
    model: str | None = None
    offset, inputs = skip_mark(rows), 0
    for number, row in enumerate(iter(lambda: rows.readline(limits.row_bytes + 1), b""), 1):
        try:
            if row.strip():
                value = _loaded(row, limits)
                _check(value, endpoint, first_of, number)
                body = value["body"]
                if model not in (None, body["model"]):
                    why = f"One batch asks one model: '{shown(str(model))}' before, '{shown(body['model'])}' here."
                    raise _wrong("mismatched_model", why, "body.model")
                model = body["model"]
                inputs += _num_inputs(body) if endpoint == "/v1/embeddings" else 0
                lines.append(Line(offset, len(row)))
        except BadRequestError as error:
            errors.append(JobError(error.code or "", error.message, error.param, number))
        offset += len(row)
        if len(errors) >= MAX_ERRORS or len(row) > limits.row_bytes:
            break
        if (error_of_all := _beyond(len(lines), inputs, limits)) is not None:
            errors.append(error_of_all)
            break
    if not lines and not errors:
        errors.append(JobError("empty_file", "The input file has no requests."))
    return Checked(lines, errors, model)


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


def _loaded(row: bytes, limits: RowLimits) -> Row:
    """Raises BadRequestError for what is no JSON object within the limits."""
    if len(row) > limits.row_bytes:
        raise _wrong("line_too_long", f"This line has more than {limits.row_bytes} bytes (server.max_body_bytes).")
    check_structure(row, "This line")
    try:
        value = orjson.loads(row)
    except orjson.JSONDecodeError as error:
        raise _wrong("invalid_json_line", f"This line is not parseable as valid JSON: {error.msg}.") from None
    if type(value) is not dict or deeper_than(value, limits.depth):
        raise _wrong("invalid_json_line", "This line is no JSON object, or is nested too deeply.")
    return value


def _check(value: Row, endpoint: str, first_of: dict[str, int], number: int) -> None:
    """Raises BadRequestError for the first thing that is wrong with a row."""
    custom_id, body = value.get("custom_id"), value.get("body")
    if custom_id is None:
        raise missing("custom_id")
    if type(custom_id) is not str or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        why = f"'custom_id' has to be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise _wrong("invalid_custom_id", why, "custom_id")
    if (first := first_of.setdefault(custom_id, number)) != number:
        why = f"The custom_id '{shown(custom_id)}' is that of line {first}, too."
        raise _wrong("duplicate_custom_id", why, "custom_id")
    if value.get("method") != "POST":
        raise _wrong("invalid_method", "'method' has to be POST.", "method")
    if value.get("url") != endpoint:
        raise _wrong("mismatched_url", f"'url' has to be the endpoint of the batch, {endpoint}.", "url")
    if type(body) is not dict:
        raise _wrong("invalid_request_body", "'body' has to be an object.", "body")
    if body.get("stream"):
        raise _wrong("unsupported_parameter", "A batch does not stream.", "body.stream")
    if type(body.get("model")) is not str:
        raise missing("body.model")
    if unknown := sorted(value.keys() - _FIELDS):
        raise unknown_parameter(unknown[0])


def _wrong(code: str, message: str, param: str | None = None) -> BadRequestError:
    return BadRequestError(message, param=param, code=code)


def _num_inputs(body: dict[str, Any]) -> int:
    """Texts that it wants vectors of. An array of numbers is one text."""
    given = body.get("input")
    return len(given) if type(given) is list and given and type(given[0]) is not int else 1
