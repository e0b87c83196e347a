"""A queue whose time is a number, and guests who take its places: no engines, no sockets, no waiting in real time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from engine.protocol import Load
from gateway.config import QueueSettings
from gateway.queues.slots import SlotQueue
from gateway.types import Ask
from tests.fakes.pipeline import FakeEngine, hello

NORTH, SOUTH = "north", "south"
FAR = 1e9


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time is a number that jumps to the next timer when nothing else is left to do."""

    def __init__(self) -> None:
        self.now = 1000.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if events := select(0):
                return events
            if timeout is None:
                raise RuntimeError("everything waits and nothing will ever happen")
            self.now += timeout
            return []

        selector.select = jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(work())


def queue_of(
    places: int = 1, waiting: int = 100, per_tenant: int = 100, max_wait_s: float = 60.0, batch_slots: int = 2
) -> SlotQueue[FakeEngine]:
    limits = QueueSettings(
        slots_per_engine=places,
        max_waiting=waiting,
        max_waiting_per_tenant=per_tenant,
        max_wait_s=max_wait_s,
        batch_slots_per_engine=batch_slots,
    )
    return SlotQueue(limits, clock=lambda: asyncio.get_running_loop().time())


def ask(tenant: str = NORTH, deadline_s: float = FAR, prompt_tokens: int = 100, **fields: Any) -> Ask:
    return Ask(tenant, prompt_tokens, deadline_s, **fields)


@dataclass
class Guests:
    """Tasks that take a place, say so in `served`, and hold it until told to leave."""

    queue: SlotQueue[FakeEngine]
    engines: list[FakeEngine] = field(default_factory=lambda: [FakeEngine(hello())])
    served: list[str] = field(default_factory=list)
    where: dict[str, str] = field(default_factory=dict)
    leave: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def come(self, name: str, tenant: str = NORTH, deadline_s: float = FAR, **fields: Any) -> asyncio.Task[None]:
        self.leave[name] = asyncio.Event()

        async def stay() -> None:
            async with self.queue.slot(self.engines, ask(tenant, deadline_s, **fields)) as engine:
                self.served.append(name)
                self.where[name] = engine.name
                await self.leave[name].wait()

        self.tasks[name] = asyncio.create_task(stay())
        return self.tasks[name]

    async def go(self, *names: str) -> None:
        for name in names:
            self.leave[name].set()
            await self.tasks[name]
        await turn()


def engines(*names: str, **loads: Load) -> list[FakeEngine]:
    return [FakeEngine(hello(incarnation=name), name, loads.get(name, Load())) for name in names]


async def turn(times: int = 5) -> None:
    for _ in range(times):
        await asyncio.sleep(0)
