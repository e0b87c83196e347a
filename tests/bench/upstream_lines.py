"""A batch in front of an upstream that takes so many requests a second, and answers each after a while.

    python -m tests.bench.upstream_lines [--lines 500] [--places 16] [--per-second 40] [--retry-after-s 1]

The upstream has a bucket of a quarter of a second's worth, and says 429 when it is empty. Gateway, batch lane and
upstream are in one process, over HTTP; jobs are in memory. `--per-second 0` is an upstream without a limit.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from aiohttp import web

from gateway.config import UpstreamSettings
from tests.fakes.batch_sdk import ENDS, reached, row, settings, submit
from tests.fakes.gateway import running
from tests.fakes.upstream import CHAT


class Limited:
    """An upstream. `asked`, `refused` and `peak` are figures of it."""

    def __init__(self, per_second: float, answer_s: float, retry_after_s: float) -> None:
        self.asked = self.refused = self.peak = 0
        self._per_second = per_second
        self._answer_s = answer_s
        self._retry_after = {"Retry-After": f"{retry_after_s:g}"} if retry_after_s else {}
        self._most = self._left = per_second / 4
        self._filled_s = time.monotonic()
        self._open = 0

    async def handle(self, http: web.Request) -> web.Response:
        await http.read()
        self.asked += 1
        if self._per_second and not self._takes():
            self.refused += 1
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=self._retry_after)
        self._open += 1
        self.peak = max(self.peak, self._open)
        await asyncio.sleep(self._answer_s)
        self._open -= 1
        return web.Response(body=CHAT.pieces[0], content_type="application/json")

    def _takes(self) -> bool:
        now_s = time.monotonic()
        self._left = min(self._most, self._left + (now_s - self._filled_s) * self._per_second)
        self._filled_s = now_s
        takes = self._left >= 1
        self._left -= takes
        return takes


async def measure(options: argparse.Namespace) -> None:
    limited = Limited(options.per_second, options.answer_ms / 1e3, options.retry_after_s)
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", limited.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    upstream = UpstreamSettings(name="up", url=url, models=("up-1",), batch_slots=options.places)
    messages = [{"role": "user", "content": "Hi"}]
    lines = [row(str(n), {"model": "up-1", "messages": messages, "seed": n}) for n in range(options.lines)]
    async with running(**settings(poll_s=1.0), upstreams=[upstream]) as gateway:
        gateway.worker.start()
        client = gateway.sdk()
        made = await submit(client, *lines)
        began_s = time.perf_counter()
        batch = await reached(client, made.id, *ENDS, limit_s=3600.0)
        spent_s = time.perf_counter() - began_s
    await runner.cleanup()
    least_s = options.lines / options.per_second if options.per_second else 0.0
    share = limited.refused / limited.asked
    print(f"{batch.status}, {spent_s:.1f} s (the limit alone: {least_s:.1f} s), {limited.peak} at a time at most")
    print(f"{limited.asked} requests, {limited.refused} of them refused: {share:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--places", type=int, default=16, help="upstreams.batch_slots")
    parser.add_argument("--per-second", type=float, default=40.0)
    parser.add_argument("--answer-ms", type=float, default=50.0)
    parser.add_argument("--retry-after-s", type=float, default=1.0, help="0: it does not say")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
