"""The prefix cache of a server that knows no leases, as vLLM's: blocks without a user stand in a queue, and the one at
its head is taken next, whatever it holds."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from engine.protocol import chain_digests, split_digests

Key = bytes
"""Of a block: over the salt and the tokens of a prompt up to its end."""


class Running(NamedTuple):
    """A request that the server works on."""

    cached_tokens: int
    blocks: list[int]
    stored: list[tuple[Key, int]]  # and where its block ends in the prompt
    evicted: list[Key]


class LruCache:
    """`num_blocks` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key: dict[int, Key] = {}
        self._block: dict[Key, int] = {}
        self._users = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def cached_tokens(self, tokens: Sequence[int], salt: str) -> int:
        """What a prompt would reuse: never its last token."""
        return len(self._hits(tokens, salt)) * self.block_size

    def keys(self, tokens: Sequence[int], salt: str) -> list[Key]:
        """Of the whole blocks of a prompt."""
        packed = chain_digests(salt.encode(), array("I", tokens).tobytes(), self.block_size)
        return split_digests(packed)

    def begin(self, tokens: Sequence[int], salt: str) -> Running:
        """A prompt is computed."""
        size, hits, keys = self.block_size, self._hits(tokens, salt), self.keys(tokens, salt)
        for block in hits:
            self._free.pop(block, None)
            self._users[block] += 1
        blocks, evicted, stored = list(hits), list[Key](), list[tuple[Key, int]]()
        for at in range(len(hits), -(-len(tokens) // size)):
            block, _ = self._free.popitem(last=False)
            if (old := self._key.pop(block, None)) is not None:
                del self._block[old]
                evicted.append(old)
            if at < len(keys) and keys[at] not in self._block:
                self._key[block], self._block[keys[at]] = keys[at], block
                stored.append((keys[at], (at + 1) * size))
            self._users[block] = 1
            blocks.append(block)
        return Running(len(hits) * size, blocks, stored, evicted)

    def end(self, running: Running) -> None:
        """Its blocks go to the recent end, the last one first."""
        for block in reversed(running.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def run(self, tokens: Sequence[int], salt: str = "") -> int:
        """A prompt from begin to end. Its cached tokens."""
        running = self.begin(tokens, salt)
        self.end(running)
        return running.cached_tokens

    def clear(self) -> None:
        """As after a restart."""
        self._key.clear()
        self._block.clear()

    def _hits(self, tokens: Sequence[int], salt: str) -> list[int]:
        found = []
        for key in self.keys(tokens[:-1], salt):
            if (block := self._block.get(key)) is None:
                break
            found.append(block)
        return found
