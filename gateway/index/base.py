"""The promises of an index: which engine holds how much of a prompt.

Presence is prefix-closed: an engine that holds block i of a chain holds every block before it, because engines publish
parents before children and take children out before parents. Every implementation may therefore search for the end of
a prefix by bisection. An answer is a hint: the engine compares the tokens before it reuses anything.

The same contract tests (tests/contract/test_index.py) run over every implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Index(Protocol):
    """Finds prefixes. What it finds may be out of date, and is never wrong about the order of blocks."""

    async def find(self, model: str, digests: bytes, incarnations: Sequence[str]) -> Mapping[str, int]:
        """Leading blocks of `digests` that each of `incarnations` holds.

        digests  packed chain digests, DIGEST_BYTES each, first block first
        An incarnation that the index knows is in the answer, with 0 when it holds none of them; one that it does not
        know is left out. The answer is empty when there are no digests or no incarnations, and nobody is asked then.
        Raises RedisDownError, and nothing else, when it cannot answer.
        """
        ...
