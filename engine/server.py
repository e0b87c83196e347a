"""The engine's process: one HTTP server for its gateways, one thread for its model, one publisher for the index.

The event loop here never waits for the model: submits and aborts are handed to the loop's thread, and what a step did
comes back through call_soon_threadsafe, in order. Knows nothing about scheduling or tensors. The other end of the
stream is gateway/engines/bundled.py; the messages are those of engine/protocol/.

    STREAM_PATH     WebSocket: hello, the blocks that can be hit, then one frame per step; closing aborts
    TOKENIZER_PATH  what a gateway needs to tokenise for the model
    STATS_PATH      counters
    HEALTH_PATH     the only path that works without the secret
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import signal
import socket as sockets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from aiohttp import WSMsgType, web

from engine.config import ConfigError, EngineSettings
from engine.gateways import Gateway, Gateways
from engine.protocol import (
    DIGEST_BYTES,
    HEALTH_PATH,
    SECRET_HEADER,
    STATS_PATH,
    STREAM_PATH,
    TOKEN_BYTES,
    TOKENIZER_PATH,
    Abort,
    BlockEvents,
    Hello,
    ProtocolError,
    StepFrame,
    Submit,
    TokenizerFiles,
    decode,
)
from engine.publish import Publisher

if TYPE_CHECKING:
    from engine.compute.model import LoadedModel
    from engine.compute.runner import ModelRunner
    from engine.loop import EngineLoop

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 15.0
"""A gateway that has been silent for so long is asked whether it is there, and has half of it to answer."""

CLOSE_TIMEOUT_S: Final = 2.0
STOP_TIMEOUT_S: Final = 10.0
ALIVE_CHECK_S: Final = 1.0
RESTORED_LIMIT_S: Final = 5.0
"""The start waits so long for what is on disk, so that the first request finds it; then it is found bit by bit."""

REDIS_CONNECT_TIMEOUT_S: Final = 2.0

_EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


class Loop(Protocol):
    """What the server needs of engine/loop.py. Every call returns at once; all are safe from another thread."""

    def submit(self, owner: str, submit: Submit) -> None: ...

    def abort(self, owner: str, seq: int) -> None: ...

    def abort_owner(self, owner: str) -> None: ...

    def drain(self) -> None: ...

    @property
    def alive(self) -> bool: ...

    def stats(self) -> Mapping[str, Any]: ...


OnFrames = Callable[[Mapping[str, StepFrame]], None]
OnBlocks = Callable[[BlockEvents], None]


class EngineServer:
    """The HTTP application around a loop. Made and used on one event loop, except where it says so."""

    def __init__(
        self,
        hello: Hello,
        tokenizer: TokenizerFiles,
        settings: EngineSettings,
        make_loop: Callable[[OnFrames, OnBlocks], Loop],
    ) -> None:
        """`make_loop` gets the two callbacks of the loop's thread."""
        self.gateways = Gateways(hello, buffer_bytes=settings.send_buffer_bytes)
        self.publisher: Publisher | None = None
        self.loop = make_loop(self._on_frames, self._on_blocks)
        self.hello = hello
        self._tokenizer = tokenizer
        self._event_loop = asyncio.get_running_loop()
        self._secret = (settings.secret or "").encode()
        self._draining = False
        # A prompt of full context with its digests, and a header of reasonable size.
        digest_bytes = DIGEST_BYTES / hello.namespace.block_size
        self._max_message_bytes = int(hello.context_tokens * (TOKEN_BYTES + digest_bytes)) + (1 << 20)
        self._sockets: dict[web.WebSocketResponse, Gateway] = {}

    def _on_frames(self, frames: Mapping[str, StepFrame]) -> None:
        """For the loop's thread: what a step did."""
        self._post(self.gateways.stepped, frames)

    def _on_blocks(self, events: BlockEvents) -> None:
        """For the loop's thread: what a step did to the blocks."""
        self._post(self._blocks_changed, events)

    def _post(self, call: Callable[..., None], *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody is left to be told
            self._event_loop.call_soon_threadsafe(call, *values)

    def _blocks_changed(self, events: BlockEvents) -> None:
        self.gateways.blocks_changed(events)
        if self.publisher is not None:
            self.publisher.publish(events)

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_secret])
        app.router.add_get(STREAM_PATH, self._stream)
        app.router.add_get(TOKENIZER_PATH, self._get_tokenizer)
        app.router.add_get(STATS_PATH, self._get_stats)
        app.router.add_get(HEALTH_PATH, self._get_health)
        app.on_shutdown.append(self._hang_up_on_all)
        return app

    def drain(self) -> None:
        """From now on the engine says that it is not healthy. The loop refuses what is new, and tells the gateways."""
        self._draining = True
        self.loop.drain()

    @web.middleware
    async def _check_secret(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get(SECRET_HEADER, "").encode("utf-8", "surrogateescape")
        if request.path != HEALTH_PATH and not hmac.compare_digest(given, self._secret) and self._secret:
            raise web.HTTPUnauthorized(text=f"the header {SECRET_HEADER} is missing or wrong")
        response: web.StreamResponse = await handler(request)
        return response

    async def _get_health(self, request: web.Request) -> web.Response:
        status = "draining" if self._draining else "ready" if self.loop.alive else "failed"
        return web.json_response({"status": status}, status=200 if status == "ready" else 503)

    async def _get_tokenizer(self, request: web.Request) -> web.Response:
        return web.json_response(self._tokenizer.to_json())

    async def _get_stats(self, request: web.Request) -> web.Response:
        own = {"gateways": len(self.gateways), "hittable_blocks": len(self.gateways.table)}
        return web.json_response({**self.loop.stats(), **own})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, compress=False, max_msg_size=self._max_message_bytes, timeout=CLOSE_TIMEOUT_S
        )
        await socket.prepare(request)
        transport = request.transport
        if transport is None:
            return socket
        gateway = self.gateways.attach(transport.abort)
        log.info("gateway connected as %s", gateway.owner)
        self._sockets[socket] = gateway
        writer = asyncio.get_running_loop().create_task(gateway.write(socket.send_bytes), name=f"write {gateway.owner}")
        try:
            while (message := await socket.receive()).type is WSMsgType.BINARY:
                self._receive(gateway, message.data)
        except ProtocolError as error:
            log.warning("%s sent what cannot be read, hanging up: %s", gateway.owner, error)
        finally:
            self.gateways.detach(gateway)
            self.loop.abort_owner(gateway.owner)
            self._sockets.pop(socket, None)
            writer.cancel()
            await asyncio.wait([writer])
            if not writer.cancelled():
                writer.exception()  # it failed because the connection ended, which is being dealt with
            log.info("%s is gone", gateway.owner)
        await socket.close()
        return socket

    def _receive(self, gateway: Gateway, data: bytes) -> None:
        match decode(data):
            case Submit() as submit:
                self.loop.submit(gateway.owner, submit)
            case Abort(seq):
                self.loop.abort(gateway.owner, seq)
            case other:
                raise ProtocolError(f"unexpected {type(other).__name__}")

    async def _hang_up_on_all(self, app: web.Application) -> None:
        self.gateways.tell_load()  # whoever has not heard yet that this is on purpose
        for socket, gateway in list(self._sockets.items()):
            with contextlib.suppress(Exception):
                await asyncio.wait_for(gateway.sent(), CLOSE_TIMEOUT_S)  # how its last sequences ended
                await socket.close(code=1001, message=b"the engine ends")


async def main(settings: EngineSettings, redis_url: str | None, ready: Callable[[str], None] | None = None) -> None:
    """Loads the model, serves it, and returns after a drain when SIGTERM or SIGINT comes.

    redis_url  where the index is published; None publishes nowhere
    ready      called once with the URL, when gateways can connect
    Raises ConfigError for a model or settings that cannot be used, OSError for an address that cannot be listened on,
    RuntimeError when the model's thread ended by itself.
    """
    # 1. The model, loaded in a thread; a signal during it ends the process at once.
    model, runner = await asyncio.to_thread(_load, settings)
    hello = make_hello(settings, model, runner.num_blocks)

    # 2. Its loop, and the server around it.
    server = EngineServer(
        hello, model.tokenizer, settings, partial(_make_loop, settings, hello, model.tokenizer, runner)
    )
    loop = cast("EngineLoop", server.loop)
    stop = _stop_at_signals()
    web_runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
    await web_runner.setup()
    loop.start()
    try:
        if not await asyncio.to_thread(loop.wait_restored, RESTORED_LIMIT_S):
            log.info("the blocks on disk are still being looked through")
        url = await _listen(web_runner, settings)
        async with _publishing(server, redis_url, url, settings):
            log.info("engine ready: %s on %s, %d blocks of %d tokens", *_summary(hello, url))
            if ready is not None:
                ready(url)
            # 3. Serve until a signal comes, then let what runs end.
            await _until(stop, lambda: loop.alive)
            if not loop.alive:
                raise RuntimeError("the model's thread ended by itself")
            server.drain()
            await _drain(loop, stop, settings.drain_s)
    finally:
        await asyncio.to_thread(loop.stop, STOP_TIMEOUT_S)
        await web_runner.cleanup()


def make_hello(settings: EngineSettings, model: LoadedModel, num_blocks: int) -> Hello:
    """What this engine says of itself, as a new incarnation."""
    return Hello(
        incarnation=uuid.uuid4().hex,
        model=model.name,
        namespace=model.namespace(settings.block_size, settings.hash_name),
        context_tokens=min(model.context_tokens, num_blocks * settings.block_size),  # one sequence needs all its blocks
        vocab_size=model.vocab_size,
        num_blocks=num_blocks,
        max_sequences=settings.max_sequences,
        eos_ids=model.eos_ids,
        tokenizer=model.tokenizer.fingerprint(),
        created=int(time.time()),
    )


def _load(settings: EngineSettings) -> tuple[LoadedModel, ModelRunner]:
    from engine.compute.model import load_model
    from engine.compute.runner import ModelRunner

    model = load_model(settings)
    for warning in model.warnings:
        log.warning("%s", warning)
    return model, ModelRunner(model, settings)


def _make_loop(
    settings: EngineSettings,
    hello: Hello,
    tokenizer: TokenizerFiles,
    runner: ModelRunner,
    on_frames: OnFrames,
    on_blocks: OnBlocks,
) -> EngineLoop:
    from engine.loop import EngineLoop
    from engine.pool.blocks import BlockPool
    from engine.pool.hit_density import HitDensity
    from engine.sampling.grammar import Grammars
    from engine.sampling.grammar_queue import GrammarQueue
    from engine.scheduler import Scheduler
    from engine.tiers.storage import build_tiers

    num_blocks, block_size = hello.num_blocks, hello.namespace.block_size
    policy = HitDensity(num_blocks, block_size) if settings.eviction == "hit-density" else None
    pool = BlockPool(num_blocks, block_size, policy)
    scheduler = Scheduler(
        pool,
        hello.namespace,
        settings,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        eos_ids=hello.eos_ids,
        tiers=build_tiers(settings, hello.namespace, pool, runner.cache),
    )
    load = partial(
        Grammars, tokenizer.tokenizer_json, hello.vocab_size, hello.eos_ids, cache_entries=settings.grammar_cache
    )
    return EngineLoop(
        scheduler,
        runner,
        on_frames=on_frames,
        on_blocks=on_blocks,
        grammars=GrammarQueue(load, max_waiting=settings.max_waiting),
        max_pending=settings.max_waiting,
    )


async def _listen(runner: web.AppRunner, settings: EngineSettings) -> str:
    """Listens where the settings say. Returns the URL under which gateways reach it."""
    if settings.listen.startswith("unix:"):
        path = _socket_file(settings.listen)
        await web.UnixSite(runner, path).start()
        os.chmod(path, 0o600)  # whoever may connect may read every tenant's text
        return settings.advertise or f"unix:{path}"
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"engine.listen: {settings.listen!r}: should be host:port or unix:PATH")
    await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    if settings.advertise:
        return settings.advertise
    bound = runner.addresses[0][1]
    return f"http://{sockets.gethostname() if host.strip('[]') in _EVERYWHERE else host}:{bound}"


def _socket_file(listen: str) -> str:
    path = Path(listen.removeprefix("unix:").removeprefix("//")).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    return str(path)


@asynccontextmanager
async def _publishing(
    server: EngineServer, redis_url: str | None, url: str, settings: EngineSettings
) -> AsyncIterator[None]:
    if redis_url is None:
        yield
        return
    from redis.asyncio import Redis

    redis: Redis = Redis.from_url(redis_url, socket_connect_timeout=REDIS_CONNECT_TIMEOUT_S, max_connections=4)
    publisher = server.publisher = Publisher(
        redis,
        server.gateways.table,
        server.hello,
        url,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
    )
    publisher.start()
    try:
        yield
    finally:
        server.publisher = None
        await publisher.close()
        await redis.aclose()


async def _until(stop: asyncio.Event, alive: Callable[[], bool]) -> None:
    while alive():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), ALIVE_CHECK_S)
            return


async def _drain(loop: EngineLoop, stop: asyncio.Event, drain_s: float) -> None:
    """Returns when nothing runs any more, after drain_s, or at the second signal."""
    log.info("draining: what runs gets %.0f s to end", drain_s)
    stop.clear()
    idle = asyncio.ensure_future(asyncio.to_thread(loop.wait_idle, drain_s))
    again = asyncio.ensure_future(stop.wait())
    await asyncio.wait({idle, again}, return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        loop.stop(0)  # wakes whoever waits for it to be idle
    again.cancel()
    await asyncio.wait({idle, again})


def _stop_at_signals() -> asyncio.Event:
    stop, event_loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, stop.set)
    return stop


def _summary(hello: Hello, url: str) -> tuple[str, str, int, int]:
    return hello.model, url, hello.num_blocks, hello.namespace.block_size
