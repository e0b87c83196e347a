"""The primary of a Redis under sentinels is stopped while two gateways and an engine use it for all that it is for."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import BlockEvents
from engine.publish import Publisher, ResidencyTable
from gateway.config import BatchSettings, FileSettings, RedisSettings, TenantSettings
from gateway.index.index import PrefixIndex
from gateway.index.memory_index import MemoryIndex
from gateway.storage.redis_calls import RedisCalls
from tests.fakes.fake_engine import make_hello
from tests.fakes.redis_fleet import SentinelFleet, opened
from tests.fakes.waiting import until
from tests.fakes.whole import Whole, whole

BACK_S = 10.0
"""After that everything is as before."""

LINES = 600
TIMEOUT_S = 0.25
"""As is the default of redis.timeout_s."""

OPEN, BOUNDED = "key-of-open", "key-of-bounded"
CHAIN = b"".join(bytes([block]) * 16 for block in range(200))


def sections(folder: Path) -> dict[str, Any]:
    return {
        "tenants": (
            TenantSettings(name="open", keys=(OPEN,)),
            TenantSettings(name="bounded", keys=(BOUNDED,), requests_per_minute=2),
        ),
        "files": FileSettings(folder=folder / "files"),
        "batches": BatchSettings(folder=folder / "batches", max_in_flight=8, lease_s=3.0),
        "redis": RedisSettings(timeout_s=TIMEOUT_S),
    }


async def ask(one: Whole, key: str, text: str, **options: Any) -> str:
    """What the response cache had."""
    raw = await one.client.with_options(api_key=key).chat.completions.with_raw_response.create(
        model="demo", messages=[{"role": "user", "content": text}], max_tokens=2, temperature=0, **options
    )
    return str(raw.headers["x-kvasir-cache"])


async def is_refused(one: Whole) -> bool:
    try:
        await ask(one, BOUNDED, "a question too many", extra_headers={"cache-control": "no-store"})
    except openai.RateLimitError:
        return True
    return False


class Requests:
    """Different ones, one after the other, from `start` to `stop`."""

    def __init__(self, one: Whole) -> None:
        self._one = one
        self._stopping = False
        self.answered = 0
        self.failures: list[str] = []
        self.slowest_s = 0.0

    async def run(self) -> None:
        while not self._stopping:
            begun_s = time.monotonic()
            try:
                await ask(self._one, OPEN, f"question {self.answered} of many")
                self.answered += 1
            except openai.APIError as error:
                self.failures.append(repr(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun_s)

    def stop(self) -> None:
        self._stopping = True


class Index:
    """An engine's publisher, and a gateway that knows what is in Redis alone."""

    def __init__(self, redis: Any) -> None:
        self._hello = make_hello("m")
        self._table = ResidencyTable()
        self._publisher = Publisher(redis, self._table, self._hello, "unix:/nowhere", heartbeat_s=0.5, lease_s=60)
        self._index = PrefixIndex(MemoryIndex(), RedisCalls(redis, TIMEOUT_S), retry_s=1)

    async def __aenter__(self) -> Index:
        self._publisher.start()
        self._index.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._index.close()
        await self._publisher.close()

    def store(self, first: int, last: int) -> None:
        events = BlockEvents(stored=CHAIN[16 * first : 16 * last])
        self._table.apply(events)
        self._publisher.publish(events)

    async def holds(self, blocks: int) -> bool:
        name = self._hello.incarnation
        return (await self._index.find("m", CHAIN, [name])).get(name) == blocks


async def start_batch(one: Whole) -> tuple[openai.AsyncOpenAI, str]:
    client = one.client.with_options(api_key=OPEN)
    rows = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": f"line {number}"}]},
        }
        for number in range(LINES)
    ]
    body = "".join(json.dumps(row) + "\n" for row in rows).encode()
    stored = await client.files.create(file=("in.jsonl", body), purpose="batch")
    batch = await client.batches.create(
        input_file_id=stored.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return client, batch.id


def done(one: Whole, two: Whole) -> int:
    workers = (one.gateway.batch_worker, two.gateway.batch_worker)
    return sum(worker.figures()["succeeded"] for worker in workers if worker is not None)


async def within(limit_s: float, since_s: float, holds: Callable[[], Awaitable[bool]]) -> float:
    """Seconds from then until it holds. Raises TimeoutError."""
    await until(holds, limit_s - (time.monotonic() - since_s))
    return time.monotonic() - since_s


@pytest.mark.slow
async def test_requests_go_on_while_the_primary_is_replaced_and_no_line_is_answered_twice(
    tmp_path: Path,
) -> None:
    """It goes on later, and takes itself for the primary until sentinels tell it. tests/chaos/night kills it."""
    with SentinelFleet(tmp_path) as fleet:
        gateway = {"redis_url": fleet.url, "sections": sections(tmp_path), "redis_timeout_s": TIMEOUT_S}
        engine = {"finish": "stop", "first_token_s": 0.1}
        async with (
            whole(**gateway, **engine) as one,
            whole(**gateway, **engine) as two,
            opened(fleet.url) as redis,
            Index(redis) as index,
        ):
            # 1. All that Redis is for.
            for asked in (one, two):
                asked.gateway.index.start()
            index.store(0, 100)
            assert await ask(one, OPEN, "before") == "miss"
            assert not await is_refused(one)
            assert not await is_refused(two)
            assert await is_refused(two)
            client, batch_id = await start_batch(one)
            requests = Requests(one)
            asking = asyncio.create_task(requests.run())
            await until(lambda: index.holds(100))
            await until(lambda: done(one, two) > LINES // 4)
            # 2. The primary is gone.
            fleet.primary.process.send_signal(signal.SIGSTOP)
            killed_s = time.monotonic()
            index.store(100, 200)
            # 3. What it had is found again: by a gateway that knows it from Redis alone.
            took = {
                "index": await within(BACK_S, killed_s, lambda: index.holds(200)),
                "breaker": await within(BACK_S, killed_s, lambda: _is_up(two)),
            }
            assert await ask(two, OPEN, "before") == "exact"
            took["hits"] = time.monotonic() - killed_s
            assert await is_refused(two)
            took["limits"] = time.monotonic() - killed_s
            fleet.primary.process.send_signal(signal.SIGCONT)
            await until(lambda: fleet.primary.ask("ROLE")[0] == b"slave")
            assert await ask(two, OPEN, "before") == "exact"
            # 4. The batch ends, and what is asked meanwhile was answered.
            await until(lambda: _has_ended(client, batch_id), 60)
            requests.stop()
            await asking
            batch = await client.batches.retrieve(batch_id)
            assert batch.output_file_id is not None
            rows = (await client.files.content(batch.output_file_id)).text.splitlines()
            ran = Counter(bytes(submit.tokens) for submit in (*one.submits, *two.submits))
            print({name: f"{seconds:.1f} s" for name, seconds in took.items()})
            twice = sum(count > 1 for count in ran.values())
            print(
                f"{requests.answered} answers, the slowest after {requests.slowest_s:.2f} s; {twice} prompts ran twice"
            )
            assert max(took.values()) < BACK_S
            assert requests.failures == []
            assert requests.slowest_s < 5.0
            assert Counter(json.loads(row)["custom_id"] for row in rows) == {f"line-{n}": 1 for n in range(LINES)}


async def _is_up(one: Whole) -> bool:
    return one.gateway.breaker.up


async def _has_ended(client: openai.AsyncOpenAI, batch_id: str) -> bool:
    try:
        return (await client.batches.retrieve(batch_id)).status == "completed"
    except openai.APIStatusError:  # 503 while Redis is unreachable
        return False
