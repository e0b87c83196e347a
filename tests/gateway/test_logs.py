from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from gateway.logs import FORMAT, Lines


@pytest.mark.parametrize("exact", [1732247999.0, 1732247999.9994, 1732247999.9996, 1732248000.0, 1732204800.123])
def test_a_line_is_what_the_logging_module_would_write(exact: float) -> None:
    ours, theirs = Lines(), logging.Formatter(FORMAT)
    for created in (exact, exact + 0.25, exact + 1, exact - 3600):
        record = logging.makeLogRecord({"name": "kvasir.access", "levelname": "INFO", "msg": "a=%d", "args": (3,)})
        record.created, record.msecs = created, int((created - int(created)) * 1000) + 0.0
        assert ours.format(record) == theirs.format(record)


def test_lines_of_the_level_go_to_stderr_with_their_time_and_name() -> None:
    program = "import logging, gateway.logs as logs; logs.set_up('INFO'); log = logging.getLogger('a.b')\n"
    program += "log.info('one %s', 1); log.debug('two'); log.warning('three')\n"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    assert re.fullmatch(rf"{time} INFO a\.b one 1\n{time} WARNING a\.b three\n", told.stderr), told.stderr
    assert told.stdout == ""
