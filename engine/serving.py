"""The life of the engine's process: the model, its loop, the server; then until a signal; then a drain, and the end.

`serve` is what `kvasir engine` runs. The composition root of the engine: nothing else knows which eviction, which tiers
and which grammars there are. torch is imported when something is made, so that a gateway without it can import this.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket as sockets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aiohttp import web

from engine.config import ConfigError, EngineSettings
from engine.protocol import Hello, TokenizerFiles
from engine.publish import REDIS_TIMEOUT_S, Publisher
from engine.server import CLOSE_TIMEOUT_S, EngineServer, OnBlocks, OnFrames
from engine.tls import Certificate, between

if TYPE_CHECKING:
    from engine.compute.model import LoadedModel
    from engine.compute.runner import ModelRunner
    from engine.loop import EngineLoop
    from engine.utilisation import Utilisation

log = logging.getLogger(__name__)

STOP_TIMEOUT_S: Final = 10.0
ALIVE_CHECK_S: Final = 1.0
RESTORED_LIMIT_S: Final = 5.0
"""The start waits so long for what is on disk, so that the first request finds it; then it is found bit by bit."""

REDIS_CONNECT_TIMEOUT_S: Final = 2.0

_EVERYWHERE: Final = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


async def serve(settings: EngineSettings, redis_url: str | None, ready: Callable[[str], None] | None = None) -> None:
    """Loads the model, serves it, and returns after a drain when SIGTERM or SIGINT comes.

    redis_url  where the index is published; None publishes nowhere
    ready      called once with the URL, when gateways can connect
    Raises ConfigError for a model or settings that cannot be used, OSError for an address that cannot be listened on,
    RuntimeError when the model's thread ended by itself.
    """
    _check_address(settings)
    certificate = None if settings.listen.startswith("unix:") else between(settings.tls_dir, serves=True)
    # 1. The model, loaded in a thread; a signal during it ends the process at once.
    model, runner = await asyncio.to_thread(load, settings)
    hello = make_hello(settings, model, runner.num_blocks)

    # 2. Its loop, and the server around it.
    utilisation = await asyncio.to_thread(runner.measure)
    make = partial(make_loop, settings, hello, model.tokenizer, runner, utilisation=utilisation)
    server = EngineServer(hello, model.tokenizer, settings, make)
    loop = server.loop
    stop = _stop_at_signals()
    web_runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=CLOSE_TIMEOUT_S)
    await web_runner.setup()
    loop.start()
    try:
        if not await asyncio.to_thread(loop.wait_restored, RESTORED_LIMIT_S):
            log.info("the blocks on disk are still being looked through")
        url = await _listen(web_runner, settings, certificate)
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


def _check_address(settings: EngineSettings) -> None:
    """An engine answers every client with any tenant's blocks, so on a network it wants a secret, or certificates."""
    host, _, port = settings.listen.rpartition(":")
    if settings.listen.startswith("unix:"):
        return
    if not host or not port.isdecimal():
        raise ConfigError(f"engine.listen: {settings.listen!r}: should be host:port or unix:PATH")
    if settings.tls_dir and settings.advertise and not settings.advertise.startswith("https://"):
        raise ConfigError(
            f"engine.advertise: {settings.advertise!r} should begin with https://, as engine.tls_dir is set"
        )
    if not settings.secret and not settings.tls_dir and not _is_loopback(host.strip("[]")):
        raise ConfigError(
            f"engine.listen: {settings.listen!r} can be reached from other machines, and they could read every "
            "tenant's prompts: set engine.secret (KVASIR_ENGINE_SECRET) to the same value here and at the gateways, or "
            "engine.tls_dir, or listen on 127.0.0.1 or unix:PATH"
        )


def _is_loopback(host: str) -> bool:
    """False for names other than localhost: what they resolve to may change."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


async def _listen(runner: web.AppRunner, settings: EngineSettings, certificate: Certificate | None = None) -> str:
    """Listens where the settings say. Returns the URL under which gateways reach it."""
    if settings.listen.startswith("unix:"):
        path = _socket_file(settings.listen)
        await web.UnixSite(runner, path).start()
        os.chmod(path, 0o600)  # a client that may connect may read every tenant's text
        return settings.advertise or f"unix:{path}"
    host, _, port = settings.listen.rpartition(":")
    context = None if certificate is None else certificate.listening()
    await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=context).start()
    if settings.advertise:
        return settings.advertise
    bound = runner.addresses[0][1]
    scheme = "http" if certificate is None else "https"
    return f"{scheme}://{sockets.gethostname() if host.strip('[]') in _EVERYWHERE else host}:{bound}"


def _socket_file(listen: str) -> str:
    path = Path(listen.removeprefix("unix:").removeprefix("//")).absolute()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(path)


@asynccontextmanager
async def _publishing(
    server: EngineServer, redis_url: str | None, url: str, settings: EngineSettings
) -> AsyncIterator[None]:
    if redis_url is None:
        yield
        return
    from engine.redis_client import close, connect

    redis = connect(redis_url, timeout_s=REDIS_TIMEOUT_S, connect_timeout_s=REDIS_CONNECT_TIMEOUT_S, max_connections=4)
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
        await close(redis)


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
        loop.stop(0)  # wakes the thread that waits for it to be idle
    again.cancel()
    await asyncio.wait({idle, again})


def _stop_at_signals() -> asyncio.Event:
    stop, event_loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(number, stop.set)
    return stop


def _summary(hello: Hello, url: str) -> tuple[str, str, int, int]:
    return hello.model, url, hello.num_blocks, hello.namespace.block_size


def load(settings: EngineSettings) -> tuple[LoadedModel, ModelRunner]:
    """The model, and what runs it. Takes seconds. Raises ConfigError for a model or settings that cannot be used."""
    from engine.compute.kernel import describe
    from engine.compute.model import check_draft, load_model
    from engine.compute.runner import ModelRunner

    drafting = check_draft(settings)
    model = load_model(settings)
    draft = None if drafting is None else load_model(drafting)
    for warning in model.warnings:
        log.warning("%s", warning)
    shape = model.cache_shape
    kernels = "torch" if model.device.type != "cpu" else describe(shape.dtype, shape.head_dim)
    kept = str(shape.dtype).removeprefix("torch.")
    log.info("model %s: computed on the %s by %s, keys and values in %s", model.name, model.device, kernels, kept)
    return model, ModelRunner(model, settings, draft=draft)


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
        adapters=model.adapters,
    )


def make_loop(
    settings: EngineSettings,
    hello: Hello,
    tokenizer: TokenizerFiles,
    runner: ModelRunner,
    on_frames: OnFrames,
    on_blocks: OnBlocks,
    utilisation: Utilisation | None = None,
) -> EngineLoop:
    """The loop, not started, with everything that it owns: pool, tiers, scheduler, grammars.

    on_frames, on_blocks  called on its thread
    """
    from engine.loop import EngineLoop
    from engine.pool.blocks import BlockPool
    from engine.pool.hit_density import HitDensity
    from engine.sampling.grammar_pool import GrammarPool
    from engine.scheduler import Scheduler
    from engine.tiers.storage import build_tiers

    num_blocks, block_size = hello.num_blocks, hello.namespace.block_size
    policy = HitDensity(num_blocks, block_size) if settings.eviction == "hit-density" else None
    pool = BlockPool(num_blocks, block_size, policy)
    grammars = GrammarPool(
        tokenizer.tokenizer_json,
        hello.vocab_size,
        hello.eos_ids,
        max_kept=settings.grammar_cache,
        max_waiting=settings.max_waiting,
    )
    scheduler = Scheduler(
        pool,
        hello.namespace,
        settings,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        eos_ids=hello.eos_ids,
        adapters=[fingerprint for _, fingerprint in hello.adapters],
        tiers=build_tiers(settings, hello.namespace, pool, runner.cache),
        grammars=grammars,
    )
    return EngineLoop(
        scheduler,
        runner,
        on_frames=on_frames,
        on_blocks=on_blocks,
        utilisation=utilisation,
        max_pending=settings.max_waiting,
    )
