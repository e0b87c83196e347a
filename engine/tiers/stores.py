"""What a tier needs of the place where its blocks' bytes are, and the copy from one such place to another.

A store knows slots, identities and bytes; which slot holds what, and whether it may be read or written now, is decided
by engine/tiers/tiers.py. Every call here is made on a copy thread (engine/tiers/copy_thread.py) and may take long. The
stores are engine/tiers/host_store.py (where the model runs, and host memory) and engine/tiers/disk_store.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

Payload = npt.NDArray[Any]
"""(num_blocks, block_bytes) uint8; each row one block as (num_layers, block_size, 2, num_kv_heads, head_dim)."""


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The identity of a block's contents: not only its digest, but everything that the digest stands for."""

    digest: bytes
    parent: bytes | None  # digest of the block before; None for the first block of a prefix
    index: int  # place in its prefix, 0 first
    salt: str
    tokens: bytes  # token ids of this block


class Store(Protocol):
    """Where the bytes of a tier's slots are. `slots` and `keys` run side by side and are never empty."""

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        """The bytes of the leading blocks that are there and sound: fewer rows than were asked for when one is not,
        perhaps none. Raises OSError or RuntimeError when the device fails."""
        ...

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        """Puts whole blocks where the slots are. Raises OSError or RuntimeError; what was written then is unknown."""
        ...

    def drop(self, digests: Sequence[bytes]) -> None:
        """The tier has given these blocks up: what is kept of them besides the slot may go. Never fails."""
        ...


class Part(NamedTuple):
    """Some of the files of a folder that engines share, few enough for one job of a copy thread."""

    folder: str  # of one engine's blocks
    name: str  # of a folder in it; empty for its leases


class Swept(NamedTuple):
    """What became of some files.

    left   files that could not be read or deleted
    owner  who has the folder and lives, so that nothing was touched; None when nobody does
    """

    files: int = 0  # deleted
    num_bytes: int = 0
    left: int = 0
    owner: str | None = None


class FolderStore(Protocol):
    """A store whose blocks outlive the engine, in a folder that it shares with others. Calls never fail."""

    def note_use(self, digest: bytes) -> None:
        """The block, and what it hangs from, was used without being read."""
        ...

    def find_parts(self) -> list[Part]:
        """All files but this engine's, of this model and of others, also those of engines that live."""
        ...

    def expire(self, part: Part, max_age_s: float) -> int:
        """Deletes those that were not used for so long. How many there were; none of an engine that lives."""
        ...

    @property
    def owner(self) -> str:
        """A name that nobody else's folder has."""
        ...

    def find_own_parts(self) -> list[Part]:
        """The files of this engine, without its leases."""
        ...

    def find_salted(self, part: Part, prefix: str) -> list[bytes]:
        """Digests of this engine's blocks in a part whose salt begins so, or whose header cannot be read."""
        ...

    def remove(self, digests: Sequence[bytes]) -> Swept:
        """Deletes these blocks of this engine, as `drop` does, and counts them."""
        ...

    def purge(self, part: Part, prefix: str) -> Swept:
        """Deletes the blocks of a part whose salt begins so, and takes their leases out, unless an engine that lives
        has it. What cannot be read is deleted, because it cannot be told whose it is."""
        ...


@dataclass(frozen=True, slots=True)
class Copied:
    """How a copy ended.

    count    leading blocks that are whole where they were to go
    error    why it was not all of them, when a store failed; without one the next block is not sound in the source
    seconds  that it took
    """

    count: int
    error: Exception | None = None
    seconds: float = field(default=0.0, compare=False)


class Fence:
    """The faster side of a copy, until it is closed: after that the copy, whenever it goes on, touches none of its
    blocks, which may be given to others at once. A disk may hang for minutes and then answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._touched = threading.Lock()  # held only while bytes move in memory
        self._closed = False

    def close(self) -> bool:
        """From now on nothing is read or written. False, and nothing has changed, while that happens right now. Never
        waits."""
        if not self._touched.acquire(blocking=False):
            return False
        self._closed = True
        self._touched.release()
        return True

    def read(self, slots: Sequence[int], keys: Sequence[BlockKey]) -> Payload:
        with self._touched:
            self._check()
            return self._store.read(slots, keys)

    def write(self, slots: Sequence[int], keys: Sequence[BlockKey], payload: Payload) -> None:
        with self._touched:
            self._check()
            self._store.write(slots, keys, payload)

    def drop(self, digests: Sequence[bytes]) -> None:
        self._store.drop(digests)

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the copy is overdue, and its blocks have been given back")


def copy_blocks(
    source: Store,
    source_slots: Sequence[int],
    target: Store,
    target_slots: Sequence[int],
    keys: Sequence[BlockKey],
    at_once: int,
) -> Copied:
    """Copies blocks in order, `at_once` of them in memory at a time. Never raises."""
    count, began_s = 0, time.monotonic()
    try:
        for start in range(0, len(keys), at_once):
            part = slice(start, start + at_once)
            payload = source.read(source_slots[part], keys[part])
            sound = slice(start, start + len(payload))
            if len(payload):
                target.write(target_slots[sound], keys[sound], payload)
            count += len(payload)
            if len(payload) < len(keys[part]):
                break
    except Exception as error:
        return Copied(count, error, time.monotonic() - began_s)
    return Copied(count, None, time.monotonic() - began_s)
