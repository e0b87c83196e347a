"""Headers of requests in the form in which an upstream gets them, and which headers of its answer a client sees. Pure.

These are all but those of one connection, those that are ours to set, and those that tell of the operator's account.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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


def returned(headers: Iterable[tuple[str, str]], is_secret: Callable[[bytes], bool]) -> tuple[tuple[str, str], ...]:
    """Those that go to the client; none with a secret in it."""
    told = list(headers)
    named = {name.strip().lower() for key, value in told if key.lower() == "connection" for name in value.split(",")}
    return tuple(
        (name, value)
        for name, value in told
        if name.lower() not in _DROPPED
        and name.lower() not in named
        and not name.lower().startswith(
            "access-control-"
        )  # which pages may read answers is server.cors_origins' to say
        and not is_secret(value.encode("utf-8", "surrogateescape"))
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds until the upstream wants to be asked again, when it says so: in milliseconds, seconds, or as a date."""
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
