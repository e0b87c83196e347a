"""The line in front of engines that are alike: a lane for online requests and one for batches, who waits in them, and
what has become of them. Without a clock and without I/O; slots.py moves them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from engine.protocol import Hello, Load
from engine.protocol import Lane as LaneName
from gateway.fair_queue import Pace
from gateway.queues.lane import EngineSlots, Lane, Waiter


class Engine(Protocol):
    """What the queue has to know of an engine."""

    @property
    def name(self) -> str: ...

    @property
    def hello(self) -> Hello: ...

    @property
    def load(self) -> Load: ...

    @property
    def prefilling(self) -> Mapping[str, int]: ...


E = TypeVar("E", bound=Engine)


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """Whether sessions push one another out of the caches of a model's engines. See overload.py."""

    holds: bool
    share: float  # of the engines' time that goes into computing again, from 0 to 1
    held_back: int  # requests that wait for room in a cache though an engine is free


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """What /metrics and /admin/stats show of a lane."""

    waiting: int
    in_flight: dict[str, int]  # by engine name
    waiting_by_tenant: dict[str, int]
    admitted: int  # since the start, as are the next three
    refused: int
    expired: int
    abandoned: int  # waiting requests whose client left
    overload: dict[str, OverloadStatus]  # by model; empty for the batch lane


@dataclass(slots=True, eq=False)
class WaitingRequest(Waiter):
    """A request, and the slot that it gets."""

    granted: asyncio.Future[EngineSlots[Any]] | None = None  # None before it turns out that it has to wait


@dataclass(slots=True)
class Figures:
    """Of one lane, over all engines."""

    waiting: int = 0
    waiting_by_tenant: Counter[str] = field(default_factory=Counter)
    admitted: int = 0
    refused: int = 0
    expired: int = 0
    abandoned: int = 0

    def left(self, tenant: str) -> None:
        """Somebody waits no more."""
        self.waiting -= 1
        self.waiting_by_tenant[tenant] -= 1
        if not self.waiting_by_tenant[tenant]:
            del self.waiting_by_tenant[tenant]


@dataclass(slots=True, eq=False)
class Line(Generic[E]):
    """The lanes of engines that are alike, and how quickly the online one moves."""

    online: Lane[E, WaitingRequest]
    batch: Lane[E, WaitingRequest]
    model: str
    overloaded: bool = False  # as was last told
    look: asyncio.TimerHandle | None = None  # at those who are held back
    pace: Pace = field(default_factory=Pace)

    def lane(self, name: LaneName) -> Lane[E, WaitingRequest]:
        return self.batch if name == "batch" else self.online

    @property
    def lanes(self) -> tuple[Lane[E, WaitingRequest], ...]:
        return self.online, self.batch


def left_over(slots: EngineSlots[E], most: int) -> int:
    """How many of the batch lane's `most` slots at an engine the online lane (`slots`) leaves: sequences
    that the engine could run besides, and none before what is to be prefilled for the online lane is."""
    load = slots.engine.load
    if load.prefill_backlog > load.batch_backlog:
        return 0
    online = load.running + load.waiting - load.batch_running - load.batch_waiting
    return min(most, max(0, slots.engine.hello.max_sequences - max(online, slots.taken)))


def alike(hello: Hello) -> Hashable:
    """Equal for engines that a prompt can be sent to as it is."""
    return hello.model, hello.namespace, hello.tokenizer, hello.context_tokens
