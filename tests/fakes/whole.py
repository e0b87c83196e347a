"""All stages of the gateway wired as app.py wires them, on a port, over engines without a model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

from engine.protocol import Submit, TokenizerFiles
from gateway.api.routes import RUNNER, app_runner
from gateway.app import Gateway, cluster_url
from gateway.config import LeaseSettings, ServerSettings, Settings
from gateway.queues.batch.worker import Worker
from gateway.storage.redis_calls import close, connect
from tests.fakes import tokenisers
from tests.fakes.fake_engine import FakeEngine, make_hello

LIMIT_S = 30.0


@dataclass
class Whole:
    """A gateway on a port, and its engines."""

    gateway: Gateway
    engines: list[FakeEngine]
    url: str
    client: openai.AsyncOpenAI
    app: web.Application

    @property
    def submits(self) -> list[Submit]:
        return [submit for engine in self.engines for submit in engine.submits]

    async def ask(self, *messages: Any, **options: Any) -> tuple[openai.types.CompletionUsage, Any]:
        """Usage and headers."""
        raw = await self.client.chat.completions.with_raw_response.create(
            model="demo", messages=list(messages), max_tokens=2, **options
        )
        usage = raw.parse().usage
        assert usage is not None
        return usage, raw.headers


@asynccontextmanager
async def whole(
    engines: int = 1,
    files: TokenizerFiles | None = None,
    redis_url: str | None = None,
    sections: Mapping[str, Any] | None = None,
    redis_timeout_s: float = LIMIT_S,
    **behaviour: Any,
) -> AsyncIterator[Whole]:
    """`files` is the tokeniser of the engines' model, `behaviour` that of every engine, `sections` are of the settings.
    With a Redis the batch lane runs."""
    files = files or tokenisers.qwen()
    hello = tokenisers.hello(files)
    folder = tempfile.TemporaryDirectory(prefix="kvasir-whole-")
    settings = Settings(
        server=ServerSettings(data_dir=Path(folder.name)),
        leases=LeaseSettings(ttls=("5m", "1h")),
        **(sections or {}),
    )
    redis = None if redis_url is None else connect(redis_url, redis_timeout_s)
    gateway = Gateway(settings, redis, redis_url, cluster_url=cluster_url(settings, {}))
    fakes = [
        FakeEngine(
            hello=make_hello(tokenizer=files.fingerprint(), vocab_size=hello.vocab_size), tokenizer=files, **behaviour
        )
        for _ in range(engines)
    ]
    app = gateway.web_app()
    if gateway.exporter is not None:
        gateway.exporter.start()
    runner = app_runner(app, settings.server)
    worker = None
    if redis is not None:
        worker = gateway.batch_worker = Worker(gateway.batches.stores, app[RUNNER], gateway.batches.changed)
    async with asyncio.timeout(3 * LIMIT_S):
        for fake in fakes:
            await fake.__aenter__()
            gateway.registry.add(fake.url)
        await gateway.registry.wait_joined()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        if worker is not None:
            gateway.registry.start()
            worker.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=LIMIT_S, max_retries=0)
    try:
        yield Whole(gateway, fakes, url, client, app)
    finally:
        async with asyncio.timeout(LIMIT_S):
            await client.close()
            if worker is not None:
                await worker.close()
            await runner.cleanup()
            if gateway.exporter is not None:
                await gateway.exporter.close()
            await gateway.registry.stop()
            await gateway.limits.close()
            await gateway.upstreams.close()
            await gateway.index.close()
            gateway.prompts.close()
            await gateway.files.close()
            for connection in (redis, gateway.batch_redis):
                if connection is not None:
                    await close(connection)
            for fake in fakes:
                await fake.die()
        folder.cleanup()
