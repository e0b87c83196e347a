"""Streams of the OpenAI API that tell their usage because the gateway asked for it, and clients that are not told.

Only where the operator allows it for the tenant: the request gets `stream_options.include_usage`, and the one event
that this adds is taken out of the answer. What is left are the upstream's events, each at once when it is whole; a
field `usage` that is null stays in them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import orjson

from gateway.errors import UpstreamLostError
from gateway.types import UpstreamRequest
from gateway.upstreams.events import Events, data_of
from gateway.upstreams.json_edit import find, replaced, root, with_member

_STREAMS: Final = frozenset(("/v1/chat/completions", "/v1/completions"))


def tells_no_usage(request: UpstreamRequest) -> bool:
    """Whether the answer is a stream that tells its usage only when asked."""
    options = request.values.get("stream_options")
    told = isinstance(options, Mapping) and options.get("include_usage") is True
    return request.path in _STREAMS and request.values.get("stream") is True and not told


def asking_for_usage(body: bytes) -> bytes:
    """The body with `include_usage`, and with nothing else changed."""
    if (said := find(body, ("stream_options", "include_usage"))) is not None:
        return replaced(body, said, True)
    if (options := find(body, ("stream_options",))) is None:
        return with_member(body, root(body), "stream_options", {"include_usage": True})
    if body[options.start : options.start + 1] == b"{":
        return with_member(body, options.start, "include_usage", True)
    return replaced(body, options, {"include_usage": True})


async def without_usage(pieces: AsyncGenerator[bytes, None], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The stream without the event that tells the usage. An event of more than `max_bytes` goes on in pieces."""
    events = Events(max_bytes)
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if kept := b"".join([event for event in events.feed(piece) if not _tells_usage(event)]):
                    yield kept
        if rest := events.rest():
            yield rest
    except UpstreamLostError as error:
        error.between_events = True  # what was not whole has not been passed on
        raise


def _tells_usage(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    try:
        chunk: Any = orjson.loads(data_of(event))
    except orjson.JSONDecodeError:
        return False
    return isinstance(chunk, dict) and chunk.get("choices") == [] and chunk.get("usage") is not None
