"""Whether a failure of one target of an alias is a reason to try another, and answers of upstreams that are looked at
before they are passed on. router.py tries."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Final

from gateway.api.dialect import SSE
from gateway.api.record import ChosenTarget
from gateway.errors import (
    BadRequestError,
    CheckFailedError,
    ContextLengthError,
    EmbedderError,
    EngineFailedError,
    EngineLostError,
    EnginesDiedError,
    KvasirError,
    ModelNotFoundError,
    NoEngineError,
    OverloadedError,
    QueueFullError,
    RedisDownError,
    UnsupportedError,
    UpstreamLostError,
    UpstreamRefusedError,
    UpstreamsAwayError,
    UpstreamTimeoutError,
)
from gateway.types import UpstreamAnswer

MAX_HELD_BYTES: Final = 64 << 20
"""Of an answer that is held back until it is checked."""

_BUSY: Final = frozenset((429, 503, 529))
_TOO_LONG: Final = re.compile(
    r"context_length_exceeded|context (?:length|window|limit)|prompt is too long|input token count|too many tokens",
    re.IGNORECASE,
)
"""How upstreams say that a prompt is too long."""


def why_another(error: KvasirError, *, checked: bool = False) -> str | None:
    """In a word, why another target is tried; None for what another one would not change. `checked`: the answer was
    only one on approval."""
    match error:
        case CheckFailedError():
            return error.check
        case EnginesDiedError() | RedisDownError() | UpstreamTimeoutError(for_good=True):
            return None
        case ContextLengthError():
            return "context"
        case ModelNotFoundError():
            return "unknown"
        case NoEngineError() | UpstreamsAwayError():
            return "down"
        case QueueFullError() | OverloadedError():
            return "overloaded"
        case UpstreamRefusedError():
            return why_by_status(error.status, f"{error.code} {error.message}")
        case EngineLostError() | EngineFailedError() | UpstreamLostError() | EmbedderError():
            return "failed"
        case UnsupportedError() if checked:
            return "unsupported"
        case BadRequestError(code="wrong_api"):
            return "unsupported"
    return None


def why_by_status(status: int, text: str) -> str | None:
    """The same of an upstream's answer."""
    if status in _BUSY:
        return "overloaded"
    if status == 408 or (status >= 500 and status not in (501, 505)):
        return "failed"
    return "context" if status in (400, 413) and _TOO_LONG.search(text) else None


def context_of(error: KvasirError) -> int:
    """Tokens of the context that was too small; 0 where that is not the reason, or not known."""
    return error.context_tokens if isinstance(error, ContextLengthError) else 0


async def judged(answer: UpstreamAnswer, target: ChosenTarget) -> UpstreamAnswer:
    """An answer that may be passed on. Raises UpstreamRefusedError for an error after which another target is tried,
    CheckFailedError for an answer that does not pass, UpstreamLostError for one that is too long to be checked."""
    if answer.status < 400 and target.check is None:
        return answer
    body = bytearray()
    async for chunk in answer.chunks:
        body += chunk
        if len(body) > MAX_HELD_BYTES:
            raise UpstreamLostError(f"Upstream {answer.upstream} sent an answer that is too long to be checked.")
    if answer.status >= 400:
        text = body[:4096].decode(errors="replace")
        if why_by_status(answer.status, text) is not None:
            message = f"Upstream {answer.upstream} answered HTTP {answer.status}."
            code = "context_length_exceeded" if _TOO_LONG.search(text) and answer.status < 429 else None
            raise UpstreamRefusedError(message, answer.status, code=code, retry_after_s=answer.retry_after_s)
    elif target.check is not None:
        kind = next((value for name, value in answer.headers if name.lower() == "content-type"), "")
        target.check.check_body(bytes(body), is_stream=SSE in kind)
    return replace(answer, chunks=_once(bytes(body)))


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    if body:
        yield body
