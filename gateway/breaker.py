"""When an upstream is left alone. A state machine without I/O; time comes from the clock that it is given.

    closed     asked as ever; `failures` in a row open it
    open       not asked until `open_s` seconds are over
    half-open  asked by one request at a time; its success closes, its failure opens it again

Whoever was admitted says how it went: succeeded, failed, or abandoned (it cannot tell). An answer that begins says so,
too, because its end may be far: it closes what was open, but an upstream whose answers all break off begins each of
them, so it forgives no failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Of one upstream."""

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._most = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0  # in a row
        self._opened_s: float | None = None  # None while it is closed
        self._probing = False

    @property
    def state(self) -> State:
        if self._opened_s is None:
            return "closed"
        return "open" if self._clock() < self._opened_s + self._open_s else "half-open"

    def admit(self) -> bool:
        """Whether the upstream may be asked now."""
        if self.state == "half-open" and not self._probing:
            self._probing = True
            return True
        return self.state == "closed"

    def wait_s(self) -> float:
        """Seconds until it may be asked again; 0: now. While one request tries it, as long as it stays open."""
        if self._opened_s is None:
            return 0.0
        if self._probing:
            return self._open_s
        return max(0.0, self._opened_s + self._open_s - self._clock())

    def began(self) -> None:
        """An answer, which has still to come to its end."""
        if self._opened_s is not None:
            self.succeeded()

    def succeeded(self) -> None:
        self._failures, self._opened_s, self._probing = 0, None, False

    def failed(self) -> None:
        """Requests that were admitted before it opened do not keep it open for longer."""
        self._failures += 1
        if self._probing or (self._opened_s is None and self._failures >= self._most):
            self._opened_s, self._probing = self._clock(), False

    def abandoned(self) -> None:
        """The client left before anything was known: the next one may try."""
        self._probing = False
