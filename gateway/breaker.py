"""A circuit breaker. A state machine without I/O; time comes from the clock that it is given.

    closed     every request is admitted; `failures` in a row open it
    open       no request is admitted until `open_s` seconds are over
    half-open  one request at a time is admitted; its success closes the breaker, its failure opens it again

Each admitted request reports how it ended: succeeded, failed, or abandoned (not known). The begin of an answer is
reported as well, because its end may be far: it closes an open breaker, but does not reset the count of failures, as an
upstream may break off all of its answers.
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
        """Whether a request may be sent now."""
        if self.state == "half-open" and not self._probing:
            self._probing = True
            return True
        return self.state == "closed"

    def wait_s(self) -> float:
        """Seconds until a request may be admitted; 0: now. While one probes, as long as the breaker would stay open."""
        if self._opened_s is None:
            return 0.0
        if self._probing:
            return self._open_s
        return max(0.0, self._opened_s + self._open_s - self._clock())

    def began(self) -> None:
        """An answer begins; its end is reported later."""
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
        """The client left before anything was known: the next request may probe."""
        self._probing = False
