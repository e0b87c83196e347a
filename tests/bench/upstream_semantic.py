"""What an answer to a question that means the same takes in front of an upstream, against asking the upstream, and what
looking for one adds to a request that finds none.

    python -m tests.bench.upstream_semantic [--questions 200] [--rounds 3]

Processes: `kvasir gateway` with the real encoder and no Redis; this one sends the requests, and answers them as the
upstream, at once. So what is above "direct" is Kvasir's own. Answers are not compared (judged = false): each of them
names its question, and those that name another one than was asked in other words are counted as wrong.

p50 one after the other, in milliseconds, and CPU of the gateway per request. Rounds alternate; medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import orjson
from aiohttp import web

from tests.bench.gateway_overhead import Middle, start, wait_for_port
from tests.fakes.ports import free_port

VERBS: Final = ("cancel", "rename", "print", "share", "export", "archive", "repair", "translate", "review", "order")
THINGS: Final = (
    "password", "invoice", "calendar", "photograph", "subscription", "passport", "garden fence", "bicycle", "playlist",
    "mailing list", "spreadsheet", "apartment lease", "coffee machine", "tax return", "boarding pass", "guitar",
    "parking permit", "diary", "vaccination record", "kitchen sink", "keyboard", "wedding invitation", "sleeping bag",
    "library card", "telescope", "aquarium", "violin case", "solar panel", "dog licence", "novel",
)  # fmt: skip
ASKED: Final = "How do I {} my {}?"
AGAIN: Final = "Hello! How do I {} my {}? Thanks!"
KEEP_OUT: Final = {"Cache-Control": "no-store"}
CONFIG: Final = """
[response_cache]
upstreams = "on"
[semantic_cache]
mode = "on"
judged = false
lookup_timeout_s = 5.0
[[upstreams]]
name = "up"
url = "http://127.0.0.1:{port}/v1"
models = ["up-1"]
"""


async def answer(http: web.Request) -> web.StreamResponse:
    """Says what was asked, in a few hundred bytes."""
    asked = orjson.loads(await http.read())
    text = f"You asked: {asked['messages'][-1]['content']}"
    base = {"id": "chatcmpl-1", "created": 1, "model": "up-1"}
    usage = {"prompt_tokens": 20, "completion_tokens": 20, "total_tokens": 40}
    if not asked.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(http)
    for delta, reason in (({"content": text}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        told = {**base, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + orjson.dumps(told) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


class Asking:
    """Questions, sent to one place and another."""

    def __init__(self, session: aiohttp.ClientSession, direct: str, ours: Middle) -> None:
        self._session = session
        self._direct = direct
        self._ours = ours
        self.outcomes: dict[str, Counter[str]] = {}
        self.wrong = 0

    async def round(
        self, row: str, questions: Sequence[tuple[str, str]], words: str, *, stream: bool, **headers: str
    ) -> tuple[float, float]:
        """p50, and CPU of the gateway per request."""
        times, before = [], self._ours.cpu_s()
        for question in questions:
            began_s = time.perf_counter()
            outcome, told = await self._ask(words.format(*question), row == "direct", stream=stream, **headers)
            times.append((time.perf_counter() - began_s) * 1e3)
            self.outcomes.setdefault(row, Counter())[outcome] += 1
            self.wrong += outcome == "semantic" and ASKED.format(*question).encode() not in told
        return statistics.median(times), (self._ours.cpu_s() - before) / len(questions) * 1e3

    async def _ask(self, text: str, direct: bool, *, stream: bool, **headers: str) -> tuple[str, bytes]:
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        body = {"model": "up-1", "messages": turns, "temperature": 0, **({"stream": True} if stream else {})}
        url = self._direct if direct else self._ours.url
        async with self._session.post(url, json=body, headers=headers) as answer:
            told = await answer.read()
            assert answer.status == 200, told
            return answer.headers.get("x-kvasir-cache", ""), told


async def measure(ours: Middle, direct: str, arguments: argparse.Namespace) -> None:
    every = list(itertools.product(VERBS, THINGS))
    random.Random(7).shuffle(every)
    questions, others = every[: arguments.questions], every[arguments.questions :]
    print(f"{len(questions)} questions, {arguments.rounds} rounds")
    print("| request | p50 ms | CPU ms | what the cache had |\n| --- | --- | --- | --- |")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as session:
        for stream in (False, True):
            asking, rows = Asking(session, direct, ours), dict[str, list[tuple[float, float]]]()
            await asking.round("warm", others[:20], ASKED, stream=stream)  # loads the encoder
            await asking.round("kept", questions, ASKED, stream=stream)
            for _ in range(arguments.rounds):
                for row, words, asked, headers in (
                    ("direct", ASKED, questions, {}),
                    ("not looked up", AGAIN, questions, {**KEEP_OUT, "x-kvasir-cache": "exact"}),
                    ("exact", ASKED, questions, {}),
                    ("semantic", AGAIN, questions, KEEP_OUT),
                    ("found nothing", ASKED, others[20:], KEEP_OUT),
                ):
                    rows.setdefault(row, []).append(await asking.round(row, asked, words, stream=stream, **headers))
            for row, found in rows.items():
                p50, cpu = (statistics.median(values) for values in zip(*found, strict=True))
                had = ", ".join(
                    f"{count} {outcome}" for outcome, count in asking.outcomes[row].most_common() if outcome
                )
                print(f"| {row}, {'stream' if stream else 'whole'} | {p50:.2f} | {cpu:.2f} | {had} |", flush=True)
            print(f"wrong: {asking.wrong}", flush=True)


async def run(arguments: argparse.Namespace) -> None:
    upstream, port = free_port(), free_port()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", upstream).start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvasir.toml"
        config.write_text(CONFIG.format(port=upstream), encoding="utf-8")
        flags = ["--port", str(port), "--data-dir", folder, "--config", str(config), "--log-level", "WARNING"]
        process = start("-m", "gateway.cli", "gateway", *flags)
        try:
            await asyncio.to_thread(wait_for_port, port)
            path = "/v1/chat/completions"
            ours = Middle("kvasir", process.pid, f"http://127.0.0.1:{port}{path}")
            await measure(ours, f"http://127.0.0.1:{upstream}{path}", arguments)
        finally:
            process.terminate()
            process.wait(30)
            await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
