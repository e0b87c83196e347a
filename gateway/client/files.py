"""The files of a user: requests, which are checked before anything is sent, and results."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from gateway.api.openai.batches.rows import ENDPOINTS, RowLimits, check, skip_mark
from gateway.client.client import BAD_INPUT, BatchCommandError, opened

SHOWN_ERRORS: Final = 10

_MANY: Final = sys.maxsize - 1
_NO_LIMITS: Final = RowLimits(lines=_MANY, inputs=_MANY, row_bytes=_MANY, depth=512)
"""The limits are the server's."""


def check_file(path: Path) -> str:
    """The endpoint of all its lines. Raises BatchCommandError for lines that the gateway would refuse it for."""
    with opened(path, "rb") as file:
        if not file.seekable():
            raise BatchCommandError(f"nothing was sent: {path} is no file, and it is read twice", BAD_INPUT)
        skip_mark(file)
        endpoint = _endpoint(next((row for row in file if row.strip()), b""))
        file.seek(0)
        errors = check(file, endpoint, _NO_LIMITS).errors
    if not errors:
        return endpoint
    messages = [f"{path}:{one.line}: {one.message}" if one.line else f"{path}: {one.message}" for one in errors]
    more = [f"... and at least {len(messages) - SHOWN_ERRORS} lines more"] if len(messages) > SHOWN_ERRORS else []
    raise BatchCommandError("\n".join(["nothing was sent", *messages[:SHOWN_ERRORS], *more]), BAD_INPUT)


def _endpoint(first: bytes) -> str:
    """Of the first line; any if it names none, which is an error of the check."""
    try:
        url = orjson.loads(first)["url"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ENDPOINTS[0]
    return url if url in ENDPOINTS else ENDPOINTS[0]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that is complete once the block is left; until then the one before stays. A pipe or a device is written
    directly. Raises BatchCommandError."""
    is_special = path.exists() and not path.is_file()
    part = path if is_special else path.with_name(f"{path.name}.part")
    try:
        with opened(part, "wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise BatchCommandError(f"{path}: {error.strerror}") from error
    finally:
        if not is_special:
            part.unlink(missing_ok=True)
