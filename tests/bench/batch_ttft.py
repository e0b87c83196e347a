"""What the batch lane costs the online lane, and what its order saves.

    python -m tests.bench.batch_ttft [--rounds 6] [--seconds 15] [--rate 1.0]

The gateway's own pipeline, queue and router in this process, a real engine with the demo model in another.

online   requests arrive at random times, the same ones in every round; each has a prompt of its own. Rounds with and
         without a full batch lane behind take turns. Full: so many lines are always in flight that some wait for a
         place, drawn from documents with a question each. Printed: times to the first token, and what the batch lane
         computed meanwhile. Wanted: p95 with at most 1.25 times p95 without.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engine.config import EngineSettings
from engine.protocol import Lane, Sampling
from gateway.app import Gateway
from gateway.config import EnginesSettings, QueueSettings, ServerSettings, Settings
from gateway.engine_processes import EngineProcesses
from gateway.types import Finished, Request, Started, Tenant, TokenPrompt

WANTED = 1.25
IN_FLIGHT = 96
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS = 20, 1500, 40
ANSWER_TOKENS = 24
START_LIMIT_S = 120.0
LIMIT_S = 600.0


@dataclass
class Told:
    """What came of the requests of one lane in one kind of round."""

    first_ms: list[float] = field(default_factory=list)
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Asker:
    """Asks the pipeline, as a dialect would."""

    def __init__(self, gateway: Gateway, model: str) -> None:
        self._pipeline, self._model = gateway.pipeline, model
        self._numbers = itertools.count()

    async def ask(self, tokens: list[int], lane: Lane, told: Told) -> None:
        now = time.monotonic()
        request = Request(
            request_id=f"bench-{next(self._numbers)}",
            tenant=Tenant("bench"),
            model=self._model,
            prompt=TokenPrompt(array("I", tokens).tobytes()),
            sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
            received_s=now,
            deadline_s=now + LIMIT_S,
            lane=lane,
        )
        async with aclosing(self._pipeline.answer(request)) as events:
            async for event in events:
                if isinstance(event, Started):
                    told.first_ms.append((time.monotonic() - now) * 1e3)
                if isinstance(event, Finished):
                    told.answers += 1
                    told.prompt_tokens += event.usage.prompt_tokens
                    told.cached_tokens += event.usage.cached_tokens


@asynccontextmanager
async def running(settings: Settings, folder: Path) -> AsyncIterator[Gateway]:
    """A gateway without HTTP, and its engines."""
    gateway = Gateway(settings, None, None)
    processes = EngineProcesses(
        settings.engine,
        settings.logs,
        count=settings.engines.count,
        folder=folder / "engines",
        redis_url=None,
        environ={},
        worked=gateway.registry.was_joined,
        on_fatal=lambda error: print(error, file=sys.stderr),
    )
    async with processes:
        for name, url in processes.urls.items():
            gateway.registry.add(url, name)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                await gateway.registry.wait_joined()
            yield gateway
        finally:
            await gateway.registry.stop()
            gateway.prompts.close()


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 4000) for _ in range(count)]


async def online(asker: Asker, options: argparse.Namespace, seconds: float, told: Told, salt: int) -> None:
    """Poisson arrivals. `salt` keeps the prompts of rounds apart, whose lengths and times are the same."""
    rng, rate, lengths = random.Random(7), options.rate, options.tokens
    async with asyncio.TaskGroup() as group:
        at_s, began_s = 0.0, time.monotonic()
        while (at_s := at_s + rng.expovariate(rate)) < seconds:
            tokens = words(rng, rng.randint(*lengths))
            tokens[0] = salt
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            group.create_task(asker.ask(tokens, "online", told))


async def batch(asker: Asker, rng: random.Random, told: Told) -> None:
    """Lines without end, those of a document one after the other, until cancelled."""
    room = asyncio.Semaphore(IN_FLIGHT)

    async def line(tokens: list[int]) -> None:
        try:
            await asker.ask(tokens, "batch", told)
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        while True:
            document = words(rng, DOCUMENT_TOKENS)
            for _ in range(50):
                await room.acquire()
                group.create_task(line(document + words(rng, QUESTION_TOKENS)))


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            server=ServerSettings(data_dir=Path(folder)),
            engines=EnginesSettings(count=1, discover=False),
            engine=EngineSettings(threads=1, kv_cache_bytes=options.cache_bytes),
            queue=QueueSettings(batch_slots_per_engine=options.places),
        )
        async with running(settings, Path(folder)) as gateway:
            asker = Asker(gateway, next(iter(gateway.registry.models())))
            await online(asker, options, 5.0, Told(), 1)  # warm, and its rates measured
            alone, beside, behind, spent_s = Told(), Told(), Told(), 0.0
            for number in range(options.rounds):
                for told, full in ((alone, False), (beside, True)):
                    filling = asyncio.create_task(batch(asker, random.Random(number), behind)) if full else None
                    if filling:
                        await asyncio.sleep(options.ramp)  # until places are taken, and some wait
                    before_s = time.monotonic()
                    await online(asker, options, options.seconds, told, 2 * number + full + 2)
                    if filling:
                        spent_s += time.monotonic() - before_s
                        print(f"  behind: {gateway.queue.status('batch')}")
                        filling.cancel()
                        await asyncio.gather(filling, return_exceptions=True)
            report(alone, beside, behind, spent_s)


def report(alone: Told, beside: Told, behind: Told, spent_s: float) -> None:
    print("\n| online | requests | first token, mean ms | p50 | p95 | p99 |\n| --- | --- | --- | --- | --- | --- |")
    for name, told in (("alone", alone), ("with a full batch lane behind", beside)):
        cuts = statistics.quantiles(told.first_ms, n=100, method="inclusive")
        mean = statistics.fmean(told.first_ms)
        print(f"| {name} | {len(told.first_ms)} | {mean:.1f} | {cuts[49]:.1f} | {cuts[94]:.1f} | {cuts[98]:.1f} |")
    both = [statistics.quantiles(told.first_ms, n=100, method="inclusive")[94] for told in (alone, beside)]
    print(f"p95: {both[1] / both[0]:.2f} times that without (wanted: {WANTED} at most)")
    print(
        f"The batch lane had {behind.answers} answers in {spent_s:.0f} s ({behind.answers / spent_s:.1f}/s), "
        f"{behind.cached_tokens / max(behind.prompt_tokens, 1):.0%} of their prompts reused."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="of online requests in each round")
    parser.add_argument("--rate", type=float, default=1.0, help="online requests per second")
    parser.add_argument("--tokens", type=int, nargs=2, default=(100, 1500), help="of online prompts, from and to")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds that the batch lane has to fill up")
    parser.add_argument("--places", type=int, default=0, help="queue.batch_slots_per_engine")
    parser.add_argument("--cache-bytes", type=int, default=256 << 20)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
