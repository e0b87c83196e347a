"""The life of the process: Redis, the stages, the port, engines; then requests until a signal; then all torn down in
reverse. `serve` is what `kvasir serve` and `kvasir gateway` run.

Knows the stages only as far as they are started and closed; app.py makes them.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from aiohttp import web

from engine import tls
from engine.compute.machine import available_bytes, choose_threads, usable_cores
from gateway import tasks
from gateway.admin.sources import no_others
from gateway.api.descriptors import Site, raise_limit
from gateway.api.routes import ADMIN, LOG, RUNNER, WARMING, app_runner
from gateway.app import REPLICA_VARIABLES, Gateway, cluster_url, replica_keys, upstream_keys, upstream_proxies
from gateway.config import Settings
from gateway.engine_processes import EngineProcesses
from gateway.engines.registry import Client
from gateway.parent import Parent
from gateway.processes import ChildStartError
from gateway.queues.batch.worker import Worker
from gateway.redis_server import RedisServer, RedisStartError
from gateway.reload import Reloading
from gateway.storage.redis_calls import close, connect, warn_of_eviction
from gateway.tasks import share_interpreter
from gateway.version import installed_version
from gateway.vllm_process import VllmProcess, choose_engine

log = logging.getLogger(__name__)

SAME_ENGINES_S: Final = 15.0
"""That a worker which is started again waits for the engines that the others have. Then it answers without them."""

FIRST_ENGINES_S: Final = 5.0
"""That a start waits for engines which run elsewhere. Requests are answered meanwhile, by those that are there."""

LOOK_S: Final = 0.05


async def serve(
    settings: Settings,
    *,
    environ: Mapping[str, str],
    own_engines: bool,
    say: Callable[[str], None],
    read: Callable[[], Settings] | None = None,
    parent: Parent | None = None,
) -> None:
    """Runs until SIGTERM or SIGINT, then lets what is in flight end.

    own_engines  start engines, and a Redis when none is configured
    say          prints a few lines about what was started
    read         reads the settings again
    parent       of a worker: it has started them, and bound the port
    Raises ChildStartError when an engine cannot work with its settings, ConfigError when there is none of that kind,
    OSError when the port is in use.
    """
    share_interpreter()
    raise_limit()
    given, settings = settings, choose_engine(settings, environ) if own_engines and parent is None else settings
    certificate = certificate_of(settings)
    stop = _stop_at_signals()
    fatal: list[ChildStartError] = []

    def give_up(error: ChildStartError) -> None:
        fatal.append(error)
        stop.set()

    async with AsyncExitStack() as stack:
        # 1. Redis: the configured one, or an own one; without any the index is in memory.
        redis_url = settings.redis.url if parent is None else parent.place.redis_url
        if redis_url is None and own_engines:
            redis_url = await start_redis(settings, stack)
        redis = connect(redis_url, settings.redis.timeout_s) if redis_url else None
        if redis is not None:
            stack.push_async_callback(close, redis)
            looking = tasks.spawn(warn_of_eviction(redis), name="look at the policy of Redis")
            stack.push_async_callback(tasks.cancel, looking)
        # 2. The stages, and the port: requests are answered from now on, with 503 until there is an engine.
        keys, proxies = upstream_keys(settings, environ), upstream_proxies(settings, environ)
        gateway = Gateway(
            settings,
            redis,
            redis_url,
            keys,
            proxies,
            replica_keys(settings, environ),
            {name: value for name, value in environ.items() if name.startswith(REPLICA_VARIABLES)},
            cluster_url(settings, environ),
            total=no_others if parent is None else parent.total,
            name=uuid.uuid4().hex if parent is None else parent.place.name,
        )
        close_with(stack, gateway)
        app = gateway.web_app()
        await gateway.directory.refresh()
        if read is not None:
            _reload_with(Reloading(read, given, settings, partial(_use, gateway, environ)), gateway, stop)
        runner = app_runner(app, settings.server)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        if parent is None:
            port = await _listen(runner, settings, certificate)
        # 3. Engines: own ones, configured ones, and those that announce themselves.
        stack.push_async_callback(gateway.registry.stop)
        engine_urls = {} if parent is None else parent.place.engine_urls
        if own_engines and parent is None:
            processes = own_engines_of(settings, redis_url, environ, gateway.registry.was_joined, give_up)
            await stack.enter_async_context(processes)
            engine_urls = dict(processes.urls)
        for name, url in engine_urls.items():
            gateway.registry.add(url, name)
        for url in settings.engines.urls:
            gateway.registry.add(url)
        gateway.attach_replicas()
        gateway.discovery.start()
        stack.push_async_callback(gateway.discovery.stop)
        await gateway.fleet.start()
        stack.push_async_callback(gateway.fleet.stop)
        gateway.warmer.start()
        stack.push_async_callback(gateway.warmer.stop)
        _start(gateway)
        warming = app[WARMING]
        warming.start()
        stack.push_async_callback(warming.stop)
        app[LOG].start()
        stack.push_async_callback(app[LOG].close)
        if parent is not None:  # the port is open all the time, and this worker has it once it is as good as others
            await _same_engines(gateway, parent.place.joined, stop)
            port = await _listen(runner, settings, certificate, parent.sockets)
            await parent.connect(app[ADMIN].snapshot, lambda changed: gateway.plan(changed, environ))
            gateway.reload = parent.reload
            stack.push_async_callback(parent.close)
            await parent.listening()
        await _first_engines(gateway, {*engine_urls.values(), *_own_vllm(settings, own_engines)}, stop)
        warming.warn_of_unknown_models()
        worker = gateway.batch_worker = Worker(gateway.batches.stores, app[RUNNER], gateway.batches.changed)
        stack.push_async_callback(worker.close)
        worker.start()
        # 4. Serve. What was imported and loaded by now is not looked through again by the collector of cycles, which
        # would stop all threads for some hundredths of a second each time.
        gc.collect()
        gc.freeze()
        if not stop.is_set():
            _introduce(gateway, port, own_engines, say)
        await stop.wait()
        gateway.draining = True
        await worker.close()
        log.info("shutting down: requests in flight get %.0f s", settings.server.shutdown_s)
        await runner.cleanup()
    if fatal:
        raise fatal[0]


def certificate_of(settings: Settings) -> tls.Certificate | None:
    """Of the port. Raises ConfigError."""
    cert, key = settings.tls.cert, settings.tls.key
    return None if cert is None or key is None else tls.Certificate("tls", cert, key)


def _reload_with(reloading: Reloading, gateway: Gateway, stop: asyncio.Event) -> None:
    gateway.reload = reloading.reload
    reloading.at_hangup(stop.set, gateway.audit.reloaded)


async def _use(gateway: Gateway, environ: Mapping[str, str], settings: Settings) -> None:
    gateway.plan(settings, environ)()


def close_with(stack: AsyncExitStack, gateway: Gateway) -> None:
    """Closes the stages with the stack, last first."""
    if gateway.exporter is not None:
        stack.push_async_callback(gateway.exporter.close)
    stack.callback(gateway.prompts.close)
    stack.callback(gateway.embedder.close)
    stages = (
        gateway.directory,
        gateway.answers,
        gateway.index,
        gateway.history,
        gateway.ledger,
        gateway.files,
        gateway.limits,
        gateway.presence,
    )
    for stage in (*stages, gateway.upstreams):
        stack.push_async_callback(stage.close)
    if gateway.batch_redis is not None:
        stack.push_async_callback(close, gateway.batch_redis)
    if gateway.semantic_cache is not None:  # what its audits have used by then is for the ledger
        stack.push_async_callback(gateway.semantic_cache.close)


def _start(gateway: Gateway) -> None:
    """Starts the background tasks of the stages."""
    if gateway.exporter is not None:
        gateway.exporter.start()
    if gateway.semantic_cache is not None:
        gateway.semantic_cache.start()
    stages = (gateway.files, gateway.upstreams, gateway.history, gateway.ledger, gateway.limits, gateway.index)
    for stage in (*stages, gateway.answers, gateway.registry, gateway.directory, gateway.presence):
        stage.start()


async def start_redis(settings: Settings, stack: AsyncExitStack) -> str | None:
    """URL of an own Redis, which ends with the stack; None, and a warning, where none can be started."""
    server = RedisServer(settings.server.data_dir / "redis", settings.redis)
    try:
        await stack.enter_async_context(server)
    except RedisStartError as error:
        log.warning("no Redis, the index is in this gateway's memory: %s", error)
        return None
    return server.url


def own_engines_of(
    settings: Settings,
    redis_url: str | None,
    environ: Mapping[str, str],
    worked: Callable[[str], bool],
    on_fatal: Callable[[ChildStartError], None],
) -> EngineProcesses | VllmProcess:
    """The engines of `kvasir serve`, engines.count of them; see EngineProcesses. Those of one machine share its cores,
    its memory, and the blocks on its disk. `settings` are those of choose_engine."""
    if settings.engines.count and settings.engines.kind == "vllm":
        return VllmProcess(settings, environ=environ, worked=worked, on_fatal=on_fatal)
    threads = choose_threads(settings.engine.threads, usable_cores(), settings.engines.count)
    disk_dir = settings.engine.disk_dir or settings.server.data_dir / "blocks"
    memory = settings.engine.memory_bytes
    if settings.engines.count > 1 and not settings.engine.device.startswith("cuda"):
        memory = memory or available_bytes() // settings.engines.count
    shared = {"threads": threads, "disk_dir": disk_dir.absolute(), "memory_bytes": memory}
    return EngineProcesses(
        settings.engine.model_copy(update=shared),
        settings.logs,
        count=settings.engines.count,
        folder=settings.server.data_dir / "engines",
        redis_url=redis_url,
        environ=environ,
        worked=worked,
        on_fatal=on_fatal,
    )


async def _listen(
    runner: web.AppRunner,
    settings: Settings,
    certificate: tls.Certificate | None,
    sockets: Sequence[socket.socket] = (),
) -> int:
    """Of a worker on its own sockets. Returns the port."""
    context = None if certificate is None else certificate.listening()
    for sock in sockets or (None,):
        await Site(runner, settings.server.host, settings.server.port, backlog=1024, sock=sock, tls=context).start()
    address = runner.addresses[0]
    return int(address[1])


async def _same_engines(gateway: Gateway, urls: Collection[str], stop: asyncio.Event) -> None:
    """Returns when these have joined, after SAME_ENGINES_S, or when it is time to stop."""
    for _ in range(round(SAME_ENGINES_S / LOOK_S)):
        if stop.is_set() or all(map(gateway.registry.was_joined, urls)):
            return
        await asyncio.sleep(LOOK_S)


async def _first_engines(gateway: Gateway, own: Collection[str], stop: asyncio.Event) -> None:
    """Returns when the engines that are known have joined, when that takes too long, or when it is time to stop. Those
    at the URLs of `own` may load a model; others have not long, and no time once it is known why they did not join."""
    began_s, timeout_s = time.monotonic(), gateway.settings.engines.start_timeout_s

    def awaited(engine: Client, waited_s: float) -> bool:
        if engine.url in own:
            return waited_s < timeout_s
        return waited_s < FIRST_ENGINES_S and not engine.why

    while not stop.is_set():
        waited_s, missing = time.monotonic() - began_s, [one for one in gateway.registry.engines if not one.joined]
        if not any(awaited(engine, waited_s) for engine in missing):
            if any(engine.url in own for engine in missing):
                log.warning("not every engine has joined after %.0f s (engines.start_timeout_s)", timeout_s)
            return
        await asyncio.sleep(LOOK_S)


def _own_vllm(settings: Settings, own_engines: bool) -> list[str]:
    """URL of the vLLM that was started in place of bundled engines, if one was."""
    started = own_engines and settings.engines.count and settings.engines.kind == "vllm"
    return [settings.replicas[-1].url] if started else []


def _introduce(gateway: Gateway, port: int, own_engines: bool, say: Callable[[str], None]) -> None:
    """A few lines: what runs, how to use it, where to look."""
    settings = gateway.settings
    host = settings.server.host
    scheme = "http" if settings.tls.cert is None else "https"
    url = f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104 - compared, not bound
    models = list(gateway.registry.models())
    engines = gateway.registry.engines
    lines = [f"Kvasir {installed_version()} on {url}"]
    own_vllm = _own_vllm(settings, own_engines)
    if own_engines and settings.engines.count and settings.engine.model == "demo" and not own_vllm:
        lines.append(
            "  model    demo: a tiny bundled model that talks English-looking nonsense.\n"
            "           A real one: ./deploy/serve --model Qwen/Qwen3-0.6B   (a hub id or a folder)"
        )
    else:
        lines.append(f"  model    {', '.join(models) or 'none yet'}")
    joined = [engine for engine in engines if engine.joined]
    tokens = sum(engine.hello.num_blocks * engine.hello.namespace.block_size for engine in joined)
    count = f"{len(joined)} of {len(engines)}" if len(joined) < len(engines) else len(joined)
    lines.append(f"  engines  {count}, with room for {tokens:,} tokens of KV blocks")
    for engine in engines:
        if not engine.joined:
            place = f"{engine.name} ({engine.url}): "
            why = engine.why.removeprefix("replica ").removeprefix(place) or "it has not answered yet"
            lines.append(f"  waiting  for {place}{why}")
    if own_vllm:
        lines.append(f"  vllm     {own_vllm[0]}, started here (engines.kind)")
    own_redis = settings.redis.url is None
    where = f"own, in {settings.server.data_dir / 'redis'}" if own_redis else "as configured (redis.url)"
    lines.append(f"  redis    {where if gateway.redis_url else 'none: the index is in memory'}")
    if settings.server.workers > 1:
        lines.append(f"  workers  {settings.server.workers} processes on this port")
    if settings.upstreams:
        lines.append(f"  behind   {', '.join(upstream.name for upstream in settings.upstreams)} ([[upstreams]])")
    if settings.tenants:
        lines.append(f"  access   {len(settings.tenants)} tenants with keys")
    else:
        lines.append("  access   open: no tenants are configured, everybody shares one cache ([[tenants]])")
    key = "KEY OF A TENANT" if settings.tenants else "any"
    lines += [
        f'  SDKs     OpenAI(base_url="{url}/v1", api_key="{key}"), model="{models[0] if models else "..."}"\n'
        f'           Anthropic(base_url="{url}", api_key="{key}")\n'
        f'           genai.Client(http_options={{"base_url": "{url}"}}, api_key="{key}")',
        f"  look     {url}/dashboard  {url}/metrics",
        f"  docs     {url}/docs, and {url}/openapi.json; README.md and docs/ in the repository",
    ]
    say("\n".join(lines))


def _stop_at_signals() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop
