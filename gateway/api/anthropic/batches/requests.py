"""The body of a new message batch, read while it arrives: bytes in, cut anywhere, and out a row for each request.

Pure, and never more than one request in memory. What is wrong with `params` is found when the request runs, and becomes
its result; everything else is wrong at once.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import Any, Final, NamedTuple

import ijson
import orjson

from gateway.api.fields import (
    Check,
    anything,
    closed_schema,
    empty_array,
    invalid,
    missing,
    shown,
    unknown_parameter,
    wrong_type,
)
from gateway.api.structure import MAX_CONTAINERS, MAX_VALUES
from gateway.errors import BadRequestError, BodyTooLargeError

_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_REQUEST: Final = closed_schema(
    {"custom_id": {"type": "string", "pattern": f"^{_CUSTOM_ID.pattern}$"}, "params": {"type": "object"}},
    "custom_id",
    "params",
)
REQUESTS: Final = Check(anything.function, {"type": "array", "minItems": 1, "items": _REQUEST})
"""What the reader below takes, which is told to clients; it is never a value as a whole."""

_SHORT_ESCAPE: Final = re.compile(rb"\\[^u]", re.DOTALL)
_LONE_HALF: Final = re.compile(
    rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])", re.DOTALL
)
"""Half of a character, escaped without its other half. The parser would write `?` for it."""
_BEGUN: Final = re.compile(rb"\\(?:u[dD][89abAB]..(?:\\(?:u.{0,3})?)?|u.{0,3})?\Z", re.DOTALL)
"""At the end of a piece: an escape that is not whole, or half of a character whose other half may come."""
_LONGEST_BEGUN: Final = len(rb"\ud83d\ude0")

_OUTER: Final = 2
"""Levels around `params`: the array, and the request."""
_VALUES: Final[dict[str, Any]] = {"start_map": {}, "start_array": []}
"""What began, for saying that it is of the wrong type."""


class RequestLimits(NamedTuple):
    """Of the requests of one batch, and of each of them."""

    requests: int
    request_bytes: int
    depth: int


class RequestReader:
    """For one body. Every method raises BadRequestError with the path of what is wrong, and `feed` BodyTooLargeError
    for a request that is too large."""

    def __init__(self, limits: RequestLimits) -> None:
        self.num_requests = 0
        self._limits = limits
        self._seen: set[str] = set()
        self._found: list[Any] = []
        self._begun = False  # the array of requests
        self._since_last = 0  # bytes that came after the last complete request
        self._in_vain = 0  # bytes since the last piece that completed one
        self._loose = b""  # the beginning of an escape
        self._items = ijson.items_coro(ijson.coroutine(self._collect)(), "requests.item", use_float=True)
        self._events = ijson.basic_parse_coro(ijson.coroutine(self._check_events)(), use_float=True)

    def feed(self, data: bytes) -> bytes:
        """Rows of the requests that are complete with these bytes, with their line ends; often none. `data` is not
        empty."""
        self._check_escapes(data)
        self._send(data)
        self._since_last = len(data) if self._found else self._since_last + len(data)
        self._in_vain = 0 if self._found else self._in_vain + len(data)
        if self._since_last > self._limits.request_bytes:
            raise BodyTooLargeError(self._limits.request_bytes)
        rows = b"".join(self._row(item) + b"\n" for item in self._found)
        self._found.clear()
        return rows

    @property
    def least_bytes(self) -> int:
        """That the next piece should have. The parser reads a text that is not complete again with each piece, so that
        pieces of one size would cost the square of its length."""
        return self._in_vain // 4

    def close(self) -> None:
        """The body is complete."""
        if self._loose:
            raise _half()
        try:
            self._events.close()
            self._items.close()
        except ijson.JSONError as error:
            raise _unreadable(error) from None
        if not self._begun:
            raise missing("requests")
        if not self.num_requests:
            raise empty_array("requests")

    def _send(self, data: bytes) -> None:
        try:
            self._events.send(data)  # first: what is nested too deeply takes the other very long
            self._items.send(data)
        except ijson.JSONError as error:
            raise _unreadable(error) from None

    def _check_escapes(self, data: bytes) -> None:
        whole = self._loose + data
        text = _SHORT_ESCAPE.sub(b"..", whole)  # so that each backslash that is left begins an escape
        begun = _BEGUN.search(text, max(0, len(text) - _LONGEST_BEGUN))
        end = begun.start() if begun else len(text)
        if _LONE_HALF.search(text, 0, end):
            raise _half()
        self._loose = whole[end:]

    def _collect(self) -> Generator[None, Any, None]:
        while True:
            self._found.append((yield))

    def _check_events(self) -> Generator[None, tuple[str, Any], None]:
        """That it is an object with `requests`, an array, and nothing else."""
        if (yield)[0] != "start_map":
            raise BadRequestError("The request body must be a JSON object.")
        event, value = yield
        if event == "map_key":
            if value != "requests":
                raise unknown_parameter(value)
            event, value = yield
            if event != "start_array":
                raise wrong_type("requests", "an array", _VALUES.get(event, value))
            self._begun = True
            yield from self._check_depth()
            event, value = yield
            if event == "map_key":
                raise unknown_parameter(value)
        while True:
            yield

    def _check_depth(self) -> Generator[None, tuple[str, Any], None]:
        """Until the end of the array."""
        depth, most, index = 1, self._limits.depth + _OUTER, 0
        containers = events = 0  # of one request
        while depth:
            event, _ = yield
            events += 1
            if containers > MAX_CONTAINERS or events > MAX_VALUES:
                why = f"more than {MAX_CONTAINERS} objects and arrays, or {MAX_VALUES} values and names"
                raise invalid(f"requests[{index}]", why, code="too_many_json_values")
            if event in ("start_map", "start_array"):
                depth += 1
                containers += 1
                if depth > most:
                    why = f"nested deeper than {self._limits.depth} levels"
                    raise invalid(f"requests[{index}]", why)
            elif event in ("end_map", "end_array"):
                depth -= 1
                if depth == 1:
                    index += 1
                    containers = events = 0

    def _row(self, item: Any) -> bytes:
        path = f"requests[{self.num_requests}]"
        self.num_requests += 1
        if self.num_requests > self._limits.requests:
            why = f"there are more than {self._limits.requests} requests (batches.max_requests)"
            raise invalid("requests", why, code="array_above_max_length")
        self._check(item, path)
        try:
            return orjson.dumps(item)
        except orjson.JSONEncodeError:
            raise invalid(path, "a number in it has more than 64 bits") from None

    def _check(self, item: Any, path: str) -> None:
        if type(item) is not dict:
            raise wrong_type(path, "an object", item)
        for name, kind, told in (("custom_id", str, "a string"), ("params", dict, "an object")):
            if name not in item:
                raise missing(f"{path}.{name}")
            if type(item[name]) is not kind:
                raise wrong_type(f"{path}.{name}", told, item[name])
        if unknown := sorted(item.keys() - {"custom_id", "params"}):
            raise unknown_parameter(f"{path}.{unknown[0]}")
        custom_id = item["custom_id"]
        if not _CUSTOM_ID.fullmatch(custom_id):
            why = f"{shown(custom_id)!r} is not 1 to 64 of the characters a-z, A-Z, 0-9, _ and -"
            raise invalid(f"{path}.custom_id", why)
        if custom_id in self._seen:
            raise invalid(f"{path}.custom_id", f"{custom_id!r} is that of a request before it")
        self._seen.add(custom_id)


def _unreadable(error: Exception) -> BadRequestError:
    said = error.args[0] if error.args else ""
    why = (said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)).strip().split("\n")[0]
    return BadRequestError(f"We could not parse the JSON body of your request: {why}.")


def _half() -> BadRequestError:
    return BadRequestError("We could not parse the JSON body of your request: half of a character is escaped in it.")
