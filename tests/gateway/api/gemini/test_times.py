from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gateway.api.gemini.wire import duration, duration_s, timestamp, timestamp_s
from gateway.errors import BadRequestError


@pytest.mark.parametrize(
    ("written", "seconds"), [("3.5s", 3.5), ("300s", 300), ("0.000000001s", 1e-9), ("-1s", -1), ("0s", 0)]
)
def test_durations_are_seconds_that_end_with_s(written: str, seconds: float) -> None:
    assert duration_s(written, "ttl") == seconds
    assert duration(seconds) == written


@pytest.mark.parametrize("written", ["300", "5m", "1.0000000001s", ".5s", "1e3s", "s", "٣s", "9" * 13 + "s", 300, None])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(BadRequestError) as refused:
        duration_s(written, "ttl")
    assert refused.value.param == "ttl"


TEN = datetime(2026, 11, 21, 10, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2026-11-21T10:00:00Z", TEN),
        ("2026-11-21t10:00:00z", TEN),
        ("2026-11-21T10:00:00+00:00", TEN),
        ("2026-11-21T12:30:00+02:30", TEN),
        ("2026-11-21T10:00:00.25Z", TEN + 0.25),
        ("2026-11-21T10:00:00.250000000Z", TEN + 0.25),
    ],
)
def test_timestamps_are_rfc_3339(written: str, seconds: float) -> None:
    assert timestamp_s(written, "expireTime") == seconds


@pytest.mark.parametrize("written", ["2026-11-21", "2026-11-21T10:00:00", "2026-13-21T10:00:00Z", "soon", 5, ""])
def test_what_is_no_timestamp_is_refused(written: object) -> None:
    with pytest.raises(BadRequestError) as refused:
        timestamp_s(written, "expireTime")
    assert refused.value.param == "expireTime"


def test_a_timestamp_is_written_in_utc() -> None:
    assert timestamp(TEN + 0.25) == "2026-11-21T10:00:00.250000Z"
    assert timestamp_s(timestamp(TEN + 0.25), "x") == TEN + 0.25
