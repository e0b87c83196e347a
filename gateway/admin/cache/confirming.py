"""What has to be confirmed before it is done: a token says who asked for what, and when. Pure; nothing is stored, so
any gateway takes the token of another.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

LIFE_S: Final = 120.0
"""Seconds in which what was shown can be confirmed."""

_TOKEN: Final = re.compile(r"([0-9]{1,13})-([0-9a-f]{64})", re.ASCII)


def token_for(key: bytes, what: str, at_s: float) -> str:
    """`key` is the asker's, `what` all that is asked for; `at_s` in seconds since 1970, to the millisecond."""
    at_ms = round(at_s * 1e3)
    return f"{at_ms}-{_signed(key, what, at_ms)}"


def asked_at(token: str, key: bytes, what: str, now_s: float) -> float | None:
    """The second at which the same asker was shown the same. None if it is not theirs, for something else, or over."""
    found = _TOKEN.fullmatch(token)
    if found is None or not hmac.compare_digest(found[2], _signed(key, what, int(found[1]))):
        return None
    at_s = int(found[1]) / 1e3
    return at_s if at_s <= now_s + LIFE_S and now_s - at_s <= LIFE_S else None


def _signed(key: bytes, what: str, at_ms: int) -> str:
    return hmac.new(key, f"{at_ms}\n{what}".encode(), hashlib.sha256).hexdigest()
