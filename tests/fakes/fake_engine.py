"""An engine without a model: speaks the stream of engine/protocol/, with timing, tokens and death as a test wants.

Used inside a test's event loop (`FakeEngine`), and as a process of its own by benchmarks:

    python -m tests.fakes.fake_engine --listen unix:/tmp/e.sock --interval-ms 5 --tokens-per-step 1
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
import uuid
from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from aiohttp import WSMsgType, web

from engine.protocol import (
    HEALTH_PATH,
    MIN_TAIL_TOKENS,
    PURGE_PATH,
    SECRET_HEADER,
    STATS_PATH,
    STREAM_PATH,
    TOKEN_BYTES,
    TOKENIZER_PATH,
    Abort,
    BlockEvents,
    Hello,
    Load,
    Namespace,
    SequenceUpdate,
    StepFrame,
    Submit,
    TokenizerFiles,
    TokenLogprobs,
    decode,
    encode,
    split_digests,
)
from tests.fakes.purged import COMPLETE

TOKENIZER = TokenizerFiles(tokenizer_json="{}", chat_template=None, special_tokens={}, add_bos=False)


@dataclass
class Behaviour:
    """What the engine does. May be changed while it runs."""

    answer: tuple[int, ...] = (5, 6, 7, 8)  # repeated up to max_tokens
    tokens: int | None = None  # tokens of every answer; None means the sequence's max_tokens
    finish: str = "length"
    tokens_per_step: int = 1
    interval_s: float = 0.0  # between steps; 0 makes a step for every turn of the event loop
    first_token_s: float = 0.0
    silent: bool = False  # takes sequences, and never answers
    cached_tokens: int | None = None  # None says what its blocks hold
    stores_blocks: bool = True  # blocks of a prompt are held once it was answered
    leases: Literal["kept", "degraded"] | None = "kept"  # what becomes of breakpoints; None knows of no leases
    stats: dict[str, Any] = field(default_factory=dict)  # besides its own
    stats_s: float = 0.0  # until it answers when asked for them
    secret: str | None = None
    tokenizer: TokenizerFiles = TOKENIZER


@dataclass
class _Running:
    submit: Submit
    due_s: float
    left: int
    started: bool = False
    position: int = 0


@dataclass
class _Connection:
    socket: web.WebSocketResponse
    running: dict[int, _Running] = field(default_factory=dict)


def make_hello(model: str = "demo", **changes: Any) -> Hello:
    values: dict[str, Any] = {
        "incarnation": uuid.uuid4().hex,
        "model": model,
        "namespace": Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=16),
        "context_tokens": 8192,
        "vocab_size": 1000,
        "num_blocks": 1000,
        "max_sequences": 64,
        "eos_ids": (0,),
        "tokenizer": TOKENIZER.fingerprint(),
        "created": 1_700_000_000,
    }
    return Hello(**{**values, **changes})


class FakeEngine:
    """Context manager. `url` is where gateways connect; what they sent is in `submits` and `aborts`."""

    def __init__(self, listen: str = "127.0.0.1:0", hello: Hello | None = None, **behaviour: Any) -> None:
        self.behaviour = Behaviour(**behaviour)
        self.hello = hello or make_hello(tokenizer=self.behaviour.tokenizer.fingerprint())
        self.load = Load(free_blocks=self.hello.num_blocks)
        self.submits: list[Submit] = []
        self.by_gateway: set[int] = set()  # connections that submitted anything
        self.aborts: list[int] = []
        self.held: dict[bytes, None] = {}
        self.leased: dict[str, set[bytes]] = {}  # salt -> prompts up to their breakpoints
        self.stats_requests = 0
        self.tokenizer_requests = 0
        self.changed = asyncio.Condition()
        self.url = ""
        self._listen = listen
        self._connections: list[_Connection] = []
        self._runner: web.AppRunner | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    # -- life and death -----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeEngine:
        app = web.Application()
        app.router.add_get(STREAM_PATH, self._stream)
        app.router.add_get(TOKENIZER_PATH, self._get_tokenizer)
        app.router.add_get(STATS_PATH, self._get_stats)
        app.router.add_post(PURGE_PATH, self._purge)
        app.router.add_get(HEALTH_PATH, self._get_health)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        if self._listen.startswith("unix:"):
            await web.UnixSite(self._runner, self._listen.removeprefix("unix:")).start()
            self.url = self._listen
        else:
            host, _, port = self._listen.rpartition(":")
            await web.TCPSite(self._runner, host, int(port)).start()
            self.url = f"http://{host}:{self._runner.addresses[0][1]}"
            self._listen = f"{host}:{self._runner.addresses[0][1]}"
        self._stepper = asyncio.get_running_loop().create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Ends at once: every connection is cut, nothing listens any more."""
        if self._stepper is not None:
            self._stepper.cancel()
            await asyncio.wait([self._stepper])
            self._stepper = None
        await self.cut()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def restart(self, **changes: Any) -> None:
        """Dies and comes back at the same address as another incarnation, holding nothing."""
        await self.die()
        self.held.clear()
        self.leased.clear()
        self.hello = replace(self.hello, incarnation=uuid.uuid4().hex, **changes)
        await self.__aenter__()

    async def cut(self) -> None:
        """Cuts every connection as a crash would, and stays."""
        for connection in self._connections:
            request = connection.socket._req
            if request is not None and request.transport is not None:
                request.transport.abort()
        self._connections.clear()

    # -- what tests do ------------------------------------------------------------------------------------------------

    async def wait_for(self, holds: Any, limit_s: float = 30.0) -> None:
        """Returns when `holds()`; it is asked after everything that a gateway sends."""
        async with asyncio.timeout(limit_s), self.changed:
            await self.changed.wait_for(holds)

    @property
    def running(self) -> int:
        return sum(len(connection.running) for connection in self._connections)

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def send(self, message: BlockEvents | StepFrame | Hello) -> None:
        """To every gateway."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):
                await connection.socket.send_bytes(encode(message))

    async def change_blocks(self, events: BlockEvents) -> None:
        """As if the model's thread had stored and evicted these."""
        if events.reset:
            self.held.clear()
        for digest in split_digests(events.removed):
            self.held.pop(digest, None)
        self.held.update(dict.fromkeys(split_digests(events.stored)))
        await self.send(events)

    async def report(self, **load: Any) -> None:
        """Tells every gateway another load."""
        self.load = replace(self.load, **load)
        await self.send(StepFrame([], self.load))

    # -- the server ---------------------------------------------------------------------------------------------------

    def _check(self, request: web.Request) -> None:
        if self.behaviour.secret is not None and request.headers.get(SECRET_HEADER) != self.behaviour.secret:
            raise web.HTTPUnauthorized

    async def _get_health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ready"})

    async def _purge(self, http: web.Request) -> web.Response:
        return web.json_response(COMPLETE)

    async def _get_stats(self, request: web.Request) -> web.Response:
        self._check(request)
        self.stats_requests += 1
        await self._tell()
        await asyncio.sleep(self.behaviour.stats_s)
        return web.json_response({"running": self.running, "submits": len(self.submits), **self.behaviour.stats})

    async def _get_tokenizer(self, request: web.Request) -> web.Response:
        self._check(request)
        self.tokenizer_requests += 1
        return web.json_response(self.behaviour.tokenizer.to_json())

    async def _stream(self, request: web.Request) -> web.WebSocketResponse:
        self._check(request)
        socket = web.WebSocketResponse(compress=False, max_msg_size=64 << 20)
        await socket.prepare(request)
        await socket.send_bytes(encode(self.hello))
        await socket.send_bytes(encode(BlockEvents(stored=b"".join(self.held), reset=True)))
        await socket.send_bytes(encode(StepFrame([], self.load)))
        connection = _Connection(socket)
        self._connections.append(connection)
        await self._tell()
        try:
            while (message := await socket.receive()).type is WSMsgType.BINARY:
                self._receive(connection, message.data)
                await self._tell()
        finally:
            connection.running.clear()
            if connection in self._connections:
                self._connections.remove(connection)
            await self._tell()
        return socket

    def _receive(self, connection: _Connection, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Submit):
            self.submits.append(message)
            self.by_gateway.add(id(connection.socket))
            most = message.sampling.max_tokens
            left = min(self.behaviour.tokens or most, most)
            due_s = time.monotonic() + self.behaviour.first_token_s
            connection.running[message.seq] = _Running(message, due_s, left)
            self._work.set()
        elif isinstance(message, Abort):
            self.aborts.append(message.seq)
            connection.running.pop(message.seq, None)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # -- steps --------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            if self.behaviour.silent or not self.running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.behaviour.interval_s)
            if self.behaviour.silent:
                continue
            stored: list[bytes] = []
            for connection in list(self._connections):
                updates = [
                    self._step(seq, running, connection, stored)
                    for seq, running in list(connection.running.items())
                    if running.due_s <= time.monotonic()
                ]
                if updates:
                    frame = StepFrame(updates, replace(self.load, running=self.running))
                    with contextlib.suppress(ConnectionError):
                        await connection.socket.send_bytes(encode(frame))
            if stored:
                await self.change_blocks(BlockEvents(stored=b"".join(stored)))

    def _step(self, seq: int, running: _Running, connection: _Connection, stored: list[bytes]) -> SequenceUpdate:
        behaviour, count = self.behaviour, min(running.left, self.behaviour.tokens_per_step)
        answer = behaviour.answer
        tokens = [answer[(running.position + i) % len(answer)] for i in range(count)]
        sampling = running.submit.sampling
        update = SequenceUpdate(seq, tokens, logprobs=_logprobs(tokens, sampling.logprobs))
        if not running.started:
            running.started = True
            prompt = array("I", running.submit.tokens)[1:].tolist()
            update.prompt_logprobs = _logprobs(prompt, sampling.prompt_logprobs)
            update.cached_tokens = self._cached(running.submit)
            update.queue_ms, update.prefill_ms = 0.0, behaviour.first_token_s * 1e3
            self._lease(running.submit, update)
            if behaviour.stores_blocks and running.submit.use_cache:
                stored += [digest for digest in split_digests(running.submit.digests) if digest not in self.held]
                self.held.update(dict.fromkeys(stored))
        running.position += count
        running.left -= count
        if running.left <= 0:
            update.finish = behaviour.finish  # type: ignore[assignment]
            del connection.running[seq]
        return update

    def _lease(self, submit: Submit, update: SequenceUpdate) -> None:
        leased, prompt = self.leased.setdefault(submit.salt, set()), submit.tokens
        reads = sorted({len(kept) // TOKEN_BYTES for kept in leased if prompt.startswith(kept)}, reverse=True)
        read = reads[0] if reads else 0
        if self.behaviour.leases is None or not (submit.breakpoints or read):
            return
        degraded = len(submit.breakpoints) if self.behaviour.leases == "degraded" else 0
        kept = [] if degraded else [point.tokens for point in submit.breakpoints]
        leased |= {prompt[: tokens * TOKEN_BYTES] for tokens in kept}
        update.lease_read_tokens, update.leases_degraded = read, degraded
        update.lease_reads = reads or None
        update.lease_write_tokens = max(0, max(kept, default=0) - read)

    def _cached(self, submit: Submit) -> int:
        if not submit.use_cache:
            return 0
        if self.behaviour.cached_tokens is not None:
            return self.behaviour.cached_tokens
        held = 0
        for digest in split_digests(submit.digests):
            if digest not in self.held:
                break
            held += 1
        tokens = len(array("I", submit.tokens))
        block_size = self.hello.namespace.block_size
        return min(held * block_size, max(0, tokens - MIN_TAIL_TOKENS) // block_size * block_size)


def _logprobs(tokens: list[int], top: int | None) -> list[TokenLogprobs] | None:
    """Those that were asked for: a token less likely than another one, which is always the same."""
    if top is None:
        return None
    return [TokenLogprobs(-0.75, ((1, -0.5), (token, -0.75))[:top]) for token in tokens]


async def _serve(options: argparse.Namespace) -> None:
    tokenizer = TOKENIZER
    if options.tokenizer is not None:
        from engine.compute.model_files import read_tokenizer

        tokenizer, _ = read_tokenizer(options.tokenizer)
    hello = make_hello(
        model=options.model,
        context_tokens=options.context_tokens,
        vocab_size=options.vocab_size,
        tokenizer=tokenizer.fingerprint(),
        num_blocks=1_000_000,
    )
    engine = FakeEngine(
        options.listen,
        hello,
        tokenizer=tokenizer,
        interval_s=options.interval_ms / 1e3,
        first_token_s=options.first_token_ms / 1e3,
        tokens_per_step=options.tokens_per_step,
        tokens=options.tokens,
        answer=tuple(int(token) for token in options.answer.split(",")),
    )
    async with engine:
        print(f"ready {engine.url}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port or unix:PATH")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokenizer", type=Path, help="folder of a model, for its tokeniser")
    parser.add_argument("--context-tokens", type=int, default=262_144)
    parser.add_argument("--vocab-size", type=int, default=1 << 20)
    parser.add_argument("--interval-ms", type=float, default=0.0, help="between steps")
    parser.add_argument("--first-token-ms", type=float, default=0.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=None, help="of every answer; default max_tokens")
    parser.add_argument("--answer", default="5,6,7,8", help="token ids, repeated")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
