"""Headers with an upstream's limits, read, and written again by the client's dialect."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gateway.api.anthropic.wire import ANTHROPIC
from gateway.api.openai.wire import OPENAI
from gateway.types import Allowance, Room
from gateway.upstreams.translation.limits import id_of, limits_of

NOW = datetime(2026, 11, 24, 6, 0, 0, tzinfo=UTC).timestamp()


def openai(kind: str, limit: str, remaining: str, reset: str) -> list[tuple[str, str]]:
    told = {"limit": limit, "remaining": remaining, "reset": reset}
    return [(f"X-RateLimit-{what.title()}-{kind}", value) for what, value in told.items()]


def anthropic(kind: str, limit: str, remaining: str, reset: str) -> list[tuple[str, str]]:
    told = {"limit": limit, "remaining": remaining, "reset": reset}
    return [(f"anthropic-ratelimit-{kind}-{what}", value) for what, value in told.items()]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("1s", 1),
        ("6m0s", 360),
        ("120ms", 0.12),
        ("1h2m3.5s", 3723.5),
        ("1d1s", 86401),
        ("59.7", 0),
        ("soon", 0),
        ("", 0),
        ("999999h", 0),  # no time that anybody waits
        ("2026-11-24T06:01:30Z", 90),
        ("2026-11-24T07:01:30.5+01:00", 90.5),
        ("2026-11-24T06:01:30", 90),
        ("2026-11-24T05:00:00Z", 0),
        ("9999-12-31T23:59:59Z", 0),
        ("0001-01-01T00:00:00+23:59", 0),
    ],
)
def test_a_reset_is_a_duration_or_a_time(written: str, seconds: float) -> None:
    assert limits_of(openai("tokens", "10", "9", written), NOW) == Allowance(tokens=Room(10, 9, seconds))


@pytest.mark.parametrize("odd", [("", "1"), ("1", ""), ("-1", "1"), ("1e3", "1"), ("9" * 13, "1"), ("٣", "1.5")])
def test_what_is_no_number_is_no_limit(odd: tuple[str, str]) -> None:
    assert limits_of(openai("tokens", *odd, "1s"), NOW) is None
    assert limits_of([("content-type", "text/plain")], NOW) is None


def test_limits_of_anthropic_are_written_as_openais() -> None:
    reset = "2026-11-24T06:06:00Z"
    told = anthropic("requests", "50", "49", reset) + anthropic("input-tokens", "40000", "39000", reset)
    found = limits_of(told + anthropic("output-tokens", "8000", "7999", reset), NOW)
    assert found is not None
    assert OPENAI.allowance(found) == {
        "x-ratelimit-limit-requests": "50",
        "x-ratelimit-remaining-requests": "49",
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-limit-tokens": "40000",  # of prompts, which run out first as a rule
        "x-ratelimit-remaining-tokens": "39000",
        "x-ratelimit-reset-tokens": "6m0s",
    }


def test_limits_of_openai_are_written_as_anthropics() -> None:
    found = limits_of(openai("requests", "60", "59", "1s") + openai("tokens", "150000", "149984", "6m0s"), NOW)
    assert found is not None
    written = ANTHROPIC.allowance(found)
    resets = {name: datetime.fromisoformat(written.pop(name)) for name in list(written) if name.endswith("-reset")}
    assert written == {
        "anthropic-ratelimit-requests-limit": "60",
        "anthropic-ratelimit-requests-remaining": "59",
        "anthropic-ratelimit-tokens-limit": "150000",
        "anthropic-ratelimit-tokens-remaining": "149984",
    }
    apart = resets["anthropic-ratelimit-tokens-reset"] - resets["anthropic-ratelimit-requests-reset"]
    assert timedelta(seconds=358) < apart < timedelta(seconds=361)


def test_an_id_is_one_word() -> None:
    assert id_of([("Request-Id", "req_011CSHoE")]) == "req_011CSHoE"
    assert id_of([("x-request-id", "a b"), ("X-Request-Id", "req-1")]) == "req-1"
    assert id_of([("x-request-id", "x" * 129), ("cf-ray", "1")]) == ""
