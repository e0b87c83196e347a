"""Waiting for what shows itself only to whoever asks, such as a key in Redis or another process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

LOOK_S = 0.01


async def until(holds: Callable[[], bool | Awaitable[bool]], limit_s: float = 30.0) -> None:
    """Returns as soon as `holds()` is true. Raises TimeoutError when it is not within the limit."""
    async with asyncio.timeout(limit_s):
        while True:
            answer = holds()
            if await answer if inspect.isawaitable(answer) else answer:
                return
            await asyncio.sleep(LOOK_S)
