"""What an answer from the response cache costs, against a bare aiohttp handler that returns the same bytes, and against
the same request without the cache.

    python -m tests.bench.response_cache [--scale 1.0] [--rounds 15] [--log-level INFO WARNING]
                                         [--questions 1000 10000 20000]

Processes: a fake engine that gives a token every 4 ms; `kvasir serve` without engines of its own, one for each level of
its log, the default alone unless others are named; the bare handler, which reads the body, returns what a hit was and
logs nothing. Logs go through a pipe to a process that writes them to a file, as those of containers do. This process
sends the requests. CPU is what the kernel says of the process, user and system, per request, eight at a time; p50 is
that of one after the other.

Goal: at most 2.5 times the bare handler, in both. Rounds alternate and are short, so that what else the machine does
meets both alike; medians are printed. Misses take long, and have a turn in every MISSES-th round.

Behind these, what a look-up by meaning takes at several numbers of questions (semantic_lookup).
Goal: 10 ms at 10,000 for 20 wordpieces.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import orjson
from aiohttp import web

from gateway.config import ServerSettings
from tests.bench import semantic_lookup
from tests.bench.gateway_overhead import Middle, body, start, wait_for_answer, wait_for_port
from tests.fakes.ports import free_port

TOKENS: Final = 128
AT_ONCE: Final = 8
SIZES: Final = {"300 B": 300, "16 KB": 16_000, "400 KB": 400_000}
MISSES: Final = 5
NO_CACHE: Final = {"Cache-Control": "no-cache, no-store"}


async def run_bare(port: int) -> None:
    """Answers with the bytes that it was given with PUT, after reading what it was asked."""
    kept: dict[str, bytes] = {}

    async def keep(http: web.Request) -> web.Response:
        kept[http.path] = await http.read()
        return web.Response()

    async def answer(http: web.Request) -> web.Response:
        await http.read()
        kind = "text/event-stream" if "stream" in http.path else "application/json"
        return web.Response(body=kept[http.path], content_type=kind)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_put("/{name:.*}", keep)
    app.router.add_post("/{name:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


@dataclass
class Case:
    """One request, and who answers it."""

    name: str
    data: bytes
    stream: bool


def cases() -> list[Case]:
    made = []
    for name, size in SIZES.items():
        for stream in (False, True):
            asked = orjson.loads(body(size, stream=stream, max_tokens=TOKENS)) | {"temperature": 0}
            made.append(Case(f"{name}, {'stream' if stream else 'whole'}", orjson.dumps(asked), stream))
    return made


async def ask(session: aiohttp.ClientSession, url: str, case: Case, **headers: str) -> tuple[bytes, str]:
    sent = {"Content-Type": "application/json", **headers}
    async with session.post(url, data=case.data, headers=sent) as answer:
        told = await answer.read()
        assert answer.status == 200, told
        return told, answer.headers.get("x-kvasir-cache", "")


async def one_by_one(session: aiohttp.ClientSession, url: str, case: Case, count: int, **headers: str) -> float:
    """Milliseconds, p50."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        await ask(session, url, case, **headers)
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times)


async def cpu(
    session: aiohttp.ClientSession, middle: Middle, url: str, case: Case, count: int, **headers: str
) -> float:
    """Milliseconds per request."""
    left, before = iter(range(count)), middle.cpu_s()

    async def sender() -> None:
        for _ in left:
            await ask(session, url, case, **headers)

    await asyncio.gather(*(sender() for _ in range(AT_ONCE)))
    return (middle.cpu_s() - before) / count * 1e3


async def measure(ours: Sequence[Middle], bare: Middle, arguments: argparse.Namespace) -> None:
    """`ours` are named by their level."""
    print(f"ms, medians of {arguments.rounds} rounds; answers of {TOKENS} tokens")
    print(
        "| request | log | bare p50 | hit p50 | ratio | bare CPU | hit CPU | ratio "
        "| miss p50 | miss CPU | hit / miss CPU |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number, case in enumerate(cases()):
            for own in ours:
                await ask(session, own.url, case)
                told, outcome = await ask(session, own.url, case)
                assert outcome == "exact", outcome
            same = f"{bare.url}/{number}{'stream' if case.stream else ''}"
            async with session.put(same, data=told):
                pass
            count = max(20, int(arguments.scale * min(400, 40_000_000 // len(case.data))))
            turns = [("bare", bare, same, {}, count)]
            turns += [(f"{own.name} hit", own, own.url, {}, count) for own in ours]
            misses = [(f"{own.name} miss", own, own.url, NO_CACHE, max(8, count // 20)) for own in ours]
            rows: dict[str, list[float]] = {}
            for turn in range(arguments.rounds):
                for name, middle, url, headers, times in turns + ([] if turn % MISSES else misses):
                    rows.setdefault(f"{name} p50", []).append(
                        await one_by_one(session, url, case, max(4, times // 2), **headers)
                    )
                    rows.setdefault(f"{name} CPU", []).append(await cpu(session, middle, url, case, times, **headers))
            ms = {name: statistics.median(values) for name, values in rows.items()}
            for own in ours:
                _, outcome = await ask(session, own.url, case)
                assert outcome == "exact", outcome
                print(_row(case, own.name, ms), flush=True)


def _row(case: Case, level: str, ms: dict[str, float]) -> str:
    bare_p50, hit_p50, miss_p50 = (ms[f"{name} p50"] for name in ("bare", f"{level} hit", f"{level} miss"))
    bare_cpu, hit_cpu, miss_cpu = (ms[f"{name} CPU"] for name in ("bare", f"{level} hit", f"{level} miss"))
    cells = [
        level,
        f"{bare_p50:.2f}",
        f"{hit_p50:.2f}",
        f"{hit_p50 / bare_p50:.2f}",
        f"{bare_cpu:.3f}",
        f"{hit_cpu:.3f}",
        f"{hit_cpu / bare_cpu:.2f}",
        f"{miss_p50:.0f}",
        f"{miss_cpu:.2f}",
        f"{hit_cpu / miss_cpu:.3f}",
    ]
    return f"| {case.name} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["load", "bare"], default="load", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    parser.add_argument("--log-level", nargs="+", default=[ServerSettings().log_level], help="of `kvasir serve`")
    parser.add_argument("--questions", type=int, nargs="*", default=semantic_lookup.SIZES)
    arguments = parser.parse_args()
    if arguments.role == "bare":
        import uvloop

        uvloop.run(run_bare(arguments.port))
    else:
        compare(arguments)
        if arguments.questions:
            semantic_lookup.measure(arguments.questions, semantic_lookup.LOOKUPS)


def compare(arguments: argparse.Namespace) -> None:
    stream, http, bare = (free_port() for _ in range(3))
    ports = {level: free_port() for level in arguments.log_level}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start("-m", "tests.bench.gateway_overhead", "--role", "engine", "--ports", str(stream), str(http)),
            start("-m", "tests.bench.response_cache", "--role", "bare", "--port", str(bare)),
        ]
        url = f"http://127.0.0.1:{stream}"
        processes += [start_ours(Path(folder) / level, level, port, url) for level, port in ports.items()]
        try:
            for port in (stream, bare, *ports.values()):
                wait_for_port(port)
            ours = [
                Middle(level, process.pid, f"http://127.0.0.1:{port}/v1/chat/completions")
                for process, (level, port) in zip(processes[2:], ports.items(), strict=True)
            ]
            for own in ours:
                asyncio.run(wait_for_answer(own.url))
            asyncio.run(measure(ours, Middle("bare", processes[1].pid, f"http://127.0.0.1:{bare}"), arguments))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def start_ours(folder: Path, level: str, port: int, engine: str) -> subprocess.Popen[bytes]:
    """With its log in log.txt of the folder."""
    folder.mkdir()
    flags = ["--port", str(port), "--data-dir", str(folder), "--log-level", level]
    flags += ["--engines", "0", "--engine-urls", engine]
    flags += ["--response-cache-truncated", "true"]  # the fake engine never ends by itself
    with (folder / "log.txt").open("wb") as file:
        reader = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file)
    assert reader.stdin is not None
    with reader.stdin as pipe:
        return subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", "serve", *flags], stdout=subprocess.DEVNULL, stderr=pipe
        )


if __name__ == "__main__":
    main()
