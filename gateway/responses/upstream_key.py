"""When two requests to an upstream are equal, and which of them the response cache is for. Pure.

A body is JSON of which everything counts, unknown fields too, except what is known to change no answer. The order of
names does not count where no model reads it: in the body, in a turn, and in a part of one. Deeper are schemas, and
arguments of earlier calls. Large bodies are equal only byte for byte.

A request that does not certainly end with a text of its user, or that may be for more than a text, has the exact cache
alone: no other request means the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Set
from typing import Any, Final, NamedTuple

import orjson

from gateway.config import ResponseCacheSettings
from gateway.responses.base import VERSION, Mode, Situation, find_refusal
from gateway.types import UpstreamRequest

IGNORED: Final = frozenset(
    ("stream", "stream_options", "user", "metadata", "safety_identifier", "service_tier", "priority", "labels", "cache")
)
"""Of a body's own names. What separates clients (prompt_cache_key, cache_salt) is not among them."""

_TURNS: Final = frozenset(("messages", "contents", "input"))
_PARTS: Final = frozenset(("content", "parts"))
"""Names of lists of turns, and of the parts of a turn."""

HEADERS: Final = frozenset(("anthropic-beta", "anthropic-version", "openai-beta"))
"""That change an answer, of those that go on to an upstream."""

_STREAM: Final = ":streamGenerateContent"
_WHOLE: Final = ":generateContent"
_CALLED: Final = ("tools", "functions", "mcp_servers", "web_search_options", "plugins")
"""What answers may call, at the client or at the upstream."""

_KEPT_THERE: Final = ("store", "background", "container")
"""Members with which an upstream stores something, or uses something stored."""

_RESPONSES: Final = "/v1/responses"
_CONTINUED: Final = ("previous_response_id", "conversation", "prompt")
"""The same for responses, which an upstream stores unless `store` is false."""

_VECTORS: Final = "/v1/embeddings"
"""A text has one vector, whatever the sampling."""

_STRICTER: Final = ("on", "ask", "off")

LARGE_BYTES: Final = 1 << 20
"""Of a body. A larger one is not written again in a common form, which would stop all other threads."""

_LEAST, _MOST, _LONGEST = -(2**63), 2**64 - 1, 20
"""Whole numbers that are read exactly, and characters of the longest of them."""

_ALT: Final = frozenset(("alt=json", "alt=sse"))
"""Parameters of a URL that say whether a Gemini answer streams. Another `alt` is another form, which others are not to
get."""

MAX_MODEL_CHARS: Final = 256
"""Of a model's name that questions are stored under: where a pattern matches, clients choose it."""

TIERS: Final = ("service_tier", "priority")
"""Names in a body for the speed of an answer, not its content."""

MAX_SECTION_NAMES: Final = 256
"""Of a body or a section of it. One with more is for no API, and not read."""

DEFAULT_TEMPERATURE: Final = 1.0
"""Of a request without one, in all of the APIs."""


class _Chat(NamedTuple):
    """How a route writes chats.

    turns  name of the list of them
    parts  name of a turn's content: a text, where `texts` has types, or parts
    texts  types of the parts that are texts; where parts have no types, a text is all that such a part has
    alone  whether a text may stand in the place of the turns
    """

    turns: str
    parts: str
    texts: frozenset[str]
    alone: bool = False


_CHATS: Final[Mapping[str, _Chat]] = {
    "/v1/chat/completions": _Chat("messages", "content", frozenset(("text",))),
    "/v1/messages": _Chat("messages", "content", frozenset(("text",))),
    "/v1/responses": _Chat("input", "content", frozenset(("input_text", "output_text")), alone=True),
    ":generateContent": _Chat("contents", "parts", frozenset()),
}
"""By route (`route_of`)."""

_SPEAKERS: Final = frozenset(("user", "assistant", "model", "system", "developer"))
"""Roles of messages that are texts. Results of tools are something else."""

_MORE_THAN_TEXT: Final = ("tool_calls", "function_call", "audio")
"""Of a turn."""

_PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "bestof": (1,),
    "candidatecount": (1,),
    "format": ({"type": "text"},),
    "include": ([],),
    "logprobs": (False, 0),
    "modalities": (["text"],),
    "n": (1,),
    "responseformat": ({"type": "text"},),
    "responselogprobs": (False,),
    "responsemimetype": ("text/plain",),
    "responsemodalities": (["TEXT"],),
    "toplogprobs": (0,),
    **dict.fromkeys(("audio", "grammar", "guidedchoice", "guidedgrammar", "guidedjson", "guidedregex"), ()),
    **dict.fromkeys(("jsonschema", "outputformat", "promptlogprobs", "responsejsonschema", "responseschema"), ()),
    **dict.fromkeys(("speechconfig", "structuredoutputs"), ()),
}
"""Names that ask for more than one text or another form of it, in small letters and without underscores -> what they
may have as value nevertheless, besides null."""

_SECTIONS: Final = ("generationConfig", "generation_config", "output_config", "text")
"""Of a body, that have such names, too."""


def route_of(request: UpstreamRequest) -> str:
    """The route, the same whether it streams or not, and in which version of its API."""
    if "{model}" in request.path:
        return _WHOLE if request.path.endswith((_STREAM, _WHOLE)) else request.path
    return request.path


def streams(request: UpstreamRequest) -> bool:
    return request.path.endswith(_STREAM) or request.values.get("stream") is True


def include_usage(request: UpstreamRequest) -> bool:
    """Whether a stream of the OpenAI API is to tell its usage."""
    options = request.values.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def is_large(request: UpstreamRequest) -> bool:
    """Whether only the same bytes are the same request, and none means the same."""
    return len(request.body) > LARGE_BYTES


def upstream_key(request: UpstreamRequest, route_text: str) -> bytes:
    """32 bytes. `route_text` says which upstreams and models answer it."""
    if is_large(request):
        hashed = hashlib.sha256(_digest("large upstream", request, {}, route_text))
        hashed.update(request.body)
        return hashed.digest()
    return _digest("upstream", request, request.values, route_text)


def _digest(kind: str, request: UpstreamRequest, values: Mapping[str, Any], route_text: str) -> bytes:
    parts = (
        ("kvasir", kind, VERSION),
        ("scope", request.owner.salt, request.reuse.partition),
        ("route", request.dialect, route_of(request), request.model, route_text),
        ("query", sorted(part for part in request.query.split("&") if part and part not in _ALT)),
        ("headers", sorted(item for item in request.headers if item[0] in HEADERS)),
        ("body", _canonical(values)),
    )
    return hashlib.sha256(orjson.dumps(parts)).digest()


def _canonical(values: Mapping[str, Any]) -> Any:
    """A body with names in order, where no model reads their order."""
    counted = {name: value for name, value in values.items() if name not in IGNORED}
    return _sorted(counted, _TURNS, lambda turn: _sorted(turn, _PARTS, lambda part: _sorted(part)))


def _sorted(value: Any, lists: Set[str] = frozenset(), inner: Callable[[Any], Any] = lambda item: item) -> Any:
    """An object with its names in order, and so what is in its `lists`."""
    if type(value) is not dict:
        return value
    return {
        name: list(map(inner, member)) if name in lists and type(member) is list else member
        for name, member in sorted(value.items())
    }


def find_upstream_bypass(
    request: UpstreamRequest, settings: ResponseCacheSettings, mode: Mode, *, known: bool
) -> str | None:
    """As engine_answers.find_bypass, with the stricter of its `mode` and that of upstreams, and

    route     answers of this route, or in this form, are not stored; `known` is whether they could be
    stateful  the upstream is to keep something of it
    names     it has a name twice
    numbers   it has a whole number that some parsers round, so that another request would look equal here
    """
    values, reuse = request.values, request.reuse
    if (reason := find_upstream_refusal(request, settings, mode)) is not None:
        return reason
    if not known or not request.metered or (request.path.endswith(_STREAM) and not _is_sse(request)):
        return "route"
    if _is_stateful(request):
        return "stateful"
    if any(values.get(name) not in (None, []) for name in _CALLED) and not (settings.tool_calls or reuse.asked):
        return "tools"
    if not (settings.requests == "all" or reuse.asked or request.path == _VECTORS or _deterministic(values)):
        return "sampling"
    return _find_odd(request)


def find_upstream_refusal(request: UpstreamRequest, settings: ResponseCacheSettings, mode: Mode) -> str | None:
    """The first of these reasons, which needs no look at the body."""
    if request.path != _VECTORS:
        mode = max(mode, settings.upstreams, key=_STRICTER.index)
    return find_refusal(request.reuse, mode)


def _is_sse(request: UpstreamRequest) -> bool:
    return "alt=sse" in request.query.split("&")


def _find_odd(request: UpstreamRequest) -> str | None:
    """Parsers differ in which of two equal names they take, and in how they read long numbers: the upstream might
    answer another request than the one that was looked up here, and its answer would be stored for the latter."""
    if is_large(request) or orjson.dumps(request.values) == request.body:  # as most clients write it
        return None
    try:
        json.loads(request.body, object_pairs_hook=_once, parse_int=_exact)
    except _OddError as odd:
        return str(odd)
    return None


class _OddError(Exception):
    """Its message is the reason of a bypass."""


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(named := dict(members)) != len(members):
        raise _OddError("names")
    return named


def _exact(written: str) -> None:
    if len(written) > _LONGEST or not _LEAST <= int(written) <= _MOST:
        raise _OddError("numbers")


def _is_stateful(request: UpstreamRequest) -> bool:
    values = request.values
    options = values.get("prompt_cache_options")
    if isinstance(options, dict) and (options.get("prewarm") or options.get("comparison_response_id")):
        return True
    if request.path != _RESPONSES:
        return any(values.get(name) for name in _KEPT_THERE)
    if values.get("store") is not False or any(values.get(name) for name in (*_KEPT_THERE, *_CONTINUED)):
        return True
    items = values.get("input")
    types = [item.get("type") for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return "item_reference" in types


def _deterministic(values: Mapping[str, Any]) -> bool:
    """Whether the client wants it so; how far an upstream keeps to a seed is not known."""
    inside = sampling_of(values)
    temperature = inside.get("temperature")
    return (type(temperature) in (int, float) and temperature == 0) or type(inside.get("seed")) is int


def sampling_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a body with the temperature and the like."""
    config = values.get("generationConfig") or values.get("generation_config")
    return config if isinstance(config, dict) else values


def find_unfit(request: UpstreamRequest, max_temperature: float) -> str | None:
    """See Query."""
    values = request.values
    if any(values.get(name) not in (None, []) for name in _CALLED):
        return "tools"
    sections = [values, *(values[name] for name in _SECTIONS if isinstance(values.get(name), dict))]
    if len(request.model) > MAX_MODEL_CHARS or not all(map(_is_plain, sections)):
        return "form"
    temperature = sampling_of(values).get("temperature")
    if temperature is None:
        temperature = DEFAULT_TEMPERATURE
    return None if type(temperature) in (int, float) and temperature <= max_temperature else "sampling"


def find_upstream_situation(request: UpstreamRequest, route_text: str) -> Situation | None:
    """See Query."""
    chat = None if is_large(request) else _CHATS.get(route_of(request))
    cut = None if chat is None else _cut(request.values, chat)
    if cut is None:
        return None
    text, without = cut
    return Situation(_digest("upstream situation", request, without, route_text), text)


def _is_plain(section: Mapping[str, Any]) -> bool:
    """True if nothing in it is for more than one text."""
    return len(section) <= MAX_SECTION_NAMES and all(
        value is None or value in _PLAIN.get(name.replace("_", "").lower(), (value,)) for name, value in section.items()
    )


def _cut(values: Mapping[str, Any], chat: _Chat) -> tuple[str, dict[str, Any]] | None:
    """The user's last text, and the body without it."""
    turns = values.get(chat.turns)
    if chat.alone and isinstance(turns, str):
        return turns, {**values, chat.turns: None}
    if not isinstance(turns, list) or not turns or not all(_is_text_only(turn, chat) for turn in turns):
        return None
    *before, last = turns
    if last.get("role", "user") != "user":
        return None
    content = last[chat.parts]
    if isinstance(content, str):
        text, emptied = content, None
    else:
        *parts, part = content
        text, emptied = part["text"], [*parts, {**part, "text": None}]
    return text, {**values, chat.turns: [*before, {**last, chat.parts: emptied}]}


def _is_text_only(turn: Any, chat: _Chat) -> bool:
    """True if the message consists of text parts only."""
    if not isinstance(turn, dict) or str(turn.get("role", "user")) not in _SPEAKERS:
        return False
    if turn.get("type", "message") != "message" or any(turn.get(name) for name in _MORE_THAN_TEXT):
        return False
    content = turn.get(chat.parts)
    if isinstance(content, str):
        return bool(chat.texts)
    return isinstance(content, list) and bool(content) and all(_is_text(part, chat) for part in content)


def _is_text(part: Any, chat: _Chat) -> bool:
    if not isinstance(part, dict) or type(part.get("text")) is not str:
        return False
    return str(part.get("type")) in chat.texts if chat.texts else not set(part) - {"text", "thoughtSignature"}
