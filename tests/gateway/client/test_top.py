"""`kvasir top`: what is on its screen, in a terminal and without one."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from gateway.client.screen import MAX_WRONG, duration, money, screen, short, sparkline
from tests.fakes.waiting import until

LIMIT_S = 30.0
STEPS = 60
SAVED = {"requests": 3, "tokens": 1500, "ms": 61_000.0, "money": None}
OVERVIEW: dict[str, Any] = {
    "span": "hour",
    "stale": False,
    "as_of_s": 1_700_000_000.0,
    "redis": "up",
    "gateways": 2,
    "wrong": [{"kind": "engine", "name": "e", "text": "Engine e was lost."}],
    "totals": {
        "requests": 12_345,
        "errors": 12,
        "prompt_tokens": 2_000_000,
        "cached_tokens": 1_500_000,
        "completion_tokens": 999,
        "cost": {"USD": "1234.5"},
        "saved": {
            **dict.fromkeys(("upstream", "exact", "semantic", "batch"), SAVED),
            "prefix": {"requests": 9, "tokens": 1_500_000, "ms": 4.25, "money": {"USD": "0.0012"}},
        },
        "hits": {"exact": 1, "shared": 0, "semantic": 1, "prefix": 6, "miss": 2, "bypass": 0},
        "first_token_ms": {"p50": 120.0, "p90": 1500.0, "p99": None},
        "inter_token_ms": {"p50": 9.25, "p90": None, "p99": None},
    },
    "series": {
        "requests": list(range(STEPS)),
        **{name: [0] * STEPS for name in ("errors", "prompt_tokens", "cached_tokens")},
        "first_token_p50_ms": [None] * STEPS,
    },
}


def shown(overview: dict[str, Any] = OVERVIEW, **more: Any) -> list[str]:
    return screen(overview, "http://x", **{"width": 100, "styled": False} | more)


def test_the_screen_has_what_was_used_saved_and_is_wrong() -> None:
    text = "\n".join(shown())
    assert text.startswith("Kvasir http://x: the last hour, 2 gateways\n! Engine e was lost.\n")
    for line in (
        r"requests +12,345  12 errors \(0\.1%\)",
        r"prompt tokens +2\.0M  1\.5M of them cached \(75\.0%\)",
        r"cost +USD 1,234\.50",
        r"answered by +exact 10\.0%, .*prefix 60\.0%, miss 20\.0%, bypass 0\.0%",
        r"prefix +9 +1\.5M +4\.2 ms +USD 0\.0012",
        r"batch +3 +1\.5k +1\.0 min +no price",
        r"first token +120 ms +1\.5 s +-",
        r"requests +▁.*█",
    ):
        assert re.search(rf"^{line}", text, re.MULTILINE), line


def test_it_is_no_larger_than_the_terminal_and_names_do_nothing_to_it() -> None:
    hostile = OVERVIEW | {"wrong": [{"kind": "engine", "name": "", "text": "Engine \x1b[2J\x07 is away."}] * 9}
    assert all(len(line) <= 40 for line in shown(width=40))
    assert len(shown(height=5)) == 5
    lines = shown(hostile)
    assert not any("\x1b" in line or "\x07" in line for line in lines)
    assert lines[1] == "! Engine \\x1b[2J\\x07 is away."
    assert lines[1 + MAX_WRONG] == f"! and {9 - MAX_WRONG} more"
    assert "last known" in shown(OVERVIEW | {"stale": True})[1]


def test_figures_are_short() -> None:
    assert [short(one) for one in (0, 999, 1000, 12_345_678)] == ["0", "999", "1.0k", "12.3M"]
    assert [duration(one) for one in (None, 0, 9.25, 3_600_000)] == ["-", "0 ms", "9.2 ms", "1.0 h"]
    assert [money(one) for one in (None, {"USD": "0"}, {"EUR": "0.00001234", "USD": "2"})] == [
        "no price",
        "USD 0.00",
        "EUR 0.000012, USD 2.00",
    ]
    assert sparkline([0, None, 1, 1000, 500], 4) == " ▁█▄"
    assert sparkline([], 9) == sparkline([1], 0) == ""


# -- the command ------------------------------------------------------------------------------------------------------


class Pages:
    """A gateway that has an overview, and then has none. `asked` are the headers of its requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answers: list[web.Response] = []

    async def show(self, http: web.Request) -> web.Response:
        self.asked.append((http.query["span"], http.headers.get("Authorization")))
        return self.answers.pop(0) if self.answers else web.json_response(OVERVIEW)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Pages, str]]:
    pages, app = Pages(), web.Application()
    app.router.add_get("/admin/overview", pages.show)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield pages, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def started(url: str, *more: str, **streams: Any) -> Any:
    environ = {**os.environ, "KVASIR_API_KEY": "admin-key-1", "PYTHONIOENCODING": "utf-8"}
    command = (sys.executable, "-m", "gateway.cli", "top", "--url", url, *more)
    return asyncio.create_subprocess_exec(*command, env=environ, **streams)


async def test_without_a_terminal_it_prints_once() -> None:
    pipe = asyncio.subprocess.PIPE
    async with serving() as (pages, url):
        process = await started(url, "--span", "day", stdin=asyncio.subprocess.DEVNULL, stdout=pipe)
        text = (await process.communicate())[0].decode()
        refused = web.json_response({"error": {"message": "Incorrect admin key provided."}}, status=401)
        pages.answers = [refused]
        failing = await started(url, stdout=pipe, stderr=pipe)
        errors = (await failing.communicate())[1].decode()
    assert process.returncode == 0
    assert "Engine e was lost." in text
    assert "\x1b" not in text
    assert pages.asked[0] == ("day", "Bearer admin-key-1")
    assert (failing.returncode, errors) == (1, "kvasir top: Incorrect admin key provided.\n")


async def test_in_a_terminal_it_goes_on_until_q_and_leaves_it_as_it_was() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(theirs)
    seen = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: seen.extend(os.read(ours, 65536)))
    try:
        async with serving() as (pages, url):
            process = await started(url, stdin=theirs, stdout=theirs, stderr=theirs)
            await until(lambda: b"Engine e was lost." in seen, LIMIT_S)
            pages.answers = [web.json_response({"error": {"message": "It is full."}}, status=503)]
            await until(lambda: b"It is full.; asking again" in seen, LIMIT_S)
            assert process.returncode is None
            os.write(ours, b"xq")
            assert await asyncio.wait_for(process.wait(), LIMIT_S) == 0
            await until(lambda: seen.endswith(b"\x1b[?1049l"), LIMIT_S)
        assert termios.tcgetattr(theirs) == before
        assert seen.startswith(b"\x1b[?1049h")
        drawn = seen.split(b"\x1b[H")[1]
        assert drawn.count(b"\n") < 24
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        os.close(theirs)
