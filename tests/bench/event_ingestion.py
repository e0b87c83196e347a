"""What it costs to follow the KV events of a fleet: tokens/s, share of a core, bytes of memory per block.

    python -m tests.bench.event_ingestion [--tokens 2000000]

One process decodes payloads, chains digests and updates the index in memory, as a gateway does for each batch. Each row
is another shape of events: prompts in chunks of 4,096 tokens, pages of several sizes, and a server that is full, where
each block that is stored evicts another one. `one for each` is an event for each block, as they come while answers are
generated; SGLang before 0.5.20 did so for prompts too, in batches. `share` is of one core at 400,000 tokens/s. Memory
is what tracemalloc sees after the collection of garbage, in bytes for each block of 16 tokens: `residency` the server's
names, chains and digests, `index` the set of digests that look-ups read.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from engine.protocol import Namespace
from gateway.index.memory_index import MemoryIndex
from gateway.replicas.events import decode
from gateway.replicas.residency import Residency

SPACE = Namespace(weights="m@1", dtype="", kv_dtype="", block_size=16)
RATE = 400_000  # tokens/s that are prefilled in the whole fleet
CHUNK_TOKENS, CHUNKS, VOCABULARY = 4_096, 3, 150_000


def payloads(tokens: int, page: int, chunk: int, batch: int, *, maps: bool, full: bool) -> Iterator[tuple[bytes, int]]:
    """Payloads of `batch` events with `chunk` tokens each, and the tokens in each payload."""
    source, held, waiting = random.Random(1), deque[list[int]](), list[Any]()
    whole = CHUNK_TOKENS * CHUNKS // chunk * chunk
    for _ in range(0, tokens, whole):
        prompt = [source.randrange(VOCABULARY) for _ in range(whole)]
        parent, stored = None, []
        for start in range(0, whole, chunk):
            hashes = [source.getrandbits(64) for _ in range(chunk // page)]
            part = prompt[start : start + chunk]
            salt = [["0" * 64] if parent is None and not i else None for i in range(len(hashes))]
            fields = [hashes, parent, part, page, None, "GPU", None, salt, 0, "full_attention"]
            names = "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
            keys = [*names.split(), "kv_cache_spec_kind"]
            store = (
                {"type": "BlockStored", **dict(zip(keys, fields, strict=True))} if maps else ["BlockStored", *fields]
            )
            removed = [[key] for key in reversed(held.popleft())] if full and len(held) * chunk > tokens // 3 else []
            events = [
                {"type": "BlockRemoved", "block_hashes": key, "medium": "GPU", "group_idx": 0}
                if maps
                else ["BlockRemoved", key, "GPU", 0]
                for key in removed
            ]
            waiting += [*events, store]
            if len(waiting) >= batch:
                yield msgspec.msgpack.encode([1.5, waiting, 0]), chunk * batch
                waiting = []
            parent = hashes[-1]
            stored.append(hashes)
        held.extend(reversed(stored))


def measure(tokens: int, page: int, chunk: int, batch: int = 1, *, maps: bool, full: bool) -> str:
    batches = list(payloads(tokens, page, chunk, batch, maps=maps, full=full))
    size, count = sum(len(payload) for payload, _ in batches), sum(number for _, number in batches)
    began = time.process_time()
    for payload, _ in batches:
        decode(payload)
    decoded_s = time.process_time() - began
    residency, memory = Residency(SPACE, 1 << 22), MemoryIndex()
    began = time.process_time()
    for payload, _ in batches:
        for changes in residency.apply(decode(payload)):
            memory.apply("r", changes)
    taken_s = time.process_time() - began
    assert residency.blocks == memory.blocks("r") > 0
    assert not residency.unaligned

    # The memory, in a second pass: tracing slows everything down.
    few = list(islice(batches, max(1, len(batches) // 4)))
    gc.collect()
    tracemalloc.start()
    memory, residency = MemoryIndex(), Residency(SPACE, 1 << 22)
    for payload, _ in few:
        for changes in residency.apply(decode(payload)):
            memory.apply("r", changes)
    gc.collect()
    whole, blocks = tracemalloc.get_traced_memory()[0], residency.blocks
    del residency
    gc.collect()
    index = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (
        f"{count / taken_s:>10,.0f} {1e9 * taken_s / count:>6.0f} {1e9 * decoded_s / count:>7.0f} "
        f"{RATE * taken_s / count:>6.1%} {size / count:>7.1f} {(whole - index) / blocks:>10.0f} {index / blocks:>6.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    tokens = parser.parse_args().tokens
    heads = f"{'tokens/s':>10} {'ns':>6} {'decode':>7} {'share':>6} {'B/token':>7} {'residency':>10} {'index':>6}"
    print(f"{'events':<34}{heads}")
    for page in (1, 8, 16, 64, 128, 528):
        chunk = CHUNK_TOKENS // page * page
        print(f"{f'maps, pages of {page}':<34}{measure(tokens, page, chunk, maps=True, full=False)}", flush=True)
    print(f"{'arrays, pages of 16':<34}{measure(tokens, 16, CHUNK_TOKENS, maps=False, full=False)}", flush=True)
    print(f"{'maps, pages of 16, evicting':<34}{measure(tokens, 16, CHUNK_TOKENS, maps=True, full=True)}", flush=True)
    print(f"{'maps, pages of 16, one for each':<34}{measure(tokens // 4, 16, 16, maps=True, full=False)}", flush=True)
    print(
        f"{'arrays, pages of 1, one for each':<34}{measure(tokens // 4, 1, 1, 4096, maps=False, full=False)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
