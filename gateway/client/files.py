"""The files of a user: requests, which are looked at before anything of them is sent, and results."""

from __future__ import annotations

import contextlib
import errno
import os
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
"""Those are the server's to say."""


def check_file(path: Path) -> str:
    """The endpoint that all its lines ask. Raises BatchCommandError for lines that the gateway would refuse it for."""
    with opened(path, "rb") as file:
        if not file.seekable():
            raise BatchCommandError(f"nothing was sent: {path} is no file, and it is read twice", BAD_INPUT)
        skip_mark(file)
        first = next((row for row in file if row.strip()), b"")
        endpoint = _endpoint(first)
        file.seek(0)
        errors = check(file, endpoint, _NO_LIMITS).errors
    if not errors:
        return endpoint
    told = [f"{path}:{one.line}: {one.message}" if one.line else f"{path}: {one.message}" for one in errors]
    more = [f"... and at least {len(told) - SHOWN_ERRORS} lines more"] if len(told) > SHOWN_ERRORS else []
    raise BatchCommandError("\n".join(["nothing was sent", *told[:SHOWN_ERRORS], *more]), BAD_INPUT)


def check_output(path: Path) -> None:
    """Raises BatchCommandError where results could not be written."""
    if path.is_dir():
        raise BatchCommandError(f"{path}: {os.strerror(errno.EISDIR)}", BAD_INPUT)
    if not _is_special(path):
        part = _part_of(path)
        with opened(part, "ab"):
            part.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that is there, whole, once all was written; until then what was there stays. A pipe or a device gets what
    comes when it comes. Raises BatchCommandError."""
    part = path if _is_special(path) else _part_of(path)
    try:
        with opened(part, "wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise BatchCommandError(f"{path}: {error.strerror}") from error
    finally:
        if part != path:
            part.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _part_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


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
