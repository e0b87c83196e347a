"""Looks at a file of requests before anything of it is sent: what the gateway would refuse all of it for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import orjson

from gateway.api.openai.batches.rows import ENDPOINTS, RowLimits, check, skip_mark
from gateway.batch_cli.errors import BAD_INPUT, BatchCommandError, opened

TOLD_ERRORS: Final = 10

_MANY: Final = sys.maxsize - 1
_NO_LIMITS: Final = RowLimits(lines=_MANY, inputs=_MANY, row_bytes=_MANY, depth=512)
"""Those are the server's to say."""


def check_file(path: Path) -> str:
    """The endpoint that all its lines ask. Raises BatchCommandError for lines that the gateway would refuse it for."""
    with opened(path, "rb") as file:
        skip_mark(file)
        first = next((row for row in file if row.strip()), b"")
        endpoint = _endpoint(first)
        file.seek(0)
        errors = check(file, endpoint, _NO_LIMITS).errors
    if not errors:
        return endpoint
    told = [f"{path}:{one.line}: {one.message}" if one.line else f"{path}: {one.message}" for one in errors]
    more = [f"... and at least {len(told) - TOLD_ERRORS} lines more"] if len(told) > TOLD_ERRORS else []
    raise BatchCommandError("\n".join(["nothing was sent", *told[:TOLD_ERRORS], *more]), BAD_INPUT)


def _endpoint(first: bytes) -> str:
    """Of the first line. What is wrong with it otherwise, is found with the others."""
    try:
        value = orjson.loads(first)
    except orjson.JSONDecodeError:
        return ENDPOINTS[0]
    url = value.get("url") if type(value) is dict else None
    if type(value) is dict and url is None and "model" in value:
        raise BatchCommandError(
            "nothing was sent: the first line is the body of a request alone; each line has to be an object with "
            f"custom_id, method, url ({', '.join(ENDPOINTS)}) and body",
            BAD_INPUT,
        )
    if url is not None and url not in ENDPOINTS:
        raise BatchCommandError(
            f"nothing was sent: the url of the first line is none of {', '.join(ENDPOINTS)}", BAD_INPUT
        )
    return ENDPOINTS[0] if url is None else str(url)
