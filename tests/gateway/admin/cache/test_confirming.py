from __future__ import annotations

import pytest

from gateway.admin.cache.confirming import LIFE_S, asked_at, token_for

TOKEN = token_for(b"key", "what", 1000.25)


def test_a_token_says_when_the_same_asker_was_shown_the_same() -> None:
    for now_s in (1000.25, 1000.25 + LIFE_S, 999.0):  # clocks of gateways differ
        assert asked_at(TOKEN, b"key", "what", now_s) == 1000.25


@pytest.mark.parametrize(
    ("token", "key", "what", "now_s"),
    [
        (TOKEN, b"other", "what", 1001),
        (TOKEN, b"key", "more", 1001),
        (TOKEN, b"key", "what", 1001 + LIFE_S),
        (TOKEN, b"key", "what", 1000 - LIFE_S),
        ("2" + TOKEN[1:], b"key", "what", 2001),
        (TOKEN[:-1], b"key", "what", 1001),
        (TOKEN + "\n", b"key", "what", 1001),
        ("", b"key", "what", 1001),
        ("9" * 400 + TOKEN, b"key", "what", 1001),
    ],
)
def test_any_other_token_says_nothing(token: str, key: bytes, what: str, now_s: float) -> None:
    assert asked_at(token, key, what, now_s) is None
