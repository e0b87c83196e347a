"""What one core of a gateway bears, at 1, 2 and 4 workers: requests and chunks a second, memory of open streams, and
what a request asks of Redis.

    python -m tests.bench.limits [--workers 1 2 4] [--requests 2000] [--streams 500] [--rounds 3]

Processes on the loopback: a fake engine (of tests/bench/gateway_overhead.py), a fake upstream, a Redis, and
`kvasir gateway` with the limits of a tenant, which are counted in Redis, and without a response cache. CPU is what the
kernel says of the gateway's processes, its parent included, so other load on the machine changes it little; a second of
it divided by that of one request is what a core bears. `wall` is what this machine did, with the load and the fakes on
the same cores. Workers share a request's CPU only as far as each has one of its own.

Batch lines are measured by tests/bench/batch_store.py, fleets by tests/bench/fleet_scale.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import redis
from aiohttp import web

from tests.bench.gateway_overhead import CHUNKS, PIECE, body, start, wait_for_answer, wait_for_port
from tests.fakes.ports import free_port
from tests.fakes.redis_process import RedisProcess

AT_ONCE = 64
"""Connections, so that Linux gives each worker some."""

KEY = "key-of-a-tenant"
HEADERS = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
TENANT = f'[[tenants]]\nname = "a"\nkeys = ["{KEY}"]\nrequests_per_minute = 1000000000\n'


async def run_upstream(port: int) -> None:
    """Answers at once; a stream begins and goes on for as long as its client stays."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        base = {"id": "chatcmpl-0", "created": 1, "model": "hosted"}
        if not asked["stream"]:
            message = {"role": "assistant", "content": PIECE}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
            return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        choice = {"index": 0, "delta": {"content": PIECE}, "finish_reason": None}
        data = {**base, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        await asyncio.Event().wait()
        return response

    app = web.Application(handler_args={"handler_cancellation": True})
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


@dataclass
class Gateway:
    """A gateway's processes, by the first one's id."""

    pid: int
    url: str
    store: redis.Redis

    def pids(self) -> Iterator[int]:
        yield self.pid
        yield from self.workers()

    def workers(self) -> list[int]:
        """Those that serve; none where the first one does."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def cpu_s(self) -> float:
        """User and system, of all threads (Linux: schedstat)."""
        threads = (thread for pid in self.pids() for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"))
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def rss_bytes(self) -> int:
        """Of the processes that serve."""
        sizes = (Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in self.workers() or [self.pid])
        return sum(map(int, sizes)) * os.sysconf("SC_PAGE_SIZE")

    def redis_counts(self) -> dict[str, float]:
        told = self.store.info()
        return {
            "commands": told["total_commands_processed"],
            "us": 1e6 * (told["used_cpu_user"] + told["used_cpu_sys"]),
            "bytes": told["total_net_input_bytes"] + told["total_net_output_bytes"],
        }


@dataclass
class Cost:
    """Of one request, or one chunk."""

    cpu_ms: float
    wall_per_s: float
    redis: dict[str, float]


async def ask(session: aiohttp.ClientSession, gateway: Gateway, data: bytes, count: int) -> Cost:
    left = iter(range(count))
    before, asked, begun = gateway.cpu_s(), gateway.redis_counts(), time.monotonic()

    async def sender() -> None:
        for _ in left:
            async with session.post(gateway.url, data=data, headers=HEADERS) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    spent_s, passed_s, now = gateway.cpu_s() - before, time.monotonic() - begun, gateway.redis_counts()
    return Cost(1e3 * spent_s / count, count / passed_s, {name: (now[name] - asked[name]) / count for name in now})


async def settle(gateway: Gateway, data: bytes) -> None:
    """Until every worker has met the engine: each connection is one worker's."""
    async with asyncio.timeout(60):
        while True:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                some = [session.post(gateway.url, data=data, headers=HEADERS) for _ in range(AT_ONCE)]
                statuses = {answer.status for answer in await asyncio.gather(*some)}
            if statuses == {200}:
                return


async def hold(session: aiohttp.ClientSession, gateway: Gateway, data: bytes, streams: int) -> float:
    """Bytes of the gateway's memory for each stream that is open at a time."""
    before = gateway.rss_bytes()
    async with AsyncExitStack() as stack:
        for first in range(0, streams, AT_ONCE):
            count = min(AT_ONCE, streams - first)
            some = [session.post(gateway.url, data=data, headers=HEADERS) for _ in range(count)]
            for answer in await asyncio.gather(*(stack.enter_async_context(one) for one in some)):
                assert answer.status == 200, await answer.text()
                await answer.content.readany()
        return (gateway.rss_bytes() - before) / streams


def median(costs: Sequence[Cost]) -> Cost:
    names = costs[0].redis
    return Cost(
        statistics.median(one.cpu_ms for one in costs),
        statistics.median(one.wall_per_s for one in costs),
        {name: statistics.median(one.redis[name] for one in costs) for name in names},
    )


async def measure(gateway: Gateway, workers: int, options: argparse.Namespace) -> None:
    plain = body(300, stream=False, max_tokens=1)
    kinds = {
        "engine, 300 B": (plain, options.requests),
        "upstream, 300 B": (plain.replace(b'"demo"', b'"hosted"'), options.requests),
        "engine, 16 KB": (body(16_000, stream=False, max_tokens=1), options.requests // 2),
        f"stream of {CHUNKS} chunks": (body(300, stream=True, max_tokens=CHUNKS), max(AT_ONCE, options.requests // 20)),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in kinds}
    timeout = aiohttp.ClientTimeout(total=600)
    await settle(gateway, plain)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for data, count in kinds.values():
            await ask(session, gateway, data, max(AT_ONCE, count // 4))
        for _ in range(options.rounds):
            for name, (data, count) in kinds.items():
                costs[name].append(await ask(session, gateway, data, count))
        held = body(300, stream=True, max_tokens=1).replace(b'"demo"', b'"hosted"')
        each = await hold(session, gateway, held, options.streams)
    for name, several in costs.items():
        one = median(several)
        print(
            f"| {workers} | {name} | {one.cpu_ms:.2f} | {1e3 / one.cpu_ms:,.0f} | {one.wall_per_s:,.0f} "
            f"| {one.redis['commands']:.1f} | {one.redis['us']:.0f} | {one.redis['bytes']:,.0f} |",
            flush=True,
        )
    rss = gateway.rss_bytes() / max(1, workers)
    print(f"{workers} workers: {each / 1e3:.0f} KB for an open stream; {rss / 1e6:.0f} MB for a worker after all that")


@contextmanager
def serving(workers: int, ports: Sequence[int], folder: Path, store: RedisProcess) -> Iterator[Gateway]:
    port, stream, upstream = free_port(), *ports
    table = {
        "name": "http",
        "dialect": "openai",
        "url": f"http://127.0.0.1:{upstream}/v1",
        "models": ["hosted"],
        "max_connections": 4096,
    }
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items())
    (folder / "kvasir.toml").write_text(f"{TENANT}[[upstreams]]\n{lines}")
    flags = ["--config", str(folder / "kvasir.toml"), "--engine-urls", f"http://127.0.0.1:{stream}"]
    flags += ["--port", str(port), "--workers", str(workers), "--redis-url", store.url, "--data-dir", str(folder)]
    flags += ["--log-level", "WARNING", "--response-cache-mode", "off", "--queue-max-waiting", "100000"]
    process = start("-m", "gateway.cli", "gateway", *flags)
    try:
        wait_for_port(port)
        with redis.Redis(unix_socket_path=str(store.socket)) as client:
            yield Gateway(process.pid, f"http://127.0.0.1:{port}/v1/chat/completions", client)
    finally:
        process.terminate()
        process.wait(60)


def compare(options: argparse.Namespace) -> None:
    stream, plain, upstream = (free_port() for _ in range(3))
    engine = ("-m", "tests.bench.gateway_overhead", "--role", "engine", "--ports", str(stream), str(plain))
    fakes = [start(*engine), start("-m", "tests.bench.limits", "--role", "upstream", "--port", str(upstream))]
    print("| workers | request | CPU ms | a core bears, 1/s | wall, 1/s | Redis commands | Redis us | Redis bytes |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    try:
        for port in (stream, upstream):
            wait_for_port(port)
        for workers in options.workers:
            with (
                tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder,
                RedisProcess(Path(folder)) as store,
                serving(workers, (stream, upstream), Path(folder), store) as gateway,
            ):
                asyncio.run(wait_for_answer(gateway.url, KEY))
                asyncio.run(measure(gateway, workers, options))
    finally:
        for process in fakes:
            process.terminate()
        for process in fakes:
            process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["load", "upstream"], default="load", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--streams", type=int, default=500, help="that are open at a time")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.role == "upstream":
        asyncio.run(run_upstream(options.port))
    else:
        compare(options)


if __name__ == "__main__":
    main()
