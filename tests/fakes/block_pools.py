"""Prefixes in a block pool, without sequences."""

from __future__ import annotations

from array import array

from engine.pool.blocks import BlockPool
from engine.protocol import Namespace, chain_digests, split_digests

SIZE = 4
ROOT = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=SIZE).root()


def pack(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def chain(tokens: list[int]) -> list[bytes]:
    return split_digests(chain_digests(ROOT, pack(tokens), SIZE))


def store(pool: BlockPool, tokens: list[int], salt: str = "", digests: list[bytes] | None = None) -> list[int]:
    """Computes and registers a prefix, whose tokens fill whole blocks; returns its blocks, which stay live."""
    digests = digests or chain(tokens)
    reused = pool.prefixes.find(salt, pack(tokens), digests)
    pool.acquire(reused)
    fresh = pool.allocate(len(digests) - len(reused))
    assert fresh is not None
    table = reused + fresh
    for index in range(len(reused), len(table)):
        content = pack(tokens[index * SIZE : (index + 1) * SIZE])
        parent = table[index - 1] if index else None
        assert pool.register(table[index], parent, salt, digests[index], content) == table[index]
    return table


def find(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    return pool.prefixes.find(salt, pack(tokens), chain(tokens))
