"""What `upstreams.max_in_flight` costs a request in CPU, and what it is good for.

    python -m tests.bench.upstream_places [--against FOLDER] [--rounds 41] [--scale 1.0]

Cost: one gateway in front of an HTTP server that it has as three upstreams, 8 requests at a time: without the setting,
with one that is never reached, and with 4, so that half of the requests wait; with --against also the gateway of
another checkout, beside it. CPU is what the kernel says of the gateway's process. Rounds alternate; the ratio is the
median of those of the rounds. Then the places by themselves.

Use: a server that answers 8 at a time, each in 50 ms, and lets the others wait as they came, as a vLLM does. One tenant
sends 400 requests at once, another one after the other: how long do its answers take, without the setting and with 8?
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp
from aiohttp import web

from gateway.config import QueueSettings
from gateway.types import Ask
from gateway.upstreams.slots import UpstreamSlots
from tests.bench.gateway_overhead import Middle, body, load, wait_for_answer, wait_for_port
from tests.fakes.ports import free_port

AT_ONCE = 8
ANSWER_S = 0.05
BURST = 400
SINGLES = 20
NORTH, SOUTH = "sk-north-tenant", "sk-south-tenant"
ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"demo","choices":[{"index":0,"message":{"role":'
    b'"assistant","content":"word"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}'
)


async def serve(port: int, places: int, answer_s: float) -> None:
    """Answers so many at a time, first come, first served."""
    free = asyncio.Semaphore(places)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        async with free:
            await asyncio.sleep(answer_s)
        return web.Response(body=ANSWER, content_type="application/json")

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


def start(*arguments: str, folder: str | None = None) -> subprocess.Popen[bytes]:
    """`folder` has another checkout's packages."""
    env = os.environ if folder is None else {**os.environ, "PYTHONPATH": folder}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=sys.stderr, env=env, cwd=folder
    )


def server(places: int, answer_s: float) -> tuple[int, subprocess.Popen[bytes]]:
    port = free_port()
    return port, start("-m", "tests.bench.upstream_places", "--server", str(port), str(places), str(answer_s))


def gateway(
    home: Path, behind: int, settings: Mapping[str, str], *, tenants: str = "", folder: str | None = None
) -> Middle:
    """One in front of the server, which is an upstream for each of these models, with these settings."""
    port, data = free_port(), Path(tempfile.mkdtemp(dir=home))
    file = data / "kvasir.toml"
    ups = (
        f'[[upstreams]]\nname = "{model}"\nurl = "http://127.0.0.1:{behind}/v1"\nmodels = ["{model}"]\n{setting}\n'
        for model, setting in settings.items()
    )
    file.write_text("".join(f"{up}max_waiting = 1000\n" for up in ups) + tenants)
    flags = ["--port", str(port), "--data-dir", str(data), "--log-level", "WARNING", "--response-cache-mode", "off"]
    process = start("-m", "gateway.cli", "gateway", "--config", str(file), *flags, folder=folder)
    PROCESSES.append(process)
    wait_for_port(port)
    return Middle(str(port), process.pid, f"http://127.0.0.1:{port}/v1/chat/completions")


COSTS = {"demo": "", "demo-64": "max_in_flight = 64", "demo-4": "max_in_flight = 4"}
PROCESSES: list[subprocess.Popen[bytes]] = []


async def cost(home: Path, arguments: argparse.Namespace) -> None:
    behind, process = server(1000, 0.004)
    PROCESSES.append(process)
    wait_for_port(behind)
    count = int(300 * arguments.scale)
    ours = gateway(home, behind, COSTS)
    asked = {name: (ours, body(300, stream=False, max_tokens=1).replace(b"demo", name.encode())) for name in COSTS}
    if arguments.against:
        before = gateway(home, behind, {"demo": ""}, folder=arguments.against)
        asked = {"before": (before, body(300, stream=False, max_tokens=1))} | asked
    rows: dict[str, list[float]] = {name: [] for name in asked}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for middle, data in asked.values():
            await wait_for_answer(middle.url)
            await load(session, middle, data, count, AT_ONCE)
        for _ in range(arguments.rounds):
            for name in random.sample(list(asked), len(asked)):
                rows[name].append(await load(session, *asked[name], count, AT_ONCE))
    first = next(iter(rows.values()))
    print("| gateway | CPU per request, us | ratio |\n| --- | --- | --- |")
    for name, costs in rows.items():
        ratio = statistics.median(cost / other for cost, other in zip(costs, first, strict=True))
        print(f"| {COSTS.get(name) or name} | {statistics.median(costs) * 1e6:.0f} | {ratio:.3f} |")


async def decide(count: int = 2000) -> None:
    """What a slot takes when one is free, and when so many tenants wait, with as many requests each."""
    limits = QueueSettings(max_waiting=1 << 20, max_waiting_per_tenant=1 << 20)
    slots, ask = UpstreamSlots(1, 1, limits), Ask("t", 0, 1e12)
    began_s = time.perf_counter()
    for _ in range(count):
        await slots.take(ask)
        slots.release(ask)
    print(f"\na free slot taken and released: {(time.perf_counter() - began_s) / count * 1e6:.1f} us")
    for tenants, each in ((1, 500), (10, 50), (100, 10), (1000, 1)):
        slots = UpstreamSlots(1, 1, limits)
        await slots.take(ask)

        async def stay(ask: Ask, slots: UpstreamSlots = slots) -> None:
            await slots.take(ask)
            slots.release(ask)

        asks = [Ask(f"t{number % tenants}", 0, 1e12) for number in range(tenants * each)]
        waiting = [asyncio.ensure_future(stay(one)) for one in asks]
        await asyncio.sleep(0)
        began_s = time.perf_counter()
        slots.release(ask)
        await asyncio.gather(*waiting)
        took_us = (time.perf_counter() - began_s) / len(asks) * 1e6
        print(f"handed on while {tenants} tenants have {each} waiting each: {took_us:.1f} us")


async def use(home: Path) -> None:
    behind, process = server(8, ANSWER_S)
    PROCESSES.append(process)
    wait_for_port(behind)
    keys = "".join(f'[[tenants]]\nname = "t{key[3]}"\nkeys = ["{key}"]\n' for key in (NORTH, SOUTH))
    data = body(300, stream=False, max_tokens=1)

    async def ask(session: aiohttp.ClientSession, url: str, key: str) -> float:
        began_s = time.monotonic()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        async with session.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return time.monotonic() - began_s

    print(f"\n| gateway | burst of {BURST}, s | the other tenant's answers, ms: median, longest |\n| --- | --- | --- |")
    for setting in ("", "max_in_flight = 8"):
        middle = gateway(home, behind, {"demo": setting}, tenants=keys)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            alone = [await ask(session, middle.url, SOUTH) for _ in range(SINGLES)]
            began_s = time.monotonic()
            burst = [asyncio.ensure_future(ask(session, middle.url, NORTH)) for _ in range(BURST)]
            await asyncio.sleep(0.2)  # it is all there
            beside: list[float] = []
            while not all(task.done() for task in burst):
                beside.append(await ask(session, middle.url, SOUTH))
            took_s = time.monotonic() - began_s
        told = (f"{statistics.median(row) * 1e3:.0f}, {max(row) * 1e3:.0f}" for row in (beside, alone))
        print(f"| {setting or '-'} | {took_s:.1f} | {next(told)} of {len(beside)} (alone {next(told)}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--against", help="folder of another checkout, whose gateway is measured beside this one")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    arguments = parser.parse_args()
    if arguments.server:
        port, places, answer_s = arguments.server
        asyncio.run(serve(int(port), int(places), float(answer_s)))
        return
    with tempfile.TemporaryDirectory() as home:
        try:
            asyncio.run(cost(Path(home), arguments))
            asyncio.run(decide())
            asyncio.run(use(Path(home)))
        finally:
            for process in PROCESSES:
                process.terminate()
            for process in PROCESSES:
                process.wait(30)


if __name__ == "__main__":
    main()
