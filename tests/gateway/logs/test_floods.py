from __future__ import annotations

import logging

import pytest

from gateway.logs import writer
from gateway.logs.writer import MAX_KINDS, Floods


def record(message: str, name: str = "a") -> logging.LogRecord:
    return logging.makeLogRecord({"name": name, "msg": message})


@pytest.fixture(autouse=True)
def _two_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_ALIKE", 2)


def test_each_kind_has_its_own_number_in_each_minute() -> None:
    now_s = [0.0]
    floods = Floods(lambda: now_s[0])
    assert [floods.admits(record("x %d")) for _ in range(4)] == [True, True, False, False]
    assert [floods.admits(record("x %d", "b")) for _ in range(2)] == [True, True]
    now_s[0] = 59.0
    assert floods.summary() == []
    now_s[0] = 60.0
    assert floods.summary() == ["2 more lines of a in a minute like: x %d"]
    assert floods.summary() == []
    assert floods.admits(record("x %d"))


def test_kinds_that_nobody_can_count_share_a_number() -> None:
    floods = Floods(lambda: 0.0)
    admitted = [floods.admits(record(str(number))) for number in range(MAX_KINDS + 10)]
    assert admitted == [True] * (MAX_KINDS + 2) + [False] * 8
