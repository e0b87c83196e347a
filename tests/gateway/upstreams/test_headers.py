"""What the headers of an upstream's answer say."""

from __future__ import annotations

import pytest

from gateway.upstreams.headers import retry_after_s


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
