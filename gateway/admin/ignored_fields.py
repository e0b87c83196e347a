"""Unknown fields that requests had and the gateway ignored: a counter, and one line of the log for each name and day.

Names are the clients' own, so their number is bounded: further ones are counted and logged together, and so are those
of other characters than names have, which may be anything.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from gateway.admin.tallies import Counts
from gateway.api.unknown_fields import ODD

log = logging.getLogger(__name__)

MAX_NAMES: Final = 100
OTHER: Final = "other"
_DAY_S: Final = 86_400


class IgnoredFieldCounts(Counts):
    """By name of the field; `now` is in seconds since 1970."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        super().__init__(
            "kvasir_ignored_fields", "Requests with a field that the gateway does not know and ignored.", ("field",)
        )
        self._now = now
        self._names: set[str] = set()
        self._day = 0
        self._logged: set[str] = set()  # today

    def add(self, names: Iterable[str], endpoint: str, tenant: str) -> None:
        """Those of one request."""
        if (day := int(self._now() // _DAY_S)) != self._day:
            self._day = day
            self._logged.clear()
        for name in names:
            if name not in self._names:
                if len(self._names) >= MAX_NAMES or ODD in name:
                    name = OTHER
                else:
                    self._names.add(name)
            self.of(name).value += 1
            if name not in self._logged:
                self._logged.add(name)
                log.info(
                    "field '%s' of a request is unknown and was ignored (endpoint %s, tenant %s; api.unknown_fields); "
                    "said once a day",
                    name,
                    endpoint,
                    tenant,
                )
