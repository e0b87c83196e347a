"""The engine's process from start to end, with a model that only counts in the place of the real one."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from aiohttp import web
from redis.asyncio import Redis

from engine import serving
from engine.compute.kv_cache import CacheShape, KVCache
from engine.config import ConfigError, EngineSettings
from engine.protocol import HEALTH_PATH, STREAM_PATH, Hello, Namespace, StepFrame, decode
from engine.sequence import Step
from engine.tls import between
from tests.fakes.certificates import Authority
from tests.fakes.fake_engine import TOKENIZER
from tests.fakes.oracle_runner import choose_token
from tests.fakes.small_engine import VOCAB, Stream, make_submit
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

MODEL = SimpleNamespace(
    name="small",
    tokenizer=TOKENIZER,
    context_tokens=2048,
    vocab_size=VOCAB,
    eos_ids=(),
    warnings=(),
    adapters=(),
    namespace=lambda block_size, hash_name: Namespace("w", "f", "f", block_size, hash_name=hash_name),
)


class CountingRunner:
    """Samples like the oracle, without its checks. Held back for `delay`, if that is set."""

    num_blocks = 200

    def __init__(self) -> None:
        self.cache = KVCache(CacheShape(1, 1, 8, torch.float32), self.num_blocks, 16, torch.device("cpu"))
        self.delay = 0.0
        self.dies = False

    def measure(self) -> None:
        """It uses nothing of a machine."""

    def find_not_finite(self, blocks: list[int]) -> list[int]:
        return []

    def run(self, step: Step) -> list[int | None]:
        import time

        time.sleep(self.delay)
        if self.dies:
            raise SystemExit("as if the thread were killed")
        return [choose_token(w.sequence.salt, w.sequence.tokens, VOCAB) if w.samples else None for w in step.work]


@asynccontextmanager
async def process(
    monkeypatch: pytest.MonkeyPatch, folder: Path, redis_url: str | None = None, **changes: Any
) -> AsyncIterator[tuple[asyncio.Task[None], CountingRunner, str]]:
    """engine.serving.serve as a task; it has to end by itself."""
    runner = CountingRunner()
    monkeypatch.setattr(serving, "load", lambda settings: (MODEL, runner))
    settings = tuned(EngineSettings, **{"listen": f"unix:{folder / 'e.sock'}", "drain_s": 5.0, **changes})
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serving.serve(settings, redis_url, ready.set_result))
    await asyncio.wait({task, ready}, timeout=30, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield task, runner, ready.result()
    finally:
        if not task.done():
            terminate()
            terminate()
        await asyncio.wait({task}, timeout=30)
        assert task.done()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@asynccontextmanager
async def stream(url: str) -> AsyncIterator[tuple[Stream, Hello]]:
    connector = aiohttp.UnixConnector(url.removeprefix("unix:"))
    async with (
        aiohttp.ClientSession("http://engine", connector=connector) as session,
        session.ws_connect(STREAM_PATH, max_msg_size=0) as socket,
    ):
        hello = decode(await socket.receive_bytes())
        assert isinstance(hello, Hello)
        yield Stream(socket), hello


def answering(message: object) -> bool:
    return isinstance(message, StepFrame) and any(update.tokens for update in message.updates)


def finished(message: object) -> bool:
    return isinstance(message, StepFrame) and any(update.finish for update in message.updates)


async def test_sigterm_lets_what_runs_end_and_leaves_nothing_in_redis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, redis_url: str
) -> None:
    redis: Redis = Redis.from_url(redis_url)
    async with process(monkeypatch, tmp_path, redis_url) as (task, runner, url), stream(url) as (gateway, hello):

        async def announced() -> bool:
            return len(await redis.keys("kvasir:engine:*")) == 1

        await until(announced)
        runner.delay = 0.01
        await gateway.send(make_submit(hello.namespace, 1, [1] * 40, max_tokens=30))
        await gateway.until(answering)
        terminate()
        last = (await gateway.until(finished))[-1]
        assert isinstance(last, StepFrame)
        assert last.updates[0].finish == "length"
        await asyncio.wait_for(task, 30)
        assert await redis.keys("*") == []
    await redis.aclose()


async def test_an_idle_engine_says_that_it_ends_before_it_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with process(monkeypatch, tmp_path) as (task, _, url), stream(url) as (gateway, _):
        await gateway.until(lambda message: isinstance(message, StepFrame))
        terminate()
        await gateway.until(lambda message: isinstance(message, StepFrame) and message.load.draining)
        await asyncio.wait_for(task, 30)


async def test_a_drain_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with process(monkeypatch, tmp_path, drain_s=0.2) as (task, runner, url), stream(url) as (gateway, hello):
        runner.delay = 0.01
        await gateway.send(make_submit(hello.namespace, 1, [1] * 40, max_tokens=2000))
        await gateway.until(answering)
        terminate()
        last = (await gateway.until(finished))[-1]
        assert isinstance(last, StepFrame)
        assert last.updates[0].finish == "error"
        await asyncio.wait_for(task, 30)


async def test_a_second_signal_ends_the_drain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with process(monkeypatch, tmp_path, drain_s=60.0) as (task, runner, url), stream(url) as (gateway, hello):
        runner.delay = 0.01
        await gateway.send(make_submit(hello.namespace, 1, [1] * 40, max_tokens=2000))
        await gateway.until(answering)
        terminate()
        await gateway.until(lambda message: isinstance(message, StepFrame) and message.load.draining)
        terminate()
        await asyncio.wait_for(task, 30)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_whose_thread_is_gone_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(serving, "ALIVE_CHECK_S", 0.05)
    async with process(monkeypatch, tmp_path) as (task, runner, url), stream(url) as (gateway, hello):
        runner.dies = True
        await gateway.send(make_submit(hello.namespace, 1, [1] * 40))
        with pytest.raises(RuntimeError, match="thread ended"):
            await asyncio.wait_for(task, 30)


async def test_with_certificates_a_port_speaks_https_to_those_who_have_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Authority().issue(tmp_path / "tls", use=None)
    changes: dict[str, Any] = {"listen": "127.0.0.1:0", "tls_dir": folder}
    with pytest.raises(ConfigError, match=r"engine\.advertise: 'http://a:1' should begin with https://"):
        async with process(monkeypatch, tmp_path, **changes, advertise="http://a:1"):
            pass
    own = between(folder, serves=False)
    assert own is not None
    async with process(monkeypatch, tmp_path, **changes) as (_, _, url):
        assert url.startswith("https://127.0.0.1:")
        connector = aiohttp.TCPConnector(ssl=own.context())
        async with (
            aiohttp.ClientSession(url, connector=connector) as session,
            session.ws_connect(STREAM_PATH) as socket,
        ):
            assert isinstance(decode(await socket.receive_bytes()), Hello)
    async with process(monkeypatch, tmp_path, tls_dir=folder) as (_, _, url), stream(url):
        assert url.startswith("unix:")


@pytest.mark.parametrize("listen", ["nowhere", "host:", ":8090", "127.0.0.1:http"])
async def test_a_bad_address_is_a_setting_error(listen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.listen"):
        async with process(monkeypatch, tmp_path, listen=listen):
            pass


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.5:8090", "engine-1.internal:8090"])
async def test_an_address_on_a_network_needs_a_secret(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.listen.*set engine\.secret \(KVASIR_ENGINE_SECRET\)"):
        serving._check_address(EngineSettings(listen=listen))
    serving._check_address(EngineSettings(listen=listen, secret="s"))
    serving._check_address(EngineSettings(listen=listen, tls_dir=Path("tls")))


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.3.2.1:1", "[::1]:0", "localhost:8090", "unix:/run/e.sock"])
async def test_an_address_on_this_machine_needs_none(listen: str) -> None:
    serving._check_address(EngineSettings(listen=listen))


async def test_on_tcp_it_says_the_port_that_it_got(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with process(monkeypatch, tmp_path, listen="127.0.0.1:0") as (task, _, url), aiohttp.ClientSession() as http:
        assert url.startswith("http://127.0.0.1:")
        async with http.get(url + HEALTH_PATH) as answer:
            assert answer.status == 200
        terminate()
        await asyncio.wait_for(task, 30)


async def test_a_socket_file_is_for_its_owner_only(tmp_path: Path) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    path = tmp_path / "deep" / "e.sock"
    assert await serving._listen(runner, EngineSettings(listen=f"unix:{path}")) == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await runner.cleanup()


async def test_an_engine_without_a_torch_can_be_imported() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "import sys, engine.serving; assert 'torch' not in sys.modules"),
        cwd=Path(__file__).parents[2],
    )
    assert await asyncio.wait_for(process.wait(), 30) == 0
