"""A server's end of a KV event stream: the frames of vLLM and SGLang in both forms, and the ways in which it fails.

`held` is what its cache holds: hash -> token ids of the whole prompt up to that block's end.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
import time
from collections import deque
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.protocol import BlockEvents, Namespace, chain_digests, split_digests
from gateway.replicas.base import EventSource

END = struct.pack(">q", -1)
BLOCK = 16


class KvPublisher:
    """Async context manager. `store`, `remove` and `clear` publish one batch each."""

    def __init__(self, *, topic: str = "kv", topic_in_replay: bool = True, buffer: int = 10_000, seed: int = 0) -> None:
        self.topic, self.topic_in_replay, self.buffer_steps = topic.encode(), topic_in_replay, buffer
        self.random = random.Random(seed)
        self.drop = 0.0  # share of published frames that no subscriber gets
        self.drop_replayed: set[int] = set()  # sequence numbers that the next answer lacks
        self.most_replayed: int | None = None  # batches of an answer; what is behind them is dropped, as a ROUTER does
        self.drop_ends = 0  # answers to come without their end marker
        self.answers = True
        self.asked: list[int] = []  # start of each replay
        self.held: dict[int, list[int]] = {}
        self.ports = (0, 0)
        self._next_hash = 1
        self._parents: dict[int, int | None] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def source(self) -> EventSource:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return EventSource(events, replay, self.topic.decode())

    async def __aenter__(self) -> KvPublisher:
        self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _open(self) -> None:
        context = zmq.asyncio.Context.instance()
        self.sequence = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=self.buffer_steps)
        self._pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        ports = []
        for socket, port in zip((self._pub, self._router), self.ports, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            ports.append(port or socket.bind_to_random_port("tcp://127.0.0.1"))
            if port:
                socket.bind(f"tcp://127.0.0.1:{port}")
        self.ports = (ports[0], ports[1])
        self._replaying = asyncio.get_running_loop().create_task(self._serve())

    async def close(self) -> None:
        self._replaying.cancel()
        await asyncio.wait([self._replaying])
        self._pub.close()
        self._router.close()

    async def restart(self, batches: int = 0) -> None:
        """In place: the same ports, an empty cache, numbers from 0. `batches` are published before anybody listens."""
        await self.close()
        self.held = {}
        await self._rebind()
        for number in range(batches):
            await self.store([number] * BLOCK)

    async def _rebind(self) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    return self._open()
                except zmq.ZMQError:  # libzmq closes sockets in the background
                    self._pub.close()
                    self._router.close()
                    await asyncio.sleep(0.01)

    # -- the cache -----------------------------------------------------------------------------------------------------

    async def store(self, tokens: list[int], parent: int | None = None) -> list[int]:
        """Names of the new blocks, behind `parent`, of which `tokens` fills a whole number."""
        assert tokens
        assert len(tokens) % BLOCK == 0
        count = len(tokens) // BLOCK
        hashes = list(range(self._next_hash, self._next_hash + count))
        self._next_hash += count
        before = self.held[parent] if parent is not None else []
        for index, name in enumerate(hashes):
            self._parents[name] = hashes[index - 1] if index else parent
            self.held[name] = before + tokens[: (index + 1) * BLOCK]
        event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
        await self.publish([{**event, "block_size": BLOCK, "lora_id": None, "medium": "GPU"}])
        return hashes

    async def remove(self, *hashes: int) -> None:
        for name in hashes:
            del self.held[name]
        await self.publish([{"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}])

    async def clear(self) -> None:
        self.held.clear()
        await self.publish([{"type": "AllBlocksCleared"}])

    async def churn(self, batches: int, most: int = 200) -> None:
        """Conversations that grow, and the oldest blocks without children going away."""
        for _ in range(batches):
            if len(self.held) > most:
                parents = {self._parents[name] for name in self.held}
                await self.remove(self.random.choice([name for name in self.held if name not in parents]))
            else:
                parent = self.random.choice([None, *self.held])
                tokens = [self.random.randrange(50_000) for _ in range(BLOCK * self.random.randint(1, 3))]
                await self.store(tokens, parent)
            await asyncio.sleep(0)  # the reader shares this event loop

    def digests(self, namespace: Namespace) -> set[bytes]:
        """What an index of this cache holds."""
        found: set[bytes] = set()
        for tokens in self.held.values():
            packed = struct.pack(f"<{len(tokens)}I", *tokens)
            found.update(split_digests(chain_digests(namespace.root(), packed, BLOCK)))
        return found

    # -- the wire ------------------------------------------------------------------------------------------------------

    async def publish(self, events: list[Any]) -> None:
        await self.send(msgspec.msgpack.encode([time.time(), events, 0]))

    async def send(self, payload: bytes) -> None:
        """One batch, as the publisher thread of vLLM sends it: first to subscribers, then into its buffer."""
        number, self.sequence = self.sequence, self.sequence + 1
        if self.random.random() >= self.drop:
            await self._pub.send_multipart([self.topic, struct.pack(">Q", number), payload])
        self.buffer.append((number, payload))

    async def _serve(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or not self.answers:
                continue
            client, empty, start = frames[0], frames[1], int.from_bytes(frames[2], "big")
            self.asked.append(start)
            topic, no_topic = ([self.topic], [b""]) if self.topic_in_replay else ([], [])
            wanted = [one for one in self.buffer if one[0] >= start and one[0] not in self.drop_replayed]
            for number, payload in wanted[: self.most_replayed]:
                await self._router.send_multipart([client, empty, *topic, struct.pack(">Q", number), payload])
            self.drop_replayed = set()
            if self.most_replayed is not None and len(wanted) > self.most_replayed:
                continue
            if self.drop_ends:
                self.drop_ends -= 1
            else:
                await self._router.send_multipart([client, empty, *no_topic, END, b""])


class Index(set[bytes]):
    """What events leave in an index."""

    def apply(self, _incarnation: str, events: BlockEvents | None) -> None:
        if events is None or events.reset:
            self.clear()
        if events is None:
            return
        self.difference_update(split_digests(events.removed))
        self.update(split_digests(events.stored))


async def main() -> None:
    """A publisher as a process: for each number on stdin so many batches, then its ports and its cache's digests."""
    space = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=BLOCK)
    async with KvPublisher() as publisher:
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := await lines.readline():
            await publisher.churn(int(line))
            found = sorted(digest.hex() for digest in publisher.digests(space))
            print(json.dumps({"ports": publisher.ports, "digests": found}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
