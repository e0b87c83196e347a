"""What was set aside for one request."""

from __future__ import annotations

from collections.abc import Callable

from gateway.types import Usage


class Hold:
    """What was set aside for one request."""

    __slots__ = ("_settle",)

    def __init__(self, settle: Callable[[Usage | None], None]) -> None:
        self._settle: Callable[[Usage | None], None] | None = settle

    def settle(self, usage: Usage | None) -> None:
        """The request is over and used this much; the rest of the reservation is returned. None: unknown, and all of it
        stays spent. Does not block; further calls do nothing."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(usage)
