"""The gateway's own secrets at one upstream, and where an upstream quotes them: in headers, in errors, and in answers
while they pass. Pure.

A key that an upstream echoes is still the operator's. Headers of the settings are as secret, but one with a common
value (the name of an app, a beta) may well be quoted by an answer that means something else; so that in answers only
those are looked for that open something.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

MIN_CHARS: Final = 8
"""Of a secret. What is shorter is in many texts that quote nothing."""

_OPENS: Final = re.compile(r"auth|key|token|secret|cookie|credential", re.IGNORECASE)
"""In the name of a header whose value lets somebody in."""

_SCHEME: Final = re.compile(r"(?:bearer|basic|token|api-?key|key)\s+(\S.*)", re.IGNORECASE)
"""In front of what is secret of a value, and quoted without it."""


class QuotedError(Exception):
    """There is a secret in it."""


class Hidden:
    """Of one upstream, whose key this is, and whose headers."""

    def __init__(self, key: str | None, headers: Mapping[str, str]) -> None:
        opens = [key or "", *(value for name, value in headers.items() if _OPENS.search(name))]
        self._keys = _written(opens)
        self._all = _written([*opens, *headers.values()])

    @property
    def is_any(self) -> bool:
        """Whether there is something to hide."""
        return bool(self._all)

    def is_quoted(self, text: bytes) -> bool:
        """Whether any secret is in it."""
        return any(secret in text for secret in self._all)

    def is_key_quoted(self, text: bytes) -> bool:
        """Whether one is in it that opens something."""
        return any(secret in text for secret in self._keys)

    def passing(self) -> Passing:
        """Over one answer."""
        return Passing(self._keys)


class Passing:
    """Looks through the pieces of one answer as they pass, cut anywhere. What may be the beginning of a secret waits
    for the next piece; all else passes at once."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = secrets
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """What may go on now. Raises QuotedError, and nothing of the secret has passed."""
        text = self._held + piece if self._held else piece
        if any(secret in text for secret in self._secrets):
            raise QuotedError
        end = len(text) - max((_begun(text, secret) for secret in self._secrets), default=0)
        self._held = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """At the end of the answer: it was the beginning of nothing."""
        rest, self._held = self._held, b""
        return rest


def _begun(text: bytes, secret: bytes) -> int:
    """Bytes at the end of a text with which the secret begins, without being whole."""
    first = secret[:1]
    at = text.find(first, max(0, len(text) - len(secret) + 1))
    while at >= 0 and not secret.startswith(text[at:]):
        at = text.find(first, at + 1)
    return len(text) - at if at >= 0 else 0


def _written(values: Sequence[str]) -> tuple[bytes, ...]:
    """As they may be quoted: with their scheme or without it, and with slashes as some servers write them in JSON."""
    bare = [match[1] for value in values if (match := _SCHEME.fullmatch(value.strip()))]
    secrets = {value for value in (*values, *bare) if len(value) >= MIN_CHARS}
    return tuple(sorted({one.encode() for value in secrets for one in (value, value.replace("/", "\\/"))}))
