"""A prompt as parts: its tools, then its messages. Of each a digest, and one of its shape: the text without what
changes by itself (dates, times, ids). Where only digests are kept, they are keyed by a secret of the gateways and say
nothing to anybody else.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple

import orjson

from gateway.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt

Section = Literal["tools", "system", "messages", "prompt", "rest"]

MAX_PARTS: Final = 64
"""That are kept of one request: its first ones, which is where caches end. All behind them are one part, the `rest`."""

MAX_PASTED_PARTS: Final = 1024
"""The same of one that keeps its texts."""

MAX_ROLE: Final = 64
"""Characters of a role, or of a tool's name."""

SHAPED_CHARS: Final = 1024
"""At each end of a text, where dates and ids stand as a rule: what is between is taken as it is."""

MAX_SHAPES: Final = 4096
"""Texts whose shape is remembered, by their digest."""

_NAMES: Final = frozenset(
    name[:length] + end
    for name in (
        *("January", "February", "March", "April", "June", "July", "August", "September", "October", "November"),
        *("December", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
    )
    for length in (3, len(name))
    for end in ("", ",", ".")
)
_DIGITS: Final = frozenset("0123456789")


class Part(NamedTuple):
    """`text` is None where only digests are known. `marked`: the client asked for caching up to it, or in it."""

    section: Section
    role: str
    message: int | None
    chars: int
    digest: str
    shape: str
    marked: bool = False
    text: str | None = None


def shape_of(text: str) -> str:
    """The text without what changes by itself: words with a digit, months, days of the week. Words, not expressions:
    this is done for each prompt that is new."""
    if len(text) <= 2 * SHAPED_CHARS:
        return _masked(text)
    return _masked(text[:SHAPED_CHARS]) + text[SHAPED_CHARS:-SHAPED_CHARS] + _masked(text[-SHAPED_CHARS:])


def _masked(text: str) -> str:
    without_digit = _DIGITS.isdisjoint
    return " ".join(
        [word if (word.isalpha() or without_digit(word)) and word not in _NAMES else "\0" for word in text.split()]
    )


class Digests:
    """Keyed digests of texts, and of their shapes, which are looked for once."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(key, digest_size=32).digest()
        self._shapes: OrderedDict[str, str] = OrderedDict()

    def __call__(self, text: str | bytes) -> str:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=8, key=self._key).hexdigest()

    def shape(self, digest: str, text: str) -> str:
        """Of the text that has this digest."""
        if (known := self._shapes.get(digest)) is None:
            known = self._shapes[digest] = self(shape_of(text))
            if len(self._shapes) > MAX_SHAPES:
                self._shapes.popitem(last=False)
        return known


_FIRST: Final = (0, 1)
"""Messages whose shape is looked for: what changes by itself costs most at the beginning."""


def parts_of(prompt: Prompt | Mapping[str, Any], digests: Digests, *, texts: bool = False) -> list[Part]:
    """The first ones, and the rest; a mapping is a body that nobody has checked. `texts`: they keep what they say."""
    found, rest, rest_chars = list[Part](), list[str](), 0
    most, first_message = MAX_PASTED_PARTS if texts else MAX_PARTS, None
    for section, role, message, text, marked in _pieces(prompt):
        digest = digests(text)
        if len(found) == most:
            first_message = message if not rest else first_message
            rest.append(f"{digest}{role}")
            rest_chars += len(text)
            continue
        changes = section != "messages" or message in _FIRST
        shape = digests.shape(digest, text) if changes and isinstance(text, str) else digest
        kept = text if texts and isinstance(text, str) else None
        found.append(Part(section, role[:MAX_ROLE], message, len(text), digest, shape, marked, kept))
    if rest:
        digest = digests("\0".join(rest))
        found.append(Part("rest", "", first_message, rest_chars, digest, digest))
    return found


_Piece = tuple[Section, str, int | None, str | bytes, bool]


def _pieces(prompt: Prompt | Mapping[str, Any]) -> Iterator[_Piece]:
    match prompt:
        case Mapping():
            yield from _pieces_of_body(prompt)
        case TextPrompt(text):
            yield "prompt", "prompt", None, text, False
        case TokenPrompt(tokens):
            yield "prompt", "tokens", None, tokens, False
        case ChatPrompt():
            marked_tools = {marker.tool for marker in prompt.markers if marker.tool is not None}
            marked = {marker.message for marker in prompt.markers if marker.tool is None}
            for number, tool in enumerate(prompt.tools):
                text = orjson.dumps([tool.name, tool.description, tool.parameters], default=str).decode()
                yield "tools", tool.name, None, text, number in marked_tools
            for number, message in enumerate(prompt.messages):
                role = str(message.get("role"))
                section: Section = "system" if role in ("system", "developer") else "messages"
                yield section, role, number, _text_of(message), number in marked


_SYSTEM: Final = ("instructions", "system", "systemInstruction", "system_instruction")
_TURNS: Final = ("messages", "input", "contents", "prompt")
_MARK: Final = "cache_control"
_MARK_DEPTH: Final = 3
"""Of what a client marks for caching: blocks of messages, and of results of tools in them."""


def scope_of(prompt: Prompt | Mapping[str, Any] | None) -> str:
    """What a body separates its cache with at its upstream."""
    key = prompt.get("prompt_cache_key") if isinstance(prompt, Mapping) else None
    return key if isinstance(key, str) else ""


def _pieces_of_body(body: Mapping[str, Any]) -> Iterator[_Piece]:
    """In any dialect: an upstream answers it, so that it may have anything in it."""
    tools = body.get("tools")
    for tool in tools if isinstance(tools, list) else ():
        yield _piece("tools", _name_of(tool), None, tool)
    for name in _SYSTEM:
        if body.get(name):
            yield _piece("system", "system", None, body[name])
    turns = next((body[name] for name in _TURNS if body.get(name)), ())
    for number, turn in enumerate(turns if isinstance(turns, list) else ()):
        role = str(turn.get("role") or turn.get("type")) if isinstance(turn, dict) else "user"
        only = isinstance(turn, dict) and turn.keys() <= {"role", "content"}
        section: Section = "system" if role in ("system", "developer") else "messages"
        yield _piece(section, role, number, turn.get("content") if only else turn)
    if isinstance(turns, str):
        yield "prompt", "prompt", None, turns, False


def _piece(section: Section, role: str, message: int | None, value: Any) -> _Piece:
    plain = _unmarked(value, 0)
    return section, role, message, plain if isinstance(plain, str) else _written(plain), plain != value


def _name_of(tool: Any) -> str:
    inside = tool.get("function") if isinstance(tool, dict) else None
    named = inside if isinstance(inside, dict) else tool if isinstance(tool, dict) else {}
    return str(named.get("name") or named.get("type") or "")


def _unmarked(value: Any, depth: int) -> Any:
    """Without marks for caching, which move from turn to turn."""
    if depth > _MARK_DEPTH:
        return value
    if isinstance(value, list):
        return [_unmarked(one, depth + 1) for one in value]
    if isinstance(value, dict):
        return {name: _unmarked(one, depth + 1) for name, one in value.items() if name != _MARK}
    return value


def _written(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # for numbers beyond 64 bits
        return repr(value)


def _text_of(message: Mapping[str, Any]) -> str:
    """Its content, and whatever else a template reads of it."""
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
    written = content if isinstance(content, str) else "" if content is None else orjson.dumps(content).decode()
    return f"{written}\n{orjson.dumps(rest, default=str).decode()}" if rest else written


def rows_of(parts: Sequence[Part], num_tokens: int, cached_tokens: int) -> list[dict[str, Any]]:
    """What is kept of an answered prompt: no texts. Tokens of a part are its share of the prompt's by characters."""
    ends = ends_of(parts, num_tokens)
    return [
        {
            "part": part.section,
            "role": part.role,
            "message": part.message,
            "chars": part.chars,
            "tokens": end - start,
            "cached_tokens": max(0, min(end, cached_tokens) - start),
            "hash": part.digest,
            "shape": part.shape,
            "marked": part.marked,
        }
        for part, start, end in zip(parts, (0, *ends), ends, strict=False)
    ]


def ends_of(parts: Sequence[Part], num_tokens: int) -> list[int]:
    """About where each part ends, in tokens."""
    chars = sum(part.chars for part in parts) or 1
    return [num_tokens * done // chars for done in accumulate(part.chars for part in parts)]
