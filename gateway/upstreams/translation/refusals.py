"""What an upstream of another API says in the place of an answer, as an error that each dialect writes in its own
words. Pure.

    its status       here   why
    401, 402, 403    502    the gateway's key or account is refused, and the client's is not; an upstream of another API
                            is asked. So is a Gemini key that is wrong, which is a 400 there
    408              504    only OpenAI has it
    529              503    only Anthropic has it, and its dialect writes every 503 so
    400, 413, 422    400    where the prompt is too long: clients find that by the words or the code of their own API,
                            and shorten the conversation
    all others       same
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from gateway.errors import ContextLengthError, KvasirError, UpstreamLostError, UpstreamRefusedError
from gateway.types import UpstreamAnswer
from gateway.upstreams.translation.base import MAX_ERROR_CHARS

_OUR_ACCOUNT: Final = (401, 402, 403)
_OURS: Final = re.compile(rb'"reason"\s*:\s*"(API_KEY_\w+|ACCESS_TOKEN_\w+|CONSUMER_INVALID|BILLING_DISABLED)"')
"""Of google.rpc.ErrorInfo: about the key that a request came with."""

_DELAY: Final = re.compile(rb'"retryDelay"\s*:\s*"(\d{1,4}(?:\.\d{1,9})?)s"')
"""Of google.rpc.RetryInfo, which Gemini has for Retry-After."""

_STATUS: Final = {408: 504, 529: 503}

TOO_LONG: Final = "context_length_exceeded"
_NUMBERS: Final = tuple(
    map(
        re.compile,
        (
            r"prompt is too long: (?P<prompt>\d{1,9}) tokens > (?P<most>\d{1,9})",
            r"exceed context limit: (?P<prompt>\d{1,9}) \+ (?P<answer>\d{1,9}) > (?P<most>\d{1,9})",
            r"input token count \((?P<prompt>\d{1,9})\) exceeds .{1,60}\((?P<most>\d{1,9})\)",
            r"context length is (?P<most>\d{1,9}) tokens.{1,40}requested \d{1,9} tokens "
            r"\((?P<prompt>\d{1,9}) in .{1,40}?(?P<answer>\d{1,9}) in",
            r"context length is (?P<most>\d{1,9}) tokens.{1,40}(?:in|requested|has) (?P<prompt>\d{1,9})",
        ),
    )
)
_WORDS: Final = re.compile(r"prompt is too long|context (?:length|limit|window)|input token count.{1,40}exceeds", re.I)


def refusal(answer: UpstreamAnswer, body: bytes, param: str) -> KvasirError:
    """The error that an upstream answered, with a status of 400 or more. All APIs have `error.message`; Gemini's may
    be in a list. `param` is the client's name of the prompt."""
    try:
        value: Any = orjson.loads(body)
    except ValueError:
        value = None
    if isinstance(value, list) and value:
        value = value[0]
    error = value.get("error") if isinstance(value, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    message = said if isinstance(said, str) and said else f"it answered HTTP {answer.status} and does not say why"
    code = error.get("code") if isinstance(error, dict) else None
    after_s = answer.retry_after_s
    if after_s is None and answer.status in (429, 503) and (delay := _DELAY.search(body)):
        after_s = min(float(delay[1]), 3600.0)
    told = UpstreamRefusedError(
        message[:MAX_ERROR_CHARS],
        401 if answer.status == 400 and _OURS.search(body) else answer.status,
        code=code if isinstance(code, str) else None,
        retry_after_s=after_s,
    )
    return settled(told, answer.upstream, param)


def settled(told: UpstreamRefusedError, upstream: str, param: str) -> KvasirError:
    """What an upstream says, as clients are told it."""
    message = f"Upstream {upstream}: {told.message}"
    if told.status in _OUR_ACCOUNT:
        why = "" if told.status == 401 else f" {told.message}"  # which may quote a part of the key
        lost = UpstreamLostError(f"Upstream {upstream} refuses the gateway's own key or account.{why}")
        lost.begun = False
        return lost
    if told.status in (400, 413, 422) and (told.code == TOO_LONG or _WORDS.search(told.message)):
        for numbers in _NUMBERS:
            if found := numbers.search(told.message):
                most, prompt, answer = (int(found.groupdict().get(name) or 0) for name in ("most", "prompt", "answer"))
                return ContextLengthError(most, prompt, answer, param=param)
        return UpstreamRefusedError(message, 400, code=TOO_LONG)
    status = _STATUS.get(told.status, told.status)
    return UpstreamRefusedError(message, status, code=told.code, retry_after_s=told.retry_after_s)
