"""What clients may see of an upstream's answer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.redaction import QuotedError, Secrets, retry_after_s

KEY = "sk-upstream/0+9="
SECRETS = Secrets(
    KEY, {"authorization": "Bearer the-other-key", "x-team": "team-secret", "x-env": "prod", "x-title": "Some Title"}
)


@pytest.mark.parametrize(
    "quoting",
    [
        b"Incorrect API key provided: sk-upstream/0+9=.",
        rb'{"error":"the key sk-upstream\/0+9= is wrong"}',
        b"the-other-key has no access",
        b"header Bearer the-other-key",
        b"team-secret is no team",
    ],
)
def test_a_secret_is_found_however_it_is_quoted(quoting: bytes) -> None:
    assert SECRETS.is_quoted(quoting)


@pytest.mark.parametrize("harmless", [b"the product is unknown", b"sk-up***9=", b"a Bearer token is missing", b""])
def test_what_is_too_short_to_be_told_from_a_word_is_no_secret(harmless: bytes) -> None:
    assert not SECRETS.is_quoted(harmless)


def test_in_answers_only_what_opens_something_is_looked_for() -> None:
    assert told([b"... the-other-key ..."]) == (b"", True)
    assert told([b"Welcome to Some Title, team-secret!"]) == (b"Welcome to Some Title, team-secret!", False)


def told(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What passed, and whether it ended there."""
    passing, passed = SECRETS.filter(), b""
    try:
        for piece in pieces:
            passed += passing.feed(piece)
    except QuotedError:
        return passed, True
    return passed + passing.rest(), False


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 200)), st.sampled_from(["sk-upstream/0+9=", "the-other-key"]))
def test_nothing_of_a_key_passes_wherever_the_bytes_are_cut(cuts: list[int], key: str) -> None:
    before = b'data: {"a": "sks-sk-upt thethe-o"}\n\n'
    passed, ended = told(cut(before + key.encode() + b" more", cuts))
    assert ended
    assert before.startswith(passed)


@given(st.lists(st.integers(0, 200)))
def test_what_only_begins_like_a_key_passes_unchanged(cuts: list[int]) -> None:
    text = b"sk-upstream/0+9 sk-up the-other-ke the-the- sk-upstream/0+9"
    assert told(cut(text, cuts)) == (text, False)


def test_whole_events_are_not_held_back() -> None:
    passing = SECRETS.filter()
    assert passing.feed(b'data: {"a":"sk-up"}\n\n') == b'data: {"a":"sk-up"}\n\n'


def test_who_has_nothing_to_hide_passes_everything() -> None:
    nothing = Secrets(None, {})
    assert nothing.filter().feed(b"sk-upstream") == b"sk-upstream"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "86400"}, 86400.0),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "7", "retry-after-ms": "soon"}, 7.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({}, None),
    ],
)
def test_an_upstream_says_when_it_wants_to_be_asked_again(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


@pytest.mark.parametrize(
    "said",
    [
        "",
        "soon",
        "-5",
        "nan",
        "1e400",
        "9" * 400,
        "Sun, 06 Nov 99999999999999999999 08:49:37 GMT",
        "Wed, 21 Oct 2015 07:28:00 +99999999999999",
        "Fri, 31 Dec 9999 23:59:59 -2300",
    ],
)
def test_what_is_no_time_says_nothing(said: str) -> None:
    assert retry_after_s({"retry-after": said}) is None
