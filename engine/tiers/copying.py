"""Copies blocks from one store to another, on a thread of the disk's tier: the loop never waits for memory or a disk.

A store has the bytes of a tier's blocks: where the model runs (engine/tiers/storage.py), or a folder
(engine/tiers/disk_store.py). Which slot holds what, and whether it may be read or written now, is decided by
engine/tiers/tiers.py on the loop's thread; every call of a store is made on a copy thread and may take long.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 5.0
"""A disk may hang, and the process is to end."""

Payload = npt.NDArray[Any]
"""(num_blocks, block_bytes) uint8; each row one block as (num_layers, block_size, 2, num_kv_heads, head_dim)."""

T = TypeVar("T")


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
        self.drop = store.drop
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

    def _check(self) -> None:
        if self._closed:
            raise RuntimeError("the copy is overdue, and its blocks have been given back")


def copy_blocks(
    source: Store, source_slots: Sequence[int], target: Store, target_slots: Sequence[int], keys: Sequence[BlockKey]
) -> Copied:
    """Copies blocks in order, as far as they are sound. Never raises."""
    count, began_s, error = 0, time.monotonic(), None
    try:
        payload = source.read(source_slots, keys)
        if len(payload):
            sound = slice(len(payload))
            target.write(target_slots[sound], keys[sound], payload)
        count = len(payload)
    except Exception as failure:
        error = failure
    return Copied(count, error, time.monotonic() - began_s)


class CopyThread:
    """Does jobs of one tier in the order in which they were handed over. How many there can be is bounded by
    engine/tiers/tiers.py: one save at a time, one restore for each sequence that may run."""

    def __init__(self, name: str, post: Callable[[Callable[[], object]], None]) -> None:
        """post  hands a command to the loop's thread, and does not wait for it"""
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closing = False
        self._last: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], T], done: Callable[[T], object]) -> None:
        """`done` is called on the loop's thread with what the job returned. A job does not raise."""

        def work() -> None:
            self._post(partial(done, job()))

        self._jobs.put(work)

    def close(self, last: Callable[[], object]) -> None:
        """Waits for the job that is being done and the last one, for CLOSE_LIMIT_S at most. Leaves out the rest."""
        self._last = last
        self._closing = True
        self._jobs.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    def _work(self) -> None:
        while (work := self._jobs.get()) is not None and not self._closing:
            self._do(work)
        if self._last is not None:
            self._do(self._last)

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            log.exception("a copy thread's job failed in a way that it should not")
