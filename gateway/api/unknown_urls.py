"""What a client is told whose URL is none of ours: which one it may have meant, or that this API is not served here."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web
from yarl import URL

from gateway.errors import NotFoundError

MAX_PARTS: Final = 12
"""Of a path that is looked at for the one that was meant; the longest of ours has seven."""

_NOT_SERVED: Final = re.compile(
    r"/v1(?:beta)?/(assistants|audio|batches|containers|conversations|corpora|evals|fileSearchStores|fine_tuning|images"
    r"|moderations|organization|realtime|skills|threads|tunedModels|uploads|vector_stores|videos)(?:/.*)?"
)
_INSTEAD: Final = {
    "conversations": " Go on from a response with `previous_response_id`, or send the whole conversation.",
    "batches": " Batches of the Gemini API are not; `/v1/batches` is the OpenAI API's.",
}


async def unknown_url(http: web.Request) -> NotFoundError:
    """Never reads the body."""
    message = f"Unknown request URL: {http.method} {http.path[:200]}."
    if known := _NOT_SERVED.fullmatch(http.path):
        message += f" The {known[1]} API is not served here.{_INSTEAD.get(known[1], '')}"
    elif (meant := await _meant(http)) is not None:
        message += (
            f" Did you mean {meant}? The base URL is {http.host}/v1 for OpenAI's SDKs and {http.host} for those of "
            "Anthropic and Gemini."
        )
    return NotFoundError(message, code="unknown_url")


async def _meant(http: web.Request) -> str | None:
    """A path of ours that this one ends with, slashes and what an SDK or a proxy puts in front aside."""
    parts = [part for part in http.rel_url.raw_path.split("/") if part]
    if len(parts) > MAX_PARTS:
        return None
    for begin in range(len(parts)):
        tail = "/".join(parts[begin:])
        for path in (f"/{tail}", f"/v1/{tail}"):
            asked = http.clone(rel_url=URL.build(path=path, encoded=True))
            if (await http.app.router.resolve(asked)).http_exception is None:
                return path
    return None
