"""What the prompts of lines begin with, by their text: lines that begin alike run one after the other. Pure.

Nothing is tokenised for it, which takes a minute for a large job, fills the memos that online requests live on, and is
done again when the lines run. Of texts that begin alike the tokens do, too, up to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import orjson

from engine.protocol import TOKEN_BYTES, chain_digests
from gateway.api.call import Call
from gateway.types import ChatPrompt, Prompt, TextPrompt, TokenPrompt

BLOCK_TOKENS: Final = 16
"""Of four bytes each: how finely beginnings are compared."""

MAX_PREFIX_BYTES: Final = 1 << 19
"""Of a prompt, that decide about its place among others."""

_READ_IN_ORDER: Final = ("tools", "functions", "system", "instructions", "messages", "prompt", "input")
"""Where the APIs have what a model reads, about in the order in which it does."""


class Beginning(NamedTuple):
    """What a prompt begins with, and how many tokens it is taken to have. `digests` are chained, as those of blocks."""

    digests: bytes
    num_tokens: int


def beginning_of_body(body: Mapping[str, Any]) -> Beginning:
    """For an upstream: what it reuses is guessed from what a client wrote."""
    return _beginning(b"".join(orjson.dumps(body.get(name)) for name in _READ_IN_ORDER))


def beginning_of_call(call: Call, key: str) -> Beginning:
    """For an engine: of its first prompt, whatever dialect it came in. Those of other keys and salts share nothing;
    `key` is the call's where it separates."""
    return _beginning(_text(call.prompts[0]), orjson.dumps((key, call.cache_salt)))


def _text(prompt: Prompt) -> bytes:
    match prompt:
        case TokenPrompt():
            return prompt.tokens
        case TextPrompt():
            return prompt.text.encode()
        case ChatPrompt():
            return b"".join(_in_order(prompt))


def _in_order(prompt: ChatPrompt) -> list[bytes]:
    """What the system says stands before the tools, as most templates have it."""
    messages = [orjson.dumps(message, option=orjson.OPT_SORT_KEYS) for message in prompt.messages]
    num_first = int(bool(prompt.messages) and prompt.messages[0].get("role") in ("system", "developer"))
    return [*messages[:num_first], *map(orjson.dumps, prompt.tools), *messages[num_first:]]


def _beginning(text: bytes, root: bytes = b"") -> Beginning:
    return Beginning(chain_digests(root, text[:MAX_PREFIX_BYTES], BLOCK_TOKENS), len(text) // TOKEN_BYTES)
