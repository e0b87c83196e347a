"""What the gateway costs in CPU, against a bare aiohttp reverse proxy in front of the same fake engine.

    python -m tests.bench.gateway_overhead [--scale 1.0] [--upstream | --translated | --replica]

Processes: a fake engine that speaks both the engine stream (for Kvasir) and plain HTTP (for the proxies); a bare proxy
that copies bytes; a bare proxy that also parses the JSON and hashes the body (SHA-256, as the key of an exact cache
would be); `kvasir serve` without engines of its own. This process sends the requests. CPU is what the kernel says of
the process in the middle, user and system, per request. With --upstream the HTTP server is an upstream of
Kvasir's, which has no engine then: bytes in both directions, as the proxies have them. With --translated it is one
that speaks the Anthropic API, so that every request and chunk is translated. With --replica it is a vLLM
without KV events, as far as a gateway asks one: Kvasir sends it token ids, and makes text of those that come back.

Targets: at most 2x the bare proxy for small bodies, 2.2x through a replica; at 400 KB with a warm memo at most 1.5x
the proxy that parses and hashes; at most 25 us per streamed chunk more than bare. Rounds alternate; medians are
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from engine.demo import MODEL_DIR
from engine.protocol import TokenizerFiles
from tests.fakes.ports import free_port

CHUNKS = 128
INTERVAL_S = 0.004
START_LIMIT_S = 180.0
PIECE = "word "
WORDS = re.findall(
    r"\w+",
    "the of and to in that was it his he had with as for at by not on is be this from her which have but are said she "
    "there been were would when my who one they him all could so them will their no an then some out any more what "
    "morning house letter question answer window street evening railway doctor believe remember nothing something",
)
BODIES = {"300 B": 300, "16 KB": 16_000, "400 KB": 400_000}


# -- the processes ------------------------------------------------------------------------------------------------


def tokenizer_files() -> TokenizerFiles:
    return TokenizerFiles(
        tokenizer_json=(MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8"),
        chat_template=(MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8"),
        special_tokens={"eos_token": "<|im_end|>"},
        add_bos=False,
    )


async def run_engine(stream_port: int, http_port: int) -> None:
    """The fake engine, twice: as an engine, and as an HTTP server that answers in the same shape and rhythm."""
    from tests.fakes.fake_engine import FakeEngine, make_hello

    files = tokenizer_files()
    hello = make_hello(
        tokenizer=files.fingerprint(), context_tokens=10_000_000, vocab_size=4096, max_sequences=512, num_blocks=1 << 20
    )
    word = _token_of(files, PIECE.strip())
    engine = FakeEngine(
        f"127.0.0.1:{stream_port}", hello, answer=(word,), tokenizer=files, interval_s=INTERVAL_S, stores_blocks=False
    )
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", _plain_answer)
    app.router.add_post("/v1/messages", _message)
    _Replica(word).add_to(app)
    runner = web.AppRunner(app, access_log=None)
    async with engine:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", http_port).start()
        await asyncio.Event().wait()


def _token_of(files: TokenizerFiles, text: str) -> int:
    from tokenizers import Tokenizer

    return int(Tokenizer.from_str(files.tokenizer_json).encode(" " + text, add_special_tokens=False).ids[0])


async def _plain_answer(request: web.Request) -> web.StreamResponse:
    asked = orjson.loads(await request.read())
    base = {"id": "chatcmpl-" + "0" * 24, "created": 1, "model": "demo", "system_fingerprint": "fp_0"}
    if not asked.get("stream"):
        await asyncio.sleep(INTERVAL_S)
        text = PIECE * asked["max_tokens"]
        message = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": {}})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(asked["max_tokens"]):
        await asyncio.sleep(INTERVAL_S)
        choice = {"index": 0, "delta": {"content": PIECE}, "logprobs": None, "finish_reason": None}
        data = {**base, "object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + orjson.dumps(data) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


async def _message(request: web.Request) -> web.StreamResponse:
    """The same as a message of the Anthropic API."""
    asked = orjson.loads(await request.read())
    usage = {"input_tokens": 1, "output_tokens": asked["max_tokens"]}
    base = {"id": "msg_0", "type": "message", "role": "assistant", "model": "demo", "stop_sequence": None}
    if not asked.get("stream"):
        await asyncio.sleep(INTERVAL_S)
        content = [{"type": "text", "text": PIECE * asked["max_tokens"]}]
        return web.json_response({**base, "content": content, "stop_reason": "max_tokens", "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def send(kind: str, **data: object) -> None:
        await response.write(b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **data})))

    await send("message_start", message={**base, "content": [], "stop_reason": None, "usage": usage})
    await send("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for _ in range(asked["max_tokens"]):
        await asyncio.sleep(INTERVAL_S)
        await send("content_block_delta", index=0, delta={"type": "text_delta", "text": PIECE})
    await send("content_block_stop", index=0)
    await send("message_delta", delta={"stop_reason": "max_tokens", "stop_sequence": None}, usage=usage)
    await send("message_stop")
    return response


class _Replica:
    """The other paths of a vLLM. Its /v1/completions answers at the pace of `_plain_answer`, in the form of vLLM."""

    def __init__(self, word: int) -> None:
        from tests.fakes.replica_server import ReplicaServer

        self._word = word
        self._server = ReplicaServer(
            "vllm", context_tokens=10_000_000, num_blocks=1 << 17, events_port=None, replay_port=None
        )
        self._server.completions = self._answer

    def add_to(self, app: web.Application) -> None:
        app.router.add_route("*", "/{path:.*}", self._server.handle)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        self._server.got.clear()
        prompt, count = asked["prompt"], asked["max_tokens"]
        base = {"id": "cmpl-" + "0" * 24, "object": "text_completion", "created": 1, "model": "demo"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        details = {"prompt_tokens_details": {"cached_tokens": (len(prompt) - 1) // 16 * 16}}
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "total_tokens": len(prompt) + count,
            **details,
        }
        if not asked.get("stream"):
            choice = {"index": 0, "text": "", "token_ids": [self._word] * count, "finish_reason": "length"}
            choice |= {"prompt_token_ids": prompt}
            await asyncio.sleep(INTERVAL_S)
            return web.json_response({**base, "choices": [choice], "usage": usage})
        await response.prepare(request)
        for number in range(count):
            await asyncio.sleep(INTERVAL_S)
            reason = "length" if number == count - 1 else None
            choice = {"index": 0, "text": PIECE, "logprobs": None, "finish_reason": reason, "stop_reason": None}
            choice |= {"token_ids": [self._word], "prompt_token_ids": None if number else prompt}
            await response.write(b"data: " + orjson.dumps({**base, "choices": [choice]}) + b"\n\n")
        await response.write(b"data: " + orjson.dumps({**base, "choices": [], "usage": usage}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def run_proxy(port: int, upstreams: Sequence[str], parse: bool) -> None:
    """A reverse proxy with nothing in it, to servers in turns; `parse` adds what any cache would have to do."""
    turns = itertools.cycle(upstreams)
    async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            if parse:
                orjson.loads(body)
                hashlib.sha256(body).digest()
            headers = {"Content-Type": request.headers["Content-Type"]}
            async with session.post(next(turns) + request.path, data=body, headers=headers) as answer:
                response = web.StreamResponse(
                    status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
                )
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


# -- the measurement ----------------------------------------------------------------------------------------------


@dataclass
class Middle:
    """A process between the load and the engine."""

    name: str
    pid: int
    url: str

    def cpu_s(self) -> float:
        """CPU time of all threads so far, user and system, to the nanosecond (Linux: schedstat)."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def body(size: int, stream: bool, max_tokens: int) -> bytes:
    """A conversation of about `size` bytes, in turns of at most 4 KB."""
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    left, turn, dice = size - 200, 0, random.Random(size)
    while left > 0:
        length = min(left, 4000)
        text = " ".join(dice.choices(WORDS, k=length // 5 + 1))[:length]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": text})
        left, turn = left - length - 40, turn + 1
    messages[-1]["role"] = "user"
    return json.dumps({"model": "demo", "messages": messages, "stream": stream, "max_tokens": max_tokens}).encode()


async def load(session: aiohttp.ClientSession, middle: Middle, data: bytes, count: int, at_once: int) -> float:
    """Sends `count` requests and returns CPU seconds of the process in the middle per request."""
    left = iter(range(count))
    before = middle.cpu_s()

    async def sender() -> None:
        for _ in left:
            async with session.post(middle.url, data=data, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

    await asyncio.gather(*(sender() for _ in range(at_once)))
    return (middle.cpu_s() - before) / count


async def measure(middles: list[Middle], arguments: argparse.Namespace) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for name, size in BODIES.items():
            if arguments.only not in (None, name):
                continue
            plain = body(size, stream=False, max_tokens=1)
            count = max(20, int(arguments.scale * min(1500, 120_000_000 // size)))
            for middle in middles:
                await load(session, middle, plain, max(8, count // 10), 8)
            for _ in range(arguments.rounds):
                for middle in middles:
                    cost = await load(session, middle, plain, count, 8)
                    rows.setdefault(name, {}).setdefault(middle.name, []).append(cost)
        if arguments.only:
            report(rows)
            return
        name = f"stream of {CHUNKS}"
        data, count = body(300, stream=True, max_tokens=CHUNKS), max(8, int(arguments.scale * 60))
        for _ in range(arguments.rounds):
            for middle in middles:
                cost = await load(session, middle, data, count, arguments.streams)
                rows.setdefault(name, {}).setdefault(middle.name, []).append(cost)
    report(rows)


def report(rows: dict[str, dict[str, list[float]]]) -> None:
    print("CPU per request, ms (median of rounds)")
    print("| request | bare | bare + parse + hash | kvasir | kvasir / bare | kvasir / parse + hash |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        bare, parse, ours = (statistics.median(row[key]) * 1e3 for key in ("bare", "parse", "kvasir"))
        print(f"| {name} | {bare:.3f} | {parse:.3f} | {ours:.3f} | {ours / bare:.2f} | {ours / parse:.2f} |")
    if (streamed := rows.get(f"stream of {CHUNKS}")) is None:
        return
    plain = rows["300 B"]
    chunk = {
        key: (statistics.median(streamed[key]) - statistics.median(plain[key])) / CHUNKS * 1e6
        for key in ("bare", "kvasir")
    }
    print(
        f"per streamed chunk: bare {chunk['bare']:.1f} us, kvasir {chunk['kvasir']:.1f} us, "
        f"{chunk['kvasir'] - chunk['bare']:+.1f} us"
    )


# -- start and stop -----------------------------------------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=sys.stderr)


def wait_for_port(port: int) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return


async def wait_for_answer(url: str, key: str = "none") -> None:
    data = body(300, stream=False, max_tokens=1)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session, asyncio.timeout(START_LIMIT_S):
        while True:
            async with session.post(url, data=data, headers=headers) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["load", "engine", "proxy"], default="load", help=argparse.SUPPRESS)
    parser.add_argument("--ports", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--parse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=BODIES, help="measure this size of body alone, and no stream")
    parser.add_argument("--streams", type=int, default=4, help="streams at the same time")
    behind = parser.add_mutually_exclusive_group()
    behind.add_argument("--upstream", action="store_true", help="Kvasir in front of the HTTP server, without engine")
    behind.add_argument("--translated", action="store_true", help="the same, and the server speaks another API")
    behind.add_argument("--replica", action="store_true", help="the HTTP server is a vLLM, and Kvasir's only engine")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests")
    arguments = parser.parse_args()
    import uvloop

    if arguments.role == "engine":
        uvloop.run(run_engine(*arguments.ports))
    elif arguments.role == "proxy":
        own, *upstreams = arguments.ports
        uvloop.run(run_proxy(own, [f"http://127.0.0.1:{port}" for port in upstreams], arguments.parse))
    else:
        compare(arguments)


def _ours(arguments: argparse.Namespace, folder: Path, stream: int, http: int) -> list[str]:
    """The command, and what is behind it."""
    if arguments.replica:
        return ["gateway", "--replica", f"vllm:http=http://127.0.0.1:{http}"]
    if not (arguments.upstream or arguments.translated):
        return ["serve", "--engines", "0", "--engine-urls", f"http://127.0.0.1:{stream}"]
    file = folder / "upstreams.toml"
    path, dialect = ("", "anthropic") if arguments.translated else ("/v1", "openai")
    table = {"name": "http", "dialect": dialect, "url": f"http://127.0.0.1:{http}{path}", "models": ["demo"]}
    file.write_text("[[upstreams]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in table.items()))
    return ["gateway", "--config", str(file)]


def compare(arguments: argparse.Namespace) -> None:
    stream, http, bare, parse, ours = (free_port() for _ in range(5))
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--port", str(ours), "--data-dir", folder, "--log-level", "WARNING", "--response-cache-mode", "off"]
        processes = [
            start("-m", "tests.bench.gateway_overhead", "--role", "engine", "--ports", str(stream), str(http)),
            start("-m", "tests.bench.gateway_overhead", "--role", "proxy", "--ports", str(bare), str(http)),
            start("-m", "tests.bench.gateway_overhead", "--role", "proxy", "--parse", "--ports", str(parse), str(http)),
            start("-m", "gateway.cli", *_ours(arguments, Path(folder), stream, http), *flags),
        ]
        try:
            for port in (stream, http, bare, parse, ours):
                wait_for_port(port)
            middles = [
                Middle(name, process.pid, f"http://127.0.0.1:{port}/v1/chat/completions")
                for name, process, port in zip(
                    ("bare", "parse", "kvasir"), processes[1:], (bare, parse, ours), strict=True
                )
            ]
            asyncio.run(wait_for_answer(middles[-1].url))
            asyncio.run(measure(middles, arguments))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


if __name__ == "__main__":
    main()
