"""Who waits and who runs, by lane: the online lane before the batch lane, within a lane first come, first served.

Knows nothing about blocks or steps. engine/planner.py moves sequences, engine/scheduler.py lets them in and out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from engine.protocol import LANES, Lane
from engine.sequence import Sequence, Status


class Lanes:
    """Every sequence that is not finished is in here once, where its status says."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, OrderedDict[Sequence, None]] = {lane: OrderedDict() for lane in LANES}
        self._running: dict[Lane, dict[Sequence, None]] = {lane: {} for lane in LANES}
        self._waiting_tokens: dict[Lane, int] = dict.fromkeys(LANES, 0)

    @property
    def num_waiting(self) -> int:
        return sum(map(self.count_waiting, LANES))

    @property
    def num_running(self) -> int:
        return sum(map(self.count_running, LANES))

    def count_waiting(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    def count_running(self, lane: Lane) -> int:
        return len(self._running[lane])

    def count_unprefilled(self, lane: Lane) -> int:
        """Tokens of its sequences that are still to be prefilled; of those that wait, what could not be found when they
        arrived."""
        running = sum(left for s in self.running(lane) if (left := s.num_tokens - s.num_computed) > 1)
        return self._waiting_tokens[lane] + running

    def running(self, *lanes: Lane) -> Iterator[Sequence]:
        """In the order in which they were started, lane by lane; of all lanes when none is named."""
        return (sequence for lane in lanes or LANES for sequence in self._running[lane])

    def first_waiting(self, lane: Lane, count: int) -> list[Sequence]:
        return list(islice(self._waiting[lane], count))

    def runs(self, lane: Lane) -> bool:
        """Whether any sequence of a lane runs."""
        return bool(self._running[lane])

    def choose_victim(self) -> Sequence:
        """The youngest running sequence of the batch lane, else of the online lane. There must be one."""
        running = self._running["batch"] or self._running["online"]
        return max(reversed(running), key=lambda sequence: sequence.arrived_s)  # of equals the last admitted

    def add(self, sequence: Sequence) -> None:
        """A new one waits at the end of its lane."""
        self._waiting[sequence.lane][sequence] = None
        self._waiting_tokens[sequence.lane] += _unknown(sequence)

    def start(self, sequence: Sequence) -> None:
        del self._waiting[sequence.lane][sequence]
        self._waiting_tokens[sequence.lane] -= _unknown(sequence)
        self._running[sequence.lane][sequence] = None
        sequence.status = Status.RUNNING

    def put_back(self, sequence: Sequence) -> None:
        """One that ran waits again, at the head of its lane."""
        del self._running[sequence.lane][sequence]
        sequence.status = Status.WAITING
        queue = self._waiting[sequence.lane]
        queue[sequence] = None
        queue.move_to_end(sequence, last=False)
        self._waiting_tokens[sequence.lane] += _unknown(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            del self._running[sequence.lane][sequence]
        else:
            del self._waiting[sequence.lane][sequence]
            self._waiting_tokens[sequence.lane] -= _unknown(sequence)
        sequence.status = Status.FINISHED


def _unknown(sequence: Sequence) -> int:
    """Its tokens that could not be found when it arrived."""
    return sequence.num_tokens - sequence.findable_tokens
