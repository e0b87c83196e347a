from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.logs.lines import Fields, JsonLines, Lines, escaped


@pytest.mark.parametrize("exact", [1732247999.0, 1732247999.9994, 1732247999.9996, 1732248000.0, 1732204800.123])
def test_a_line_is_what_the_logging_module_would_write(exact: float) -> None:
    ours, theirs = Lines(), logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    for created in (exact, exact + 0.25, exact + 1, exact - 3600):
        record = logging.makeLogRecord({"name": "kvasir.access", "levelname": "INFO", "msg": "a=%d", "args": (3,)})
        record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
        assert ours.format(record) == theirs.format(record)


FORGED = "x\n2026-11-22 10:00:00,000 INFO kvasir.access request_id=forged status=200 \x1b[2K\r\u2028\u202e\x9b\0\x7f"


@given(st.text() | st.just(FORGED))
def test_whatever_is_logged_is_one_line_that_no_terminal_acts_upon(text: str) -> None:
    class OddError(Exception):
        pass

    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "model=%s", "args": (text,)})
    assert Lines().format(record).isprintable()
    record.exc_info = (OddError, OddError(text), None)
    first, second, *_, last = Lines().format(record).split("\n")
    assert second == "Traceback (most recent call last):"
    assert first.isprintable()
    assert last.isprintable()


def test_what_is_escaped_can_still_be_read() -> None:
    assert escaped("é ✓ a\\b") == "é ✓ a\\b"
    assert escaped("a\nb\x1b[1m\u2028\udc80") == "a\\nb\\x1b[1m\\u2028\\udc80"


@given(st.text() | st.just(FORGED))
def test_a_json_line_is_one_object_that_reads_as_what_was_logged(text: str) -> None:
    fields = Fields(model=text, cached_tokens=0, status=200)
    whole = {"time": "2024-11-22T00:00:00.250Z", "level": "INFO", "logger": "a"}
    record = logging.makeLogRecord({"name": "a", "levelname": "INFO", "msg": "%s", "args": fields})
    record.created = 1732233600.25
    line = JsonLines().format(record)
    assert line.isprintable()
    assert json.loads(line) == {**whole, **fields}
    record.args = None
    record.msg = text
    record.exc_info = (OSError, OSError(text), None)
    told = json.loads(JsonLines().format(record))
    assert told["message"] == text
    assert told["traceback"].startswith("Traceback (most recent call last):\nOSError: ")


def test_text_leaves_out_empty_fields_and_quotes_what_could_be_taken_for_another_field() -> None:
    fields = Fields(model="x status=200", cached_tokens=0, engine=None, queue_ms=1.5)
    assert str(fields) == 'model="x status=200" queue_ms=1.5'
