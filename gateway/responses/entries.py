"""Remembered answers: what is stored of each, and what operators choose and see of them. Values only."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Final, Protocol

import orjson
from xxhash import xxh3_64_digest

from engine.protocol.frozen import dataclass

OVERHEAD_BYTES: Final = 512
"""What an entry costs besides its body and names: objects, tables, and its place in the order."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One answer.

    key        compared on every look-up, whatever an answer is found by
    id         how it is called, 32 characters
    owner      a tenant, or a namespace that several share (Scope)
    model      as clients name it
    created_s  seconds since 1970, as expires_s; when the answer was complete
    body       see recording.py
    """

    key: bytes
    id: str
    owner: str
    model: str
    created_s: float
    expires_s: float
    body: bytes

    @property
    def num_bytes(self) -> int:
        """That count against limits."""
        return len(self.body) + len(self.owner) + len(self.model) + OVERHEAD_BYTES

    def to_bytes(self) -> bytes:
        """A checksum, a JSON array, a line end, and the body."""
        head = orjson.dumps([self.key.hex(), self.owner, self.model, self.created_s, self.expires_s])
        written = head + b"\n" + self.body
        return xxh3_64_digest(written) + written

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> Entry:
        """Raises ValueError for what `to_bytes` did not write."""
        checksum, written = data[:8], data[8:]
        if checksum != xxh3_64_digest(written):
            raise ValueError("an entry is cut short, or changed")
        head, _, body = written.partition(b"\n")
        key, owner, model, created_s, expires_s = orjson.loads(head)
        return cls(bytes.fromhex(key), name, owner, model, created_s, expires_s, body)


@dataclass(frozen=True, slots=True)
class About:
    """What operators see of an entry."""

    owner: str
    id: str
    model: str
    created_s: float
    expires_s: float
    num_bytes: int

    @classmethod
    def of(cls, entry: Entry) -> About:
        return cls(entry.owner, entry.id, entry.model, entry.created_s, entry.expires_s, entry.num_bytes)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice among the remembered answers; every field narrows it.

    id  its beginning
    """

    owner: str | None = None
    model: str | None = None
    id: str = ""
    older_than_s: float = 0.0
    younger_than_s: float | None = None

    @property
    def everything(self) -> bool:
        return self == Chosen()

    def takes(self, about: About | Entry, at_s: float) -> bool:
        """Whether it is one of them, by its age at that second; a later one is not."""
        age_s = at_s - about.created_s
        return (
            self.owner in (None, about.owner)
            and self.model in (None, about.model)
            and about.id.startswith(self.id)
            and age_s >= self.older_than_s
            and (self.younger_than_s is None or age_s <= self.younger_than_s)
            and about.expires_s > at_s
        )


@dataclass(frozen=True, slots=True)
class Content:
    """The text of a remembered answer, and the names and arguments of its tool calls. Of an upstream's the text is the
    whole body, calls included, and `finish` is None."""

    prompt_tokens: int
    completion_tokens: int
    finish: str | None
    text: str
    calls: tuple[tuple[str, str], ...] = ()


def entry_id(key: bytes) -> str:
    """The name of an answer for clients and operators. It says nothing of the request, nor can it be made without
    knowing all of the request and its tenant."""
    return hashlib.sha256(b"kvasir-entry" + key).hexdigest()[:32]


class Answers(Protocol):
    """All remembered answers, of this gateway and in Redis. Methods raise RedisDownError."""

    def scan(self, chosen: Chosen, at_s: float) -> AsyncIterator[About]:
        """Those that were chosen at that second, each once, in no order; what comes or goes meanwhile may be
        missing."""
        ...

    async def content(self, about: About) -> Content | None:
        """None for one that is gone, or cannot be read."""
        ...

    async def remove(self, chosen: Chosen, at_s: float) -> int:
        """Removes those that were chosen at that second, here and from Redis. Returns how many there were. Other
        gateways hear of it soon."""
        ...
