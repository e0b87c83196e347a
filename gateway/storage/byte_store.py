"""Bytes by owner and key, with a time to live and within a quota: the promises of memory_bytes.py and redis_bytes.py.

What one owner stores does not exist for another. tests/contract holds both implementations to this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from gateway.config import StoredResponseSettings

UNLIMITED: Final = 1 << 53

Put = Literal["stored", "entries", "bytes", "changed"]
"""stored   in place of what had this key
entries  refused: the owner has as many entries as it may
bytes    refused: the owner would have more bytes than it may, or one entry alone is too large
changed  refused: what has this key is not what was expected
"""


@dataclass(frozen=True, slots=True)
class Quota:
    """What may be stored.

    entries, bytes  of one owner
    entry_bytes     of one entry
    total_bytes     of all owners together; past it the owner with the most bytes loses entries
    ttl_s           time to live of what is put without one
    by_use          whether the entry that was used longest ago is evicted first, not the one that was put first
    """

    entries: int = UNLIMITED
    bytes: int = UNLIMITED
    entry_bytes: int = UNLIMITED
    total_bytes: int = UNLIMITED
    ttl_s: float = 0.0
    by_use: bool = False

    @classmethod
    def of(cls, limits: StoredResponseSettings) -> Quota:
        """Of one tenant."""
        return cls(limits.max_responses, limits.max_bytes, limits.max_response_bytes, ttl_s=limits.ttl_s)

    @property
    def largest(self) -> int:
        """Bytes of an entry that fits when nothing else is there; -1 where none does."""
        return min(self.entry_bytes, self.bytes, self.total_bytes) if self.entries else -1


class ByteStore(Protocol):
    """Nothing is found past its end. Every method raises RedisDownError."""

    async def put(
        self,
        owner: str,
        key: str,
        body: bytes,
        ttl_s: float | None = None,
        *,
        about: bytes = b"",
        num_bytes: int | None = None,
        expected: bytes | None = None,
        refuse: bool = False,
    ) -> Put:
        """Atomic. Past the quota other entries of the owner are evicted, or, with `refuse`, nothing changes.

        about      a few bytes for `look` and `all_of`
        num_bytes  that count, where it is not the length of the body
        expected   the body that has to be there
        """
        ...

    async def find(self, owner: str, key: str) -> bytes | None:
        """The body. Counts as a use."""
        ...

    async def look(self, owner: str, key: str) -> bytes | None:
        """What was put as `about`, if the entry is there."""
        ...

    async def all_of(self, owner: str) -> Mapping[str, bytes]:
        """Keys of the owner's entries and what was put as `about`, in no order."""
        ...

    async def extend(self, owner: str, key: str, ttl_s: float, about: bytes) -> bool:
        """Sets its end, earlier or later, from now on. Whether it is there. Atomic."""
        ...

    async def remove(self, owner: str, key: str) -> bool:
        """Whether it was there."""
        ...
