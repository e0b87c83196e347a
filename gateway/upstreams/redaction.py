"""Removes what a client must not see from an upstream's answer. Pure.

Headers: those of one connection, those that the gateway sets, and those of the operator's account.

Secrets: the upstream's key, in headers, errors and passing answers. Headers of the settings are secret, too, but common
values (the name of an app, a beta) may occur in any answer: in passing answers only those that give access are searched
for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_DROPPED: Final = frozenset(
    (
        # RFC 9110, 7.6.1: of one connection
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # of the upstream's host, which the client does not talk to
        "set-cookie",
        "set-cookie2",
        "alt-svc",
        "strict-transport-security",
        "location",
        "www-authenticate",
        "date",
        "server",
        "via",
        "nel",
        "report-to",
        # of the operator's account
        "openai-organization",
        "openai-project",
        "anthropic-organization-id",
    )
)


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By name, in small letters; lines of one name as one list (RFC 9110, 5.3)."""
    values: dict[str, str] = {}
    for name, value in headers:
        values[name] = f"{values[name]}, {value}" if name in values else value
    return values


def visible(headers: Iterable[tuple[str, str]], secrets: Secrets) -> tuple[tuple[str, str], ...]:
    """The headers that go to the client; none with a secret in it."""
    shown, dropped = list[tuple[str, str]](), set[str]()
    for name, value in headers:
        lower = name.lower()
        if lower == "connection":
            dropped.update(named.strip().lower() for named in value.split(","))
        if lower in _DROPPED or lower.startswith("access-control-"):  # server.cors_origins decides who reads answers
            continue
        if not secrets.is_quoted(value.encode("utf-8", "surrogateescape")):
            shown.append((name, value))
    return tuple(item for item in shown if item[0].lower() not in dropped) if dropped else tuple(shown)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Retry-After of an upstream, in seconds: sent in milliseconds, seconds, or as a date. None without one."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    try:
        at = parsedate_to_datetime(headers.get("retry-after", "")).astimezone(UTC)
    except (ValueError, OverflowError):  # the second for years and zones that no calendar has
        return None
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


MIN_CHARS: Final = 8
"""Shorter values are not searched for: they occur in many texts."""

_GIVES_ACCESS: Final = re.compile(r"auth|key|token|secret|cookie|credential", re.IGNORECASE)
"""In the name of a header whose value gives access."""

_SCHEME: Final = re.compile(r"(?:bearer|basic|token|api-?key|key)\s+(\S.*)", re.IGNORECASE)
"""The scheme in front of a secret, which may be quoted without it."""


class QuotedError(Exception):
    """An answer contains a secret of the gateway."""


class Secrets:
    """The secrets of one upstream: its key and its configured headers."""

    def __init__(self, key: str | None, headers: Mapping[str, str]) -> None:
        access = [key or "", *(value for name, value in headers.items() if _GIVES_ACCESS.search(name))]
        self._keys = _written(access)
        self._all = _written([*access, *headers.values()])

    def is_quoted(self, text: bytes) -> bool:
        """Whether any secret is in it."""
        return any(map(text.__contains__, self._all))

    def filter(self) -> SecretFilter:
        """A filter for one answer."""
        return SecretFilter(self._keys)


class SecretFilter:
    """Looks through the chunks of one answer as they pass, cut anywhere. What may be the beginning of a secret waits
    for the next chunk; all else passes at once."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets = secrets
        self._waiting = b""

    def feed(self, chunk: bytes) -> bytes:
        """What may pass now. Raises QuotedError before any byte of the secret has passed."""
        if not self._secrets:
            return chunk
        text = self._waiting + chunk if self._waiting else chunk
        if any(map(text.__contains__, self._secrets)):
            raise QuotedError
        end = len(text) - max(_prefix_bytes(text, secret) for secret in self._secrets)
        self._waiting = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """What was held back, at the end of the answer."""
        rest, self._waiting = self._waiting, b""
        return rest


def _prefix_bytes(text: bytes, secret: bytes) -> int:
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
