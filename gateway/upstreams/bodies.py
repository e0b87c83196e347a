"""The body that an upstream gets: as the client wrote it, with another model's name, a caching hint, or a request for
its usage where the settings allow it for the tenant. Safe in any thread, and work for one where the body is large.

A hint is put in where the client said nothing about caching itself. It changes what a request costs, never its meaning:

    Anthropic  `cache_control` at the end of the longest prefix that was seen before. A conversation is marked one turn
               behind its end, so that each turn reads what the one before wrote; what comes once is never written.
    OpenAI     `prompt_cache_key`: requests that begin alike go to the same servers.

The only memory is one of hashes. A stream of the OpenAI API tells its usage when `stream_options.include_usage` is set;
metering.py takes the event that this adds out of the answer.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any, Final, NamedTuple

import orjson

from gateway.config import UpstreamSettings
from gateway.digests import feed
from gateway.errors import BadRequestError, ModelNotFoundError
from gateway.types import MAX_BREAKPOINTS, UpstreamRequest
from gateway.upstreams.json_edit import find, named_once, replaced, root, with_member, without_member
from gateway.upstreams.routes import Route, may

Path = tuple[str | int, ...]

MARK: Final = {"type": "ephemeral"}
_MARKED: Final = b',"cache_control":' + orjson.dumps(MARK) + b"}]"
_MARKABLE: Final = frozenset(("text", "image", "document", "tool_use", "tool_result"))
"""Types of blocks that may carry a mark; thinking may not."""

_KEYED: Final = frozenset(("/v1/chat/completions", "/v1/responses"))
_STREAMS: Final = frozenset(("/v1/chat/completions", "/v1/completions"))


def body_for(
    request: UpstreamRequest, route: Route, settings: UpstreamSettings, seen: PrefixHistory
) -> tuple[bytes, bool, bool]:
    """The body, whether the gateway added a request for the usage, and whether it added a hint. `seen` is that of the
    upstream. Raises BadRequestError and ModelNotFoundError."""
    if request.only:
        return request.body, False, False
    body, tenant, has_hint = _renamed(request, route), request.tenant.name, False
    if may(settings.hints, tenant):
        with_hint = add_hint(request, body, seen)
        body, has_hint = with_hint, with_hint is not body
    if may(settings.meter, tenant) and _lacks_usage(request):
        return with_usage(body), True, has_hint
    return body, False, has_hint


def _renamed(request: UpstreamRequest, route: Route) -> bytes:
    """As the client wrote it, but for the model's name where the upstream has another one for it."""
    body = request.body
    if "cache" in request.values:  # it is about the gateway's own cache
        body = without_member(body, root(body), "cache")
    if "{model}" in request.path:
        if any(part in ("", ".", "..") for part in route.model.split("/")):
            raise ModelNotFoundError(request.model)
        return body
    if (named := named_once(body, "model")) is None:
        # Parsers differ in which one they take: ours would decide about another model than the upstream answers with.
        raise BadRequestError("Invalid 'model': it is there more than once.", param="model", code="invalid_value")
    return body if route.model == request.model else replaced(body, named, route.model)


def _lacks_usage(request: UpstreamRequest) -> bool:
    """Whether the answer is a stream that reports its usage only on request."""
    options = request.values.get("stream_options")
    has_usage = isinstance(options, Mapping) and options.get("include_usage") is True
    return request.path in _STREAMS and request.values.get("stream") is True and not has_usage


def with_usage(body: bytes) -> bytes:
    """The body with `include_usage`, and with nothing else changed."""
    if (value := find(body, ("stream_options", "include_usage"))) is not None:
        return replaced(body, value, True)
    if (options := find(body, ("stream_options",))) is None:
        return with_member(body, root(body), "stream_options", {"include_usage": True})
    if body[options.start : options.start + 1] == b"{":
        return with_member(body, options.start, "include_usage", True)
    return replaced(body, options, {"include_usage": True})


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

    @property
    def num_marks(self) -> int:
        """Of the client's own, in it or further in."""
        return _num_marks(self.value)


def add_hint(request: UpstreamRequest, body: bytes, seen: PrefixHistory) -> bytes:
    """The body, perhaps with a hint. `seen` is that of one upstream."""
    if request.dialect == "anthropic" and request.path == "/v1/messages":
        return _marked(request, body, seen)
    if request.path in _KEYED and (key := _cache_key(request)) is not None:
        if (null := find(body, ("prompt_cache_key",))) is not None:  # a member in front would not overrule it
            return replaced(body, null, key)
        return with_member(body, root(body), "prompt_cache_key", key)
    return body


def _marked(request: UpstreamRequest, body: bytes, seen: PrefixHistory) -> bytes:
    blocks = list(_blocks(request))
    index = next(
        (at for at in reversed(range(len(blocks))) if blocks[at].is_markable and seen.has(blocks[at].digest)), None
    )
    for block in blocks:
        seen.add(block.digest)
    own = [at for at, block in enumerate(blocks) for _ in range(block.num_marks)]
    # A mark in front of one of the client's could have a shorter time to live than that, which is an error.
    if index is None or len(own) >= MAX_BREAKPOINTS or any(at >= index for at in own):
        return body
    if request.values.get("cache_control") is not None:  # the client has the end of the prompt marked
        return body
    return _with_mark(body, blocks[index])


def _with_mark(body: bytes, block: Block) -> bytes:
    child = find(body, block.path)
    assert child is not None, "the path is one of the parsed body"
    if isinstance(block.value, dict):
        # `null` is no mark; a member in front of it would be overruled by it.
        marked = find(body, (*block.path, "cache_control"))
        if marked is not None:
            return body[: marked.start] + orjson.dumps(MARK) + body[marked.end :]
        return with_member(body, child.start, "cache_control", MARK)
    text = b'[{"type":"text","text":' + body[child.start : child.end] + _MARKED
    return body[: child.start] + text + body[child.end :]


def _blocks(request: UpstreamRequest) -> Iterator[Block]:
    """In the order in which the upstream reads them. Nothing behind what is no block."""
    hashed = hashlib.sha256()
    feed(hashed, [request.tenant.name, request.model])
    for path, value, role in _contents(request.values):
        if not isinstance(value, dict | str):
            return
        feed(hashed, [role, _canonical(value)])
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


def _canonical(block: dict[str, Any] | str) -> dict[str, Any]:
    """A string is a block of text. Marks are no part of what a block says."""
    if isinstance(block, str):
        block = {"type": "text", "text": block}
    return {name: value for name, value in block.items() if name != "cache_control"}


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
