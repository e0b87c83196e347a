"""A vLLM as far as a gateway can tell, as a process that a test kills, stops and starts again in its place.

    python -m tests.fakes.replica_process PORT EVENTS REPLAY [BLOCKS] [TOKENIZER]

Its model is a hash: the next token depends on all tokens before it, so that an answer from wrong ids is another one. It
has a prefix cache of blocks of 16 tokens, apart by salt, the oldest of which is evicted; publishes KV events, numbered
from 0 in every life; and reports cached tokens. GET /resident has the digests of its cache.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any
from zlib import crc32

import orjson
from aiohttp import web

from engine.protocol import Namespace, chain_digests, split_digests
from tests.fakes.kv_publisher import BLOCK, KvPublisher
from tests.fakes.replica_server import DEMO, ReplicaServer

SPACE = Namespace(weights=f"{DEMO.name}@", dtype="", kv_dtype="", block_size=BLOCK)
TOKEN_S = 0.01
WORDS = range(300, 3000)  # of the demo model's vocabulary
CONTEXT_TOKENS = 4096


def next_token(tokens: list[int]) -> int:
    return WORDS[crc32(struct.pack(f"<{len(tokens)}I", *tokens)) % len(WORDS)]


class Cache:
    """Blocks by digest, in the order of their last use; a parent is always used after its children."""

    def __init__(self, publisher: KvPublisher, most: int) -> None:
        self._publisher, self._most = publisher, most
        self.blocks: OrderedDict[bytes, int] = OrderedDict()

    def prefix(self, tokens: list[int], salt: str) -> int:
        """Leading tokens that are here; never the last one."""
        chain = self._chain(tokens, salt)
        held = next((index for index, digest in enumerate(chain) if digest not in self.blocks), len(chain))
        return min(held, (len(tokens) - 1) // BLOCK) * BLOCK

    async def add(self, tokens: list[int], salt: str) -> None:
        """The whole blocks of `tokens`, and events of what was stored and evicted."""
        chain = self._chain(tokens, salt)
        new = [index for index, digest in enumerate(chain) if digest not in self.blocks]
        for digest in reversed(chain):
            self.blocks[digest] = 0
            self.blocks.move_to_end(digest)
        events: list[dict[str, Any]] = []
        if new:
            first = new[0]
            event = {"type": "BlockStored", "block_hashes": [_name(chain[index]) for index in new], "block_size": BLOCK}
            event["parent_block_hash"] = _name(chain[first - 1]) if first else None
            event["token_ids"] = tokens[first * BLOCK : len(chain) * BLOCK]
            event["extra_keys"] = [[salt] if salt and index == 0 else None for index in new]
            events.append({**event, "lora_id": None, "medium": "GPU"})
        gone = []
        while len(self.blocks) > self._most:
            gone.append(_name(self.blocks.popitem(last=False)[0]))
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"})
        if events:
            await self._publisher.publish(events)

    @staticmethod
    def _chain(tokens: list[int], salt: str) -> list[bytes]:
        packed = struct.pack(f"<{len(tokens)}I", *tokens)
        return list(split_digests(chain_digests(replace(SPACE, salt=salt).root(), packed, BLOCK)))


def _name(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


class Model:
    """Answers /v1/completions."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def __call__(self, http: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await http.read())
        tokens: list[int] = list(asked["prompt"])
        salt, count = asked.get("cache_salt") or "", asked.get("max_tokens", 16)
        cached, prompt = self._cache.prefix(tokens, salt), len(tokens)
        await self._cache.add(tokens, salt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        streamed = bool(asked.get("stream"))
        if streamed:
            await response.prepare(http)
        made: list[int] = []
        for number in range(count):
            if streamed:
                await asyncio.sleep(TOKEN_S)
            made.append(next_token(tokens))
            tokens.append(made[-1])
            if streamed:
                await response.write(_event([made[-1]], "length" if number == count - 1 else None))
        await self._cache.add(tokens[:-1], salt)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if not streamed:
            choice = {"index": 0, "text": "", "token_ids": made, "finish_reason": "length"}
            return web.json_response({"choices": [choice], "usage": usage})
        await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
        return response


def _event(tokens: list[int], reason: str | None) -> bytes:
    choice = {"index": 0, "text": "", "token_ids": tokens, "finish_reason": reason}
    return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"


async def main(port: int, events: int, replay: int, blocks: int = 512, tokenizer: Path = DEMO) -> None:
    publisher = KvPublisher()
    publisher.ports = (events, replay)
    async with publisher:
        server = ReplicaServer(
            "vllm", block_size=BLOCK, num_blocks=blocks, context_tokens=CONTEXT_TOKENS, tokenizer=tokenizer
        )
        server.events_port, server.replay_port, server.topic = events, replay, "kv"
        cache = Cache(publisher, blocks)
        server.completions = Model(cache)

        async def handle(http: web.Request) -> web.StreamResponse:
            if http.path == "/resident":
                return web.json_response([digest.hex() for digest in cache.blocks])
            server.got.clear()
            return await server.handle(http)

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


class ReplicaProcess:
    """Context manager: it runs inside."""

    def __init__(self, ports: tuple[int, int, int], *, blocks: int = 512, tokenizer: Path = DEMO) -> None:
        self.url = f"http://127.0.0.1:{ports[0]}"
        numbers = [str(number) for number in (*ports, blocks)]
        self._command = [sys.executable, "-m", "tests.fakes.replica_process", *numbers, str(tokenizer)]

    def __enter__(self) -> ReplicaProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def start(self) -> None:
        self.process = Popen(self._command)

    def kill(self) -> None:
        """As a crash would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def stopped(process: Popen[Any]) -> Iterator[None]:
    """It does nothing inside, and answers nobody."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    port, events, replay, most = map(int, sys.argv[1:5])
    asyncio.run(main(port, events, replay, most, Path(sys.argv[5])))
