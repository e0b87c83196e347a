"""What embedding in the gateway costs: the model alone, the queue in front of it, and POST /v1/embeddings around both.

    python -m tests.bench.embedding_speed [--threads N]

Prints medians in ms, texts and tokens per second, and how late the event loop was while threads computed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from gateway.config import EmbeddingSettings
from gateway.responses.embedding.embedder import Embedder
from gateway.responses.embedding.text_model import TextModel
from gateway.types import EmbeddingInput
from tests.fakes.gateway import running

BATCHES = ((1, 10), (1, 20), (1, 240), (32, 12), (16, 32), (64, 32), (16, 240))  # texts, tokens each
QUESTIONS = [f"What does request number {number} ask about the prefix cache, and why?" for number in range(400)]
LOOK_S = 0.001
FAR_S = 1e9


def median_ms(work: Callable[[], object], times: int) -> float:
    work()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)


@asynccontextmanager
async def lateness_ms() -> AsyncIterator[list[float]]:
    """How much later than asked for the event loop came round, all the while."""
    late: list[float] = []

    async def look() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(LOOK_S)
            late.append(1e3 * (time.perf_counter() - started - LOOK_S))

    task = asyncio.create_task(look())
    try:
        yield late
    finally:
        task.cancel()


def said(late: list[float]) -> str:
    ordered = sorted(late)
    return (
        f"loop late by p50 {ordered[len(late) // 2]:.2f} p99 {ordered[int(len(late) * 0.99)]:.2f} max {ordered[-1]:.2f}"
    )


def model_alone(model: TextModel) -> None:
    random = np.random.default_rng(5)
    for texts, tokens in BATCHES:
        batch = [
            EmbeddingInput(random.integers(1000, model.vocabulary, tokens).tolist(), model.dimensions)
            for _ in range(texts)
        ]
        taken_ms = median_ms(lambda batch=batch: model.vectors(batch), 5 if texts * tokens > 300 else 30)  # type: ignore[misc]
        rate = 1e3 * texts * tokens / taken_ms
        print(f"model     {texts:3} x {tokens:3} tokens  {taken_ms:8.1f} ms  {rate:7.0f} tokens/s")


async def queue(embedder: Embedder) -> None:
    async with lateness_ms() as late:
        tokens = await embedder.tokens(QUESTIONS)
    print(f"tokenise  {len(QUESTIONS)} questions of {len(tokens[0])} tokens; {said(late)}")
    async with lateness_ms() as late:
        started = time.perf_counter()
        await embedder.embed([EmbeddingInput(one, 384) for one in tokens], FAR_S, tenant="bench")
        taken_s = time.perf_counter() - started
    rate = sum(map(len, tokens)) / taken_s
    print(f"queue     {len(QUESTIONS) / taken_s:.0f} texts/s, {rate:.0f} tokens/s; {said(late)}")


async def http(embedder: Embedder) -> None:
    name = embedder.settings.names[0]
    async with running(embedder=embedder) as gateway, gateway.sdk() as client:
        alone = []
        for question in QUESTIONS[:60]:
            started = time.perf_counter()
            await client.embeddings.create(model=name, input=question)
            alone.append(1e3 * (time.perf_counter() - started))
        print(f"http      one question alone: p50 {statistics.median(alone):.1f} ms, p95 {sorted(alone)[57]:.1f} ms")
        for encoding in ("base64", "float"):
            async with lateness_ms() as late:
                started = time.perf_counter()
                body = {"model": name, "input": QUESTIONS, "encoding_format": encoding}
                async with gateway.session.post(f"{gateway.url}/v1/embeddings", json=body) as answer:
                    size = len(await answer.read())
                taken_s = time.perf_counter() - started
            rate = len(QUESTIONS) / taken_s
            print(f"http      {len(QUESTIONS)} as {encoding}: {rate:.0f} texts/s, {size} bytes; {said(late)}")
        started = time.perf_counter()
        await asyncio.gather(*(client.embeddings.create(model=name, input=one) for one in QUESTIONS[:50]))
        print(f"http      50 requests at once: {50 / (time.perf_counter() - started):.0f} texts/s")


async def main(threads: int) -> None:
    embedder = Embedder(EmbeddingSettings(threads=threads))
    async with lateness_ms() as late:  # what the machine does to a loop that has nothing to do
        await asyncio.sleep(1)
    print(f"nothing   {said(late)}")
    async with lateness_ms() as late:
        started = time.perf_counter()
        model = await embedder.model()
        print(f"load      {time.perf_counter() - started:.2f} s; {said(late)}")
    model_alone(model)
    await queue(embedder)
    await http(embedder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    asyncio.run(main(parser.parse_args().threads))
