"""The body that an upstream gets: the client's bytes, or its values with another model's name, a caching hint, or a
request for the usage where the settings allow it for the tenant. Safe in any thread, and work for one where the body is
large.

A hint is added where the client has none of its own. It changes what a request costs, never its meaning:

    Anthropic  `cache_control` at the end of the longest prefix that was seen before. A conversation is marked one turn
               behind its end, so that each turn reads what the one before wrote; a prompt without a second request
               is never written.
    OpenAI     `prompt_cache_key`: requests that begin alike go to the same servers.

Only hashes are remembered. A stream of the OpenAI API has its usage when `stream_options.include_usage` is set;
metering.py takes the event that this adds out of the answer.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from threading import Lock
from typing import Any, Final, NamedTuple

import orjson

from gateway.config import UpstreamSettings
from gateway.digests import dump, feed
from gateway.errors import ModelNotFoundError
from gateway.tasks import AT_ONCE
from gateway.types import MAX_BREAKPOINTS, UpstreamRequest
from gateway.upstreams.routes import Route, may

Path = tuple[str | int, ...]

MARK: Final = {"type": "ephemeral"}
_MARKABLE: Final = frozenset(("text", "image", "document", "tool_use", "tool_result"))
"""Types of blocks that may carry a mark; thinking may not."""

_KEYED: Final = frozenset(("/v1/chat/completions", "/v1/responses"))
_STREAMS: Final = frozenset(("/v1/chat/completions", "/v1/completions"))

_MODEL: Final = re.compile(rb'"model"')  # which finds it in half the time that a search for bytes takes
_ESCAPED: Final = re.compile(rb"\\u006")


def body_for(
    request: UpstreamRequest, route: Route, settings: UpstreamSettings, seen: PrefixHistory
) -> tuple[bytes, bool, bool]:
    """The body, whether the gateway added a request for the usage, and whether it added a hint. `seen` is that of the
    upstream. Raises ModelNotFoundError."""
    if request.only:
        return request.body, False, False
    tenant = request.tenant.name
    hint = find_hint(request, seen) if request.hinted or may(settings.hints, tenant) else {}
    usage = usage_option(request) if may(settings.meter, tenant) else {}
    changes = {**_model(request, route), **hint, **usage}
    return _changed(request, changes), bool(usage), bool(hint)


def _model(request: UpstreamRequest, route: Route) -> dict[str, str]:
    """The model's name in the body, where the upstream has another one for it."""
    if "{model}" not in request.path:
        return {"model": route.model} if route.model != request.model else {}
    if any(part in ("", ".", "..") for part in route.model.split("/")):
        raise ModelNotFoundError(request.model)
    return {}


def _changed(request: UpstreamRequest, changes: Mapping[str, Any]) -> bytes:
    """The client's own bytes, or the parsed body written again: with other members, or where parsers may differ in
    which of several `model` they take. `cache` is about the gateway's own cache."""
    body, values = request.body, request.values
    in_path = "{model}" in request.path
    if not changes and "cache" not in values and (in_path or _has_one_model(body)):
        return body
    written = {name: value for name, value in {**values, **changes}.items() if name != "cache"}
    return orjson.dumps(written) if len(body) <= AT_ONCE else dump(written)


def _has_one_model(body: bytes) -> bool:
    """False also where the name stands further in, or one of its letters (0x64 to 0x6f) may be written as an escape."""
    first = _MODEL.search(body)
    if first is None or _MODEL.search(body, first.end()) is not None:
        return False
    return b"\\" not in body or _ESCAPED.search(body) is None


def usage_option(request: UpstreamRequest) -> dict[str, Any]:
    """The member that has a stream report its usage; empty where it does so without."""
    values = request.values
    options = values.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if request.path not in _STREAMS or values.get("stream") is not True or options.get("include_usage") is True:
        return {}
    return {"stream_options": {**options, "include_usage": True}}


class PrefixHistory:
    """Digests of prefixes, each until a time; the ones that were not used for longest go first. Safe in any thread."""

    def __init__(self, most: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._ttl_s = ttl_s
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()
        self._lock = Lock()

    def has(self, digest: bytes) -> bool:
        return self._until_s.get(digest, 0.0) > self._clock()

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._until_s[digest] = self._clock() + self._ttl_s
            self._until_s.move_to_end(digest)
            if len(self._until_s) > self._most:
                self._until_s.popitem(last=False)


class Block(NamedTuple):
    """A block of an Anthropic prompt, and the digest of everything up to its end.

    path  in the request's JSON; of a string that stands for one block of text, the string's
    """

    path: Path
    value: Any
    digest: bytes

    @property
    def is_markable(self) -> bool:
        if self.path[0] == "tools":
            return isinstance(self.value, dict) and not self.value.get("defer_loading")
        if isinstance(self.value, str):
            return bool(self.value.strip())
        kind = self.value.get("type")
        return kind in _MARKABLE and (kind != "text" or bool(str(self.value.get("text", "")).strip()))


def find_hint(request: UpstreamRequest, seen: PrefixHistory) -> dict[str, Any]:
    """The member of the body with a hint in it; empty for none. `seen` is that of one upstream."""
    if request.dialect == "anthropic" and request.path == "/v1/messages":
        return _mark(request, seen)
    if request.path in _KEYED and (key := _cache_key(request)) is not None:
        return {"prompt_cache_key": key}
    return {}


def _mark(request: UpstreamRequest, seen: PrefixHistory) -> dict[str, Any]:
    blocks = list(_blocks(request))
    index = next(
        (at for at in reversed(range(len(blocks))) if blocks[at].is_markable and seen.has(blocks[at].digest)), None
    )
    for block in blocks:
        seen.add(block.digest)
    own = [at for at, block in enumerate(blocks) for _ in range(_num_marks(block.value))]
    # A mark in front of one of the client's could have a shorter time to live than that, which is an error.
    if index is None or len(own) >= MAX_BREAKPOINTS or any(at >= index for at in own):
        return {}
    if request.values.get("cache_control") is not None:  # the client has the end of the prompt marked
        return {}
    block = blocks[index]
    marked = {**_as_block(block.value), "cache_control": MARK}
    name = str(block.path[0])
    return {name: _replaced(request.values[name], block.path[1:], [marked] if isinstance(block.value, str) else marked)}


def _replaced(value: Any, path: Path, change: Any) -> Any:
    """A copy, as deep as the path is, with another value at its end."""
    if not path:
        return change
    copied = copy(value)
    copied[path[0]] = _replaced(value[path[0]], path[1:], change)
    return copied


def _blocks(request: UpstreamRequest) -> Iterator[Block]:
    """In the order in which the upstream reads them. Nothing behind what is no block."""
    hashed = hashlib.sha256()
    feed(hashed, [request.tenant.name, request.model])
    for path, value, role in _contents(request.values):
        if not isinstance(value, dict | str):
            return
        # Marks are no part of what a block says.
        feed(hashed, [role, {name: item for name, item in _as_block(value).items() if name != "cache_control"}])
        yield Block(path, value, hashed.copy().digest()[:16])


def _contents(values: Mapping[str, Any]) -> Iterator[tuple[Path, Any, str]]:
    """Path, value, and the role that it has in the prompt."""
    for number, tool in enumerate(_list(values.get("tools"))):
        yield ("tools", number), tool, "tool"
    yield from _content(("system",), values.get("system"), "system")
    for number, message in enumerate(_list(values.get("messages"))):
        if not isinstance(message, dict):
            return
        yield from _content(("messages", number, "content"), message.get("content"), str(message.get("role")))


def _content(path: Path, content: Any, role: str) -> Iterator[tuple[Path, Any, str]]:
    if isinstance(content, str):
        yield path, content, role
    for number, block in enumerate(_list(content)):
        yield (*path, number), block, role


def _num_marks(value: Any) -> int:
    """Results of tools and documents are made of blocks, which may have some as well."""
    if isinstance(value, list):
        return sum(map(_num_marks, value))
    if not isinstance(value, dict):
        return 0
    return (value.get("cache_control") is not None) + _num_marks(value.get("content")) + _num_marks(value.get("source"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _as_block(block: dict[str, Any] | str) -> dict[str, Any]:
    return {"type": "text", "text": block} if isinstance(block, str) else block


def _cache_key(request: UpstreamRequest) -> str | None:
    """Of how the conversation begins: everything up to the end of its first user's turn, which all its turns share."""
    values = request.values
    if values.get("prompt_cache_key") is not None or values.get("previous_response_id") is not None:
        return None
    items = values.get("messages", values.get("input"))
    hashed = hashlib.sha256()
    beginning = [values.get("instructions"), values.get("tools"), _beginning(items)]
    feed(hashed, [request.tenant.name, request.model, beginning])
    return f"kvasir-{hashed.hexdigest()[:24]}"


def _beginning(items: Any) -> Any:
    if not isinstance(items, list):
        return items
    for number, item in enumerate(items):
        if isinstance(item, dict) and item.get("role") == "user":
            return items[: number + 1]
    return items
