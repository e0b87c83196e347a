"""The body of a new message batch, split while it arrives: bytes in, cut anywhere, and out a row for each request.

Never more than one request is in memory. Each is parsed like a body of its own; what is wrong with its `params` is
found when it runs, and becomes its result. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from gateway.api.body import parse_object
from gateway.api.fields import (
    Check,
    an_object,
    anything,
    closed_record,
    invalid,
    made,
    missing,
    shown,
    text,
    unknown_parameter,
)
from gateway.api.structure import MAX_CONTAINERS, MAX_NAMES, MAX_VALUES
from gateway.errors import BadRequestError, BodyTooLargeError

MAX_HEAD_BYTES: Final = 4096
"""Of what is before the first request."""
MAX_MARKS: Final = 2 * (MAX_CONTAINERS + MAX_NAMES + MAX_VALUES)
"""Brackets and quotes of one request: it has more values than any body may have, and is not split to its end."""

_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_HEAD: Final = re.compile(rb'\s*\{\s*"requests"\s*:\s*\[')
_FIRST_NAME: Final = re.compile(rb'[\s,{]*"([^"\\]*)"')
_FIRST: Final = re.compile(rb"\s*([{\]])")
_NEXT: Final = re.compile(rb"\s*(?:,\s*(\{)|(\]))")
_INCOMPLETE: Final = re.compile(rb"\s*,?\s*")
_MARK: Final = re.compile(rb'["{}\[\]]')
_CHARACTERS: Final = re.compile(rb'(?:[^"\\]+|\\.)*', re.DOTALL)  # of a string
_END: Final = re.compile(rb"\s*\}\s*")


def _custom_id(value: str, path: str) -> str:
    if not _CUSTOM_ID.fullmatch(value):
        raise invalid(path, f"{shown(value)!r} is not 1 to 64 of the characters a-z, A-Z, 0-9, _ and -")
    return value


_request: Final = closed_record("custom_id", "params", custom_id=made(text(), _custom_id), params=an_object)
REQUESTS: Final = Check(anything.function, {"type": "array", "minItems": 1, "items": _request.schema})
"""What RequestSplitter takes, for the docs; it is never a value as a whole."""


class RequestSplitter:
    """For one body. Every method raises BadRequestError with the path of what is wrong, and `feed` BodyTooLargeError
    for a request that is too large."""

    def __init__(self, max_requests: int, max_request_bytes: int) -> None:
        self.num_requests = 0
        self._max_requests = max_requests
        self._max_request_bytes = max_request_bytes
        self._custom_ids: set[str] = set()
        self._held = bytearray()  # what is not split yet
        self._at = 0  # how much of it was looked at
        self._depth = -1  # in the array 0, in a request at least 1; before and behind the array -1
        self._in_string = False
        self._num_split = self._num_marks = 0
        self._closed = False

    def feed(self, data: bytes) -> list[bytes]:
        """The requests that are complete with these bytes, not parsed; often none."""
        self._held += data
        if self._depth < 0 and not self._closed:
            self._find_head(whole=False)
        requests: list[bytes] = []
        while self._depth >= 0 and (self._depth or self._find_next()) and self._find_end():
            requests.append(bytes(self._held[: self._at]))
            del self._held[: self._at]
            self._num_split += 1
        if len(self._held) > self._max_request_bytes:
            raise BodyTooLargeError(self._max_request_bytes)
        return requests

    def rows(self, requests: Sequence[bytes]) -> bytes:
        """Rows of requests that `feed` returned, with their line ends. Parses them: takes milliseconds per megabyte."""
        return b"".join(self._row(request) + b"\n" for request in requests)

    def close(self) -> None:
        """The body is complete."""
        if not self._closed:
            if self._depth < 0:
                self._find_head(whole=True)
            raise BadRequestError("We could not parse the JSON body of your request: it is cut short.")
        if not _END.fullmatch(self._held):
            if name := _FIRST_NAME.match(self._held):
                raise unknown_parameter(name[1].decode("utf-8", "replace"))
            raise BadRequestError("We could not parse the JSON body of your request: it does not end with its array.")
        if not self.num_requests:
            raise invalid("requests", "at least one is needed", code="empty_array")

    def _find_head(self, *, whole: bool) -> None:
        """Everything up to the array's bracket. `whole`: the body is complete."""
        if b"[" not in self._held and len(self._held) <= MAX_HEAD_BYTES and not whole:
            return
        if head := _HEAD.match(self._held):
            del self._held[: head.end()]
            self._depth = 0
            return
        name = _FIRST_NAME.match(self._held)
        if not self._held.lstrip().startswith(b"{"):
            raise BadRequestError("The request body must be a JSON object.")
        if name is None:
            raise missing("requests")
        if name[1] != b"requests":
            raise unknown_parameter(name[1].decode("utf-8", "replace"))
        raise invalid("requests", "an array of objects is expected", code="invalid_type")

    def _find_next(self) -> bool:
        """Whether a request begins; the one behind it may not be there yet, or the array may end."""
        found = (_NEXT if self._num_split else _FIRST).match(self._held)
        if found is None:
            if not _INCOMPLETE.fullmatch(self._held):
                raise invalid(f"requests[{self._num_split}]", "an object is expected", code="invalid_type")
            self._held = self._held.strip()
            return False
        begins = found[0].endswith(b"{")
        del self._held[: found.end() - begins]
        self._closed, self._depth = not begins, 0 if begins else -1
        self._at = self._num_marks = 0
        return begins

    def _find_end(self) -> bool:
        """Goes on to the end of the request. Whether it is there."""
        held = self._held
        while self._at < len(held):
            if self._in_string:
                self._at = _CHARACTERS.match(held, self._at).end()  # type: ignore[union-attr]
                if not held.startswith(b'"', self._at):  # cut, perhaps in an escape
                    return False
            mark = _MARK.search(held, self._at)
            if mark is None:
                self._at = len(held)
                return False
            self._at = mark.end()
            self._num_marks += 1
            match mark[0]:
                case b'"':
                    self._in_string = not self._in_string
                case b"{" | b"[":
                    self._depth += 1
                case _:
                    self._depth -= 1
            if self._num_marks > MAX_MARKS:
                raise invalid(f"requests[{self._num_split}]", "it has too many values", code="too_many_json_values")
            if not self._depth:
                return True
        return False

    def _row(self, request: bytes) -> bytes:
        path = f"requests[{self.num_requests}]"
        self.num_requests += 1
        if self.num_requests > self._max_requests:
            why = f"there are more than {self._max_requests} requests (batches.max_requests)"
            raise invalid("requests", why, code="array_above_max_length")
        try:
            item: dict[str, Any] = parse_object(request, self._max_request_bytes)
        except BadRequestError as error:
            raise BadRequestError(error.message, param=path, code=error.code, reason=error.message) from None
        custom_id = _request(item, path)["custom_id"]
        if custom_id in self._custom_ids:
            raise invalid(f"{path}.custom_id", f"{custom_id!r} is that of a request before it")
        self._custom_ids.add(custom_id)
        return request.translate(_ONE_LINE)


_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
"""Line ends are between the values: JSON has none in a string."""
