"""Who pays for a generation that several requests share: the one that has been there for longest, until it leaves; then
the next. So all that was computed is accounted for once, with a request that was there when it was.

Knows no cache and no ledger. stage.py asks it; limits, metrics and ledger read the traces of requests.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from gateway.types import Trace

_OWN: Final = frozenset(("fork", "hit", "lookup", "paid_tokens", "repeat", "shared"))
"""Of a request itself, whoever its answer was generated for."""

_COMPUTED: Final = tuple(one.name for one in fields(Trace) if one.name not in _OWN)


class Bill:
    """Of one generation. `work` is the trace that is filled in on its way."""

    def __init__(self) -> None:
        self.work = Trace()
        self._readers: list[Trace] = []  # in the order in which they came
        self._begun = False  # the prompt is on somebody's account
        self._paid_tokens = 0  # of the completion, by those who have left

    def join(self, trace: Trace) -> None:
        """A request reads along."""
        self._readers.append(trace)
        trace.shared = self.work

    def leads(self, trace: Trace) -> bool:
        """Whether everything up to now was computed for this request: its client is told as if it were alone."""
        return not self._begun and bool(self._readers) and self._readers[0] is trace

    def show(self, trace: Trace) -> None:
        """What was computed up to now."""
        for name in _COMPUTED:
            setattr(trace, name, getattr(self.work, name))

    def leave(self, trace: Trace) -> None:
        """The request has read the end, or gives up. What was computed while it was the first goes into its trace.

        Who leaves before the first token leaves all of it to the next. Does nothing the second time.
        """
        if not any(one is trace for one in self._readers):
            return
        trace.shared = None
        first, leads = self._readers[0] is trace, self.leads(trace)
        self._readers = [one for one in self._readers if one is not trace]
        if not first or (self.work.first_token_ms is None and self._readers):
            return
        if leads:
            self.show(trace)
        else:
            trace.paid_tokens = trace.completion_tokens = self.work.completion_tokens - self._paid_tokens
        self._begun, self._paid_tokens = True, self.work.completion_tokens
