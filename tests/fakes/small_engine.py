"""The engine's real server, loop, scheduler and pool around a model that only counts: no torch, quick to start."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from engine.config import EngineSettings
from engine.loop import EngineLoop
from engine.pool.blocks import BlockPool
from engine.protocol import (
    STREAM_PATH,
    BlockEvents,
    EngineMessage,
    GatewayMessage,
    Hello,
    Namespace,
    Sampling,
    StepFrame,
    Submit,
    TokenizerFiles,
    chain_digests,
    decode,
    encode,
)
from engine.scheduler import Scheduler
from engine.sequence import Step
from engine.server import EngineServer, OnBlocks, OnFrames
from engine.utilisation import Utilisation
from tests.fakes.fake_engine import TOKENIZER, make_hello
from tests.fakes.oracle_runner import OracleRunner
from tests.fakes.tuned import PATIENT, tuned
from tests.fakes.waiting import until

VOCAB = 500
BLOCK = 16


class HeldRunner(OracleRunner):
    """An OracleRunner that can be held before its next step, or given a number of steps that it may make."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.go = threading.Event()
        self.go.set()
        self.arrived = threading.Event()
        self.permits: threading.Semaphore | None = None  # steps left to make; None is any number

    def run(self, step: Step) -> list[int | None]:
        self.arrived.set()
        self.go.wait(30)
        if self.permits is not None:
            self.permits.acquire(timeout=30)
        return super().run(step)


@dataclass
class SmallEngine:
    """See small_engine."""

    server: EngineServer
    loop: EngineLoop
    pool: BlockPool
    runner: HeldRunner
    hello: Hello
    url: str
    session: aiohttp.ClientSession

    @asynccontextmanager
    async def stream(self, **options: Any) -> AsyncIterator[Stream]:
        async with self.session.ws_connect(STREAM_PATH, compress=0, max_msg_size=0, **options) as socket:
            yield Stream(socket)

    async def step_until(self, holds: Callable[[], bool]) -> None:
        """Lets the model make one step at a time until `holds()`, so that nothing ends sooner than a test can look."""
        permits = self.runner.permits = self.runner.permits or threading.Semaphore(0)

        def one_more() -> bool:
            permits.release()
            return holds()

        await until(one_more)

    def submit(self, seq: int, tokens: list[int], max_tokens: int = 4, salt: str = "", **sampling: Any) -> Submit:
        return make_submit(self.hello.namespace, seq, tokens, max_tokens, salt, **sampling)


@dataclass
class Stream:
    """One raw connection, as a gateway has it."""

    socket: aiohttp.ClientWebSocketResponse

    async def send(self, message: GatewayMessage) -> None:
        await self.socket.send_bytes(encode(message))

    async def receive(self, limit_s: float = 30.0) -> EngineMessage:
        async with asyncio.timeout(limit_s):
            message = decode(await self.socket.receive_bytes())
        assert isinstance(message, Hello | BlockEvents | StepFrame)
        return message

    async def until(self, holds: Callable[[EngineMessage], bool]) -> list[EngineMessage]:
        """Everything up to the first message for which `holds`."""
        messages = [await self.receive()]
        while not holds(messages[-1]):
            messages.append(await self.receive())
        return messages


def make_submit(
    namespace: Namespace, seq: int, tokens: list[int], max_tokens: int = 4, salt: str = "", **sampling: Any
) -> Submit:
    from dataclasses import replace

    packed = array("I", tokens).tobytes()
    digests = chain_digests(replace(namespace, salt=salt).root(), packed, namespace.block_size)
    return Submit(seq, packed, digests, Sampling(max_tokens, **sampling), salt=salt)


@asynccontextmanager
async def small_engine(
    listen: str = "127.0.0.1:0",
    num_blocks: int = 200,
    wrap: Callable[[EngineLoop], EngineLoop] | None = None,
    utilisation: Utilisation | None = None,
    files: TokenizerFiles = TOKENIZER,
    vocab_size: int = VOCAB,
    **changes: Any,
) -> AsyncIterator[SmallEngine]:
    """Runs one until the block is left. `files` is its tokeniser, `changes` are those of EngineSettings."""
    settings = tuned(EngineSettings, **{"block_size": BLOCK, "step_tokens": 256, **PATIENT, **changes})
    named = {"tokenizer": files.fingerprint(), "vocab_size": vocab_size}
    hello = make_hello("small", num_blocks=num_blocks, context_tokens=2048, **named)
    pool = BlockPool(num_blocks, BLOCK)
    runner = HeldRunner(pool, vocab_size, settings.step_tokens)
    loops: list[EngineLoop] = []

    def make_loop(on_frames: OnFrames, on_blocks: OnBlocks) -> EngineLoop:
        scheduler = Scheduler(pool, hello.namespace, settings, context_tokens=2048, vocab_size=vocab_size, eos_ids=())
        told = {"on_frames": on_frames, "on_blocks": on_blocks}
        loops.append(EngineLoop(scheduler, runner, **told, utilisation=utilisation, idle_check_s=0.01))
        return wrap(loops[0]) if wrap else loops[0]

    server = EngineServer(hello, files, settings, make_loop)
    web_runner = web.AppRunner(server.app(), shutdown_timeout=0.5)
    await web_runner.setup()
    connector: aiohttp.BaseConnector
    if listen.startswith("unix:"):
        await web.UnixSite(web_runner, listen.removeprefix("unix:")).start()
        url, base, connector = listen, "http://engine", aiohttp.UnixConnector(listen.removeprefix("unix:"))
    else:
        await web.TCPSite(web_runner, "127.0.0.1", 0).start()
        url = base = f"http://127.0.0.1:{web_runner.addresses[0][1]}"
        connector = aiohttp.TCPConnector()
    loops[0].start()
    try:
        async with aiohttp.ClientSession(base, connector=connector) as session:
            yield SmallEngine(server, loops[0], pool, runner, hello, url, session)
    finally:
        runner.go.set()
        assert await asyncio.to_thread(loops[0].stop, 30)
        await web_runner.cleanup()
    stats = loops[0].stats()
    assert (stats["errors"], stats["invariant_violations"]) == (0, 0), stats
