"""Lines of batches for models that an upstream serves. They go the way of requests that pass through, in the batch
lane: a body in, the whole answer out, as the upstream wrote it. lines.py asks here; the neighbour is passthrough.py.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from gateway.api.passed_on import reuse_of
from gateway.api.passthrough import Passthrough, Upstreams
from gateway.api.record import Record
from gateway.errors import DeadlineError, UpstreamLostError
from gateway.tasks import off_loop
from gateway.types import Tenant, UpstreamAnswer, UpstreamRequest

Headers = tuple[tuple[str, str], ...]

_NEWLINES: Final = bytes.maketrans(b"\r\n", b"  ")
_GZIP_OR_ZLIB: Final = 32 + zlib.MAX_WBITS


class Target(NamedTuple):
    """Where lines of an endpoint go: the path of a client's URL, and the headers that a client would send."""

    path: str
    headers: Headers = ()


class UpstreamReply(NamedTuple):
    """What an upstream answered: one row of JSON."""

    status: int
    body: bytes
    retry_after_s: float | None


class UpstreamLines:
    """Asks upstreams for lines. `timeout_s` is all that a line may take, waiting for its place included."""

    def __init__(
        self, passthrough: Passthrough, upstreams: Upstreams, *, timeout_s: float, max_answer_bytes: int
    ) -> None:
        self._passthrough = passthrough
        self._upstreams = upstreams
        self._timeout_s = timeout_s
        self._max_answer_bytes = max_answer_bytes

    def serves(self, body: Mapping[str, Any], tenant: Tenant) -> bool:
        """Whether a line goes to an upstream."""
        model = body.get("model")
        return type(model) is str and self._passthrough.serves(model, tenant)

    async def answer(self, record: Record, tenant: Tenant, body: dict[str, Any], target: Target) -> UpstreamReply:
        """Whole. Raises KvasirError when no upstream answered, or none with JSON."""
        written = await off_loop(record.work, lambda: orjson.dumps(body))
        request = UpstreamRequest(
            request_id=record.request_id,
            tenant=tenant,
            dialect=record.dialect.name,
            model=body["model"],
            path=target.path,
            query="",
            headers=target.headers,
            body=written,
            values=body,
            received_s=record.received_s,
            deadline_s=record.received_s + self._timeout_s,
            reuse=reuse_of(body),
            lane="batch",
            scope=self._passthrough.scope(record, tenant),
            made=self._passthrough.upstream_objects.recorder_for(target.path, body, tenant.name),
            maker=self._passthrough.upstream_objects.maker(tenant.name),
            work=record.work,
        )
        record.traces = [request.trace]
        request.trace.by_upstream = True  # also where its cached answer is given again: it is paid as upstreams are
        try:
            async with asyncio.timeout(self._timeout_s), self._upstreams.answer(request) as answer:
                record.model = answer.label
                return UpstreamReply(answer.status, await self._read(answer), answer.retry_after_s)
        except TimeoutError:
            raise DeadlineError("The answer took longer than a line may (batches.line_timeout_s).") from None

    async def _read(self, answer: UpstreamAnswer) -> bytes:
        whole = bytearray()
        async for chunk in answer.pieces:
            whole += chunk
            if len(whole) > self._max_answer_bytes:
                raise _unreadable(answer, f"more than {self._max_answer_bytes} bytes")
        body = bytes(whole)
        if _encoding(answer) in ("gzip", "x-gzip", "deflate"):
            body = _inflated(body, self._max_answer_bytes)
        row = await off_loop(len(body), lambda: one_row(body))
        if row is None:
            raise _unreadable(answer, "what is no JSON")
        return row


def one_row(body: bytes) -> bytes | None:
    """JSON as it was written, but on one line: line ends stand between its tokens alone. None for what is no JSON."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return body.translate(_NEWLINES).strip()


def _unreadable(answer: UpstreamAnswer, why: str) -> UpstreamLostError:
    """A status that says that the request is wrong is told; others are a failure of the upstream."""
    error = UpstreamLostError(f"Upstream {answer.upstream} answered with status {answer.status} and {why}.")
    if 400 <= answer.status < 500:
        error.status = answer.status
    return error


def _encoding(answer: UpstreamAnswer) -> str:
    return next((value.strip().lower() for name, value in answer.headers if name.lower() == "content-encoding"), "")


def _inflated(body: bytes, max_bytes: int) -> bytes:
    """Empty for what cannot be read, and cut to `max_bytes`."""
    try:
        return zlib.decompressobj(_GZIP_OR_ZLIB).decompress(body, max_bytes)
    except zlib.error:
        return b""
