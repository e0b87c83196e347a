from __future__ import annotations

import logging

import pytest

from gateway.logs.lines import FORMAT, Later, Lines


@pytest.mark.parametrize("exact", [1732247999.0, 1732247999.9994, 1732247999.9996, 1732248000.0, 1732204800.123])
def test_a_line_is_what_the_logging_module_would_write(exact: float) -> None:
    ours, theirs = Lines(), logging.Formatter(FORMAT)
    for created in (exact, exact + 0.25, exact + 1, exact - 3600):
        record = logging.makeLogRecord({"name": "kvasir.access", "levelname": "INFO", "msg": "a=%d", "args": (3,)})
        record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
        assert ours.format(record) == theirs.format(record)


@pytest.mark.parametrize("created", [1732247999.0, 1732247999.9994, 1732248000.123])
def test_a_line_that_is_made_later_is_what_it_would_have_been(created: float) -> None:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": "%s", "args": ("one",)})
    record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
    assert Lines().later(Later(created, logging.INFO, "a.b", lambda: "one")) == logging.Formatter(FORMAT).format(record)
