"""Two processes that ask each other; here both are in one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.peer import MAX_ASKED, Peer

LIMIT_S = 30.0


@asynccontextmanager
async def pair(answer: Any) -> AsyncIterator[tuple[Peer, Peer]]:
    ours, theirs = socket.socketpair()
    asks, answers = Peer(answer), Peer(answer)
    await asks.connect(ours)
    await answers.connect(theirs)
    try:
        yield asks, answers
    finally:
        await asks.close()
        await answers.close()


async def test_both_ask_and_answers_come_in_any_order() -> None:
    first = asyncio.Event()

    async def answer(what: str, value: Any) -> Any:
        if value == 0:
            await first.wait()
        return what, value

    async with pair(answer) as (one, other):
        late = asyncio.create_task(one.ask("n", 0, timeout_s=LIMIT_S))
        assert await one.ask("n", {("a", 1): b"x" * (1 << 20)}, timeout_s=LIMIT_S) == (
            "n",
            {("a", 1): b"x" * (1 << 20)},
        )
        assert await other.ask("m", timeout_s=LIMIT_S) == ("m", None)
        first.set()
        assert await late == ("n", 0)


async def test_what_waits_fails_when_the_other_end_closes() -> None:
    asked = asyncio.Event()

    async def answer(what: str, value: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async with pair(answer) as (one, other):
        waiting = asyncio.create_task(one.ask("n", timeout_s=LIMIT_S))
        await asked.wait()
        await other.close()
        with pytest.raises(ConnectionError):
            await waiting
        with pytest.raises(ConnectionError):
            await one.ask("n", timeout_s=LIMIT_S)


async def test_questions_have_a_limit_in_number_and_time() -> None:
    async def answer(what: str, value: Any) -> Any:
        await asyncio.Event().wait()

    async with pair(answer) as (one, _):
        waiting = [asyncio.create_task(one.ask("n", timeout_s=0.2)) for _ in range(MAX_ASKED)]
        await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            await one.ask("n", timeout_s=LIMIT_S)
        assert {type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {TimeoutError}


async def test_before_it_is_connected_nothing_can_be_asked() -> None:
    with pytest.raises(ConnectionError):
        await Peer(lambda what, value: asyncio.sleep(0)).ask("n", timeout_s=LIMIT_S)
