"""What can go wrong on the way of a request, with HTTP status and retry rule. No wire format here: each dialect in
api/ writes these in its own shape.

    KvasirError                    500  server_error            retry: yes
    +-- BadRequestError            400  invalid_request_error   retry: no, the request itself is wrong
    |   +-- ContextLengthError     400  context_length_exceeded
    |   +-- UnsupportedError       400  unsupported_parameter   what Kvasir does not do, never ignored
    +-- UnauthorizedError          401  invalid_api_key         retry: no
    +-- ForbiddenError             403                          retry: no
    +-- NotFoundError              404                          retry: no
    |   +-- ModelNotFoundError     404  model_not_found
    +-- MethodNotAllowedError      405  (Allow)                 retry: no
    +-- ConflictError              409  conflict                retry: no, something is there already, or not yet
    +-- BodyTooLargeError          413                          retry: no
    +-- FileTooLargeError          413                          retry: no
    +-- QueueFullError             429  rate_limit_exceeded     retry: after retry_after_s
    +-- RateLimitError             429  rate_limit_exceeded     retry: after retry_after_s; no, where it is None
    |   +-- BudgetError            429  budget_exceeded         retry: after retry_after_s
    +-- QuotaError                 429  quota_exceeded          retry: no, something has to be deleted, or to end
    +-- OverloadedError            503  server_is_overloaded    retry: after retry_after_s; no engine took it
    |   +-- NoEngineError          503                          the model is known, none of its engines can be reached
    |   +-- DeadlineError          503                          waited longer than the client's or our limit
    |   +-- RedisDownError         503                          what is requested is in Redis, which does not answer
    |   +-- UpstreamsAwayError     503                          all upstreams of the model: breaker open, or busy
    +-- EngineLostError            502                          after the first byte; before it the pipeline tries again
    +-- UpstreamLostError          502  upstream_failed         no upstream answered, or one stopped in its answer
    +-- CheckFailedError           502  an alias's check (`cascade`); another target is tried
    +-- UpstreamTimeoutError       504  upstream_timeout        retry: the upstream was too slow
    +-- EngineFailedError          500                          the engine refused or failed this sequence
    |   +-- EnginesDiedError       500                          retry: no, two engines died while they worked on it
    +-- NativeError                500                          a native library panicked on this request
    +-- StorageError               500                          the disk does not do what it should
    |   +-- StorageFullError       507  storage_full            retry: no, the disk is full
    +-- NotCachedError             504  not_cached              retry: no, only-if-cached (RFC 9111, 5.2.1.7)
    +-- EmbedderError              500                          the embedding model failed these texts
"""

from __future__ import annotations

import math
from typing import Final, Self

MAX_DEAD_ENGINES: Final = 2
"""Engines that may die while they work on one request: the first may be chance, and a third would help no request."""


class KvasirError(Exception):
    """Base of all errors for clients. `message` is written for the client.

    `reason` is what `message` says without naming `param`, for dialects that write the two side by side.
    """

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.reason = reason
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class BadRequestError(KvasirError):
    """`param` is the path of the wrong field, as in `messages[0].role`."""

    status = 400
    type = "invalid_request_error"


class ContextLengthError(BadRequestError):
    code = "context_length_exceeded"
    context_tokens = 0
    prompt_tokens = 0

    def __init__(self, context_tokens: int, prompt_tokens: int, requested_tokens: int, *, param: str) -> None:
        self.context_tokens = context_tokens
        self.prompt_tokens = prompt_tokens
        asked = (
            f"you requested {prompt_tokens + requested_tokens} tokens ({prompt_tokens} in the {param}, "
            f"{requested_tokens} in the completion)"
            if requested_tokens
            else f"your {param} resulted in {prompt_tokens} tokens"
        )
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, {asked}. "
            f"Please reduce the length of the {param}{' or completion' if requested_tokens else ''}.",
            param=param,
        )


class UnsupportedError(BadRequestError):
    code = "unsupported_parameter"


class UnauthorizedError(KvasirError):
    status = 401
    type = "invalid_request_error"
    code: str | None = "invalid_api_key"
    challenge = ""  # WWW-Authenticate, where a browser may ask for the key


class ForbiddenError(KvasirError):
    status = 403
    type = "invalid_request_error"


class NotFoundError(KvasirError):
    status = 404
    type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"

    def __init__(self, model: str) -> None:
        message = f"The model `{model}` does not exist or you do not have access to it."
        super().__init__(message, param="model", reason=model)


class MethodNotAllowedError(KvasirError):
    status = 405
    type = "invalid_request_error"


class ConflictError(KvasirError):
    """What is requested does not fit what there is."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class BodyTooLargeError(KvasirError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int, *, code: str | None = None, setting: str = "server.max_body_bytes") -> None:
        super().__init__(f"The request body is larger than the limit of {limit_bytes} bytes ({setting}).", code=code)


class TextTooLargeError(KvasirError):
    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"One text of the request body takes more than {limit_bytes} bytes of memory (twice server.max_body_bytes; "
            "four for each character of a text with an emoji)."
        )


class FileTooLargeError(KvasirError):
    """`setting` is the one that says how large it may be."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int, setting: str) -> None:
        super().__init__(f"The file is larger than the limit of {limit_bytes} bytes ({setting}).", param="file")


class QueueFullError(KvasirError):
    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    @classmethod
    def of(cls, waiting: int, setting: str, retry_after_s: float) -> Self:
        """So many wait, as many as this setting allows."""
        return cls(
            f"Too many requests are waiting ({waiting}, the limit of {setting}). "
            f"Please try again in {math.ceil(retry_after_s)}s.",
            retry_after_s=retry_after_s,
        )


class RateLimitError(KvasirError):
    """The tenant has sent as much as it may for now; without `retry_after_s`, the request is more than it ever may.
    `limit` names which limit it is, and `type` says whether it is one of tokens."""

    status = 429
    type = "tokens"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, limit: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit
        if "tokens" not in limit:
            self.type = "requests"


class BudgetError(RateLimitError):
    """The tenant's money for the day or the month is spent."""

    code = "budget_exceeded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, "budget", retry_after_s=retry_after_s)


class QuotaError(KvasirError):
    status = 429
    type = "requests"
    code = "quota_exceeded"


class OverloadedError(KvasirError):
    status = 503
    type = "server_error"
    code = "server_is_overloaded"


class NoEngineError(OverloadedError):
    def __init__(self, model: str, retry_after_s: float) -> None:
        super().__init__(f"No engine that serves `{model}` is reachable at the moment.", retry_after_s=retry_after_s)


class DeadlineError(OverloadedError):
    @classmethod
    def without_slot(cls, retry_after_s: float) -> Self:
        return cls(
            "The server is busy: no slot became free in time (queue.max_wait_s or the request's own limit).",
            retry_after_s=retry_after_s,
        )


class RedisDownError(OverloadedError):
    """Redis is unreachable or refused a command. Most callers go on without it; others have a 503.

    why    for the log: what Redis or its client said
    asked  False: nothing was changed: the command was not sent, or could not be carried out
    """

    def __init__(self, why: str, *, asked: bool = True, retry_after_s: float = 1.0) -> None:
        super().__init__("Redis, where this is kept, cannot be reached at the moment.", retry_after_s=retry_after_s)
        self.why = why
        self.asked = asked


class EngineLostError(KvasirError):
    """The engine cannot go on with the request.

    died  its connection ended without notice while it worked on the request, which may be why
    """

    status = 502
    died = False


class UpstreamsAwayError(OverloadedError):
    def __init__(self, model: str, retry_after_s: float) -> None:
        super().__init__(f"No upstream that serves `{model}` can be asked at the moment.", retry_after_s=retry_after_s)


class UpstreamLostError(KvasirError):
    """An upstream could not be reached, or ended in the middle of its answer.

    between_events  whether the part of the stream that arrived ends with a whole event
    begun           whether an upstream may have begun to work on the request
    """

    status = 502
    code = "upstream_failed"
    between_events = False
    begun = True


class UpstreamTimeoutError(UpstreamLostError):
    """An upstream took too long to begin, or to go on.

    for_good  all the time that an answer may take was spent on it, and would be again
    """

    status = 504
    code = "upstream_timeout"
    for_good = False


class UpstreamRefusedError(KvasirError):
    """What an upstream of another API answered in place of an answer. `status` is its own, or the nearest that clients
    know (upstreams/translation/refusals.py)."""

    def __init__(
        self, message: str, status: int, *, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        usual = {404: "model_not_found", 429: "rate_limit_exceeded", 503: "server_is_overloaded"}
        super().__init__(message, code=code or usual.get(status), retry_after_s=retry_after_s)
        self.status = status
        self.type = "requests" if status == 429 else "invalid_request_error" if status < 500 else "server_error"


class CheckFailedError(KvasirError):
    """An answer that did not pass a check of its alias; `check` names it. Another target always follows."""

    status = 502
    code = "check_failed"

    def __init__(self, check: str) -> None:
        super().__init__(f"The answer did not pass the check `{check}`.")
        self.check = check


class EngineFailedError(KvasirError):
    """The engine is alive and cannot do this one."""


class EnginesDiedError(EngineFailedError):
    def __init__(self) -> None:
        super().__init__(f"{MAX_DEAD_ENGINES} engines ended while they worked on this request; it is not tried again.")


class NativeError(KvasirError):
    """A native library panicked. The same request would make it panic again; others are not concerned."""


class StorageError(KvasirError):
    """A file could not be written or read."""


class StorageFullError(StorageError):
    """The disk is full; nothing of the file was stored."""

    status = 507
    code = "storage_full"


class NotCachedError(KvasirError):
    status = 504
    code = "not_cached"


class EmbedderError(KvasirError):
    """The embedding model cannot be loaded, or failed a batch. A cache goes on without it."""
