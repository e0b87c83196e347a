"""What aiohttp refuses by itself, before there is a route or a record: it is counted, and has a line in the log.

aiohttp answers with a plain 400 and logs a traceback. The filter puts a line in its slot that has no bytes of the
client in it but the name of a header, and no traceback: any port scanner could fill the log with them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from typing import Final

from aiohttp.http_exceptions import BadStatusLine, HttpProcessingError

log = logging.getLogger(__name__)

_TWICE: Final = re.compile(r"Duplicate '([A-Za-z-]{1,40})' header")


class Malformed(logging.Filter):
    """Of the logger that an application is run with."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Mapping[str, int]:
        """Refused requests by reason: `DuplicateHeader`, `TooManyConnections`, or the class of aiohttp's error."""
        return self._counts

    def count(self, reason: str) -> None:
        """One that somebody else has refused."""
        self._counts[reason] += 1

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        twice = _TWICE.search(error.message)
        reason = "DuplicateHeader" if twice else type(error).__name__
        self._counts[reason] += 1
        level = logging.DEBUG if isinstance(error, BadStatusLine) else logging.WARNING  # that was no HTTP at all
        what = f"the header {twice[1]} came twice" if twice else reason
        log.log(level, "a request was refused with 400 before it had a route: %s", what)
        return False


MALFORMED: Final = Malformed()
"""The process has one logger for all applications."""
