"""What a choice between models goes by, out of a request's body in any dialect: its size, tools, images, and the
beginning of its conversation. Pure. Nothing of the body has been checked but that it is a JSON object.

Tokens are estimated: a token for each four bytes of the body, images aside, which count as IMAGE_TOKENS each. To
tokenise for a choice would cost more than most choices are worth, and each target counts in its own way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import xxhash

from gateway.api.routing import Facts
from gateway.api.tenants import BYTES_PER_TOKEN, IMAGE_TOKENS
from gateway.digests import feed

ANSWER_TOKENS: Final = 256
"""Of an answer, at most: limits are set high, and most answers stay far below."""

LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
"""Names of the limit on an answer's tokens."""

_BEFORE: Final = ("instructions", "system", "systemInstruction", "system_instruction", "tools")
_TURNS: Final = ("messages", "input", "contents", "prompt")
_IMAGES: Final = frozenset(("image", "image_url", "input_image"))
_INLINE: Final = ("inlineData", "inline_data", "fileData", "file_data")
_MAX_DEPTH: Final = 3
"""Of parts in parts: results of tools have some."""


def facts_of(values: Mapping[str, Any], num_bytes: int, tenant: str) -> Facts:
    """`num_bytes` are those of the body. Conversations of two tenants never have the same key."""
    images = list(_images(_turns(values), 0))
    most = [limit for limit in _limits(values) if type(limit) is int and limit >= 0]
    return Facts(
        prompt_tokens=max(0, num_bytes - sum(images)) // BYTES_PER_TOKEN + IMAGE_TOKENS * len(images),
        completion_tokens=min([*most, ANSWER_TOKENS]),
        has_tools=bool(values.get("tools") or values.get("functions")),
        has_images=bool(images),
        key=_key(values, tenant),
    )


def config_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the Gemini API has its parameters."""
    inside = values.get("generationConfig", values.get("generation_config"))
    return inside if isinstance(inside, dict) else {}


def _limits(values: Mapping[str, Any]) -> Iterator[Any]:
    for name in LIMITS:
        yield config_of(values).get(name, values.get(name))


def _turns(values: Mapping[str, Any]) -> Any:
    return next((values[name] for name in _TURNS if name in values), None)


def _images(value: Any, depth: int) -> Iterator[int]:
    """Characters of the data of each image among the parts of these turns."""
    for part in value if isinstance(value, list) and depth <= _MAX_DEPTH else ():
        if not isinstance(part, dict) or (type(part.get("content")) is str and "type" not in part):
            continue
        inline = next((part[name] for name in _INLINE if name in part), None)
        if part.get("type") in _IMAGES or _is_image(inline):
            yield _num_chars(part, 0)
        else:
            for name in ("content", "parts", "output"):
                if type(inside := part.get(name)) is list:
                    yield from _images(inside, depth + 1)


def _is_image(inline: Any) -> bool:
    kind = inline.get("mimeType", inline.get("mime_type")) if isinstance(inline, dict) else None
    return isinstance(kind, str) and kind.startswith("image/")


def _num_chars(value: Any, depth: int) -> int:
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, dict) and depth <= _MAX_DEPTH else ()
    return sum(_num_chars(one, depth + 1) for one in inside)


def _key(values: Mapping[str, Any], tenant: str) -> bytes:
    """Of the beginning that all turns of a conversation have in common: system prompt, tools and the first turn of the
    user, without marks for caching, which move from turn to turn; or of the key that the client gives itself. Empty for
    a request without either."""
    hashed = xxhash.xxh3_128()
    if isinstance(own := values.get("prompt_cache_key"), str) and own:
        feed(hashed, [tenant, own])
        return hashed.digest()
    turns = _turns(values)
    if not turns:
        return b""
    beginning = list(_first(turns)) if isinstance(turns, list) else turns
    feed(hashed, [tenant, [_unmarked(values.get(name), 0) for name in _BEFORE], _unmarked(beginning, 0)])
    return hashed.digest()


def _is_of_one_request(block: Any) -> bool:
    """Claude Code begins its system prompt with a line about the request, which need not stay the same."""
    text = block.get("text") if isinstance(block, dict) else None
    return isinstance(text, str) and text.startswith("x-anthropic-billing-header:")


def _first(turns: list[Any]) -> Iterator[Any]:
    """Up to the first turn of the user."""
    for turn in turns:
        yield turn
        if not isinstance(turn, dict) or turn.get("role", "user") == "user":
            return


def _unmarked(value: Any, depth: int) -> Any:
    """Without marks for caching; a text that is the only part of its message is that text."""
    if isinstance(value, list):
        if depth > _MAX_DEPTH + 1:
            return value
        items = [_unmarked(item, depth + 1) for item in value if not _is_of_one_request(item)]
        (only,) = items if len(items) == 1 else (None,)
        is_text = isinstance(only, dict) and only.get("type") == "text" and only.keys() == {"type", "text"}
        return only["text"] if isinstance(only, dict) and is_text else items
    if isinstance(value, dict):
        if depth > _MAX_DEPTH + 1:
            return value
        return {name: _unmarked(item, depth + 1) for name, item in value.items() if name != "cache_control"}
    return value
