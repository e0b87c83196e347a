"""The event loop tells how long it stood still."""

from __future__ import annotations

import threading
import time

from tests.fakes.gateway import Gateway, running
from tests.fakes.waiting import until

NAME = 'kvasir_event_loop_{}_seconds_bucket{{le="{}"}} '
STOP_S = 0.2


async def looks(gateway: Gateway, which: str, within_s: float | None = None) -> int:
    """How many were late, of those within so many seconds or of all."""
    line = NAME.format(which, "+Inf" if within_s is None else within_s)
    async with gateway.session.get(gateway.url + "/metrics") as response:
        text = await response.text()
    return int(float(text.partition(line)[2].partition("\n")[0]))


async def late(gateway: Gateway, which: str) -> int:
    """Looks that were late by more than 0.1 s."""
    return await looks(gateway, which) - await looks(gateway, which, 0.1)


async def test_a_stop_of_the_loop_is_seen_and_whether_the_gateway_itself_worked() -> None:
    async with running() as gateway:

        async def grew(which: str, before: int) -> bool:
            return await late(gateway, which) > before

        before, own_before = await late(gateway, "lag"), await late(gateway, "own_lag")
        threading.Event().wait(STOP_S)  # no work: what a machine without a free processor looks like
        await until(lambda: grew("lag", before))
        assert await late(gateway, "own_lag") == own_before
        ends_s = time.process_time() + STOP_S
        while time.process_time() < ends_s:
            pass
        await until(lambda: grew("own_lag", own_before))
