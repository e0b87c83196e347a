"""The leases that an engine keeps on disk, in one file beside their blocks, and when it is written. Survives a restart.

    <folder of the engine>/engine.leases        0600

    file  magic and version | identity | one line of JSON for each lease | XXH3-128 of all that

One engine has the folder at a time (engine/tiers/disk_folders.py): it takes over what its predecessor promised, and
writes the file whole, beside its place, and renames it into it: soon after leases have changed, not too often, and when
the engine stops. Nothing is written before the start is over, because that would end what the predecessor promised.

The engine's clock means nothing after a restart: times are converted to Unix seconds here, and back. A file that is
torn, of another version, namespace or layout has no leases in it. No torch, no policy: engine/leases/leases.py decides
what is kept again. `read` and `write` are called by the disk tier's thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import xxhash

from engine.leases.pins import Lease
from engine.tiers.block_file import write_file

if TYPE_CHECKING:
    from engine.leases.leases import Leases
    from engine.tiers.tier import Account, Steps, Tier

log = logging.getLogger(__name__)

MAGIC: Final = b"KVASIRL\x01"  # the last byte is the version of the format
CHECKSUM_BYTES: Final = 16
MOST_BYTES: Final = 256 << 20
"""Of a file that is read: more than max_leases of the longest tails take."""

LEASE_FILE: Final = re.compile(r"\w+\.leases(\.tmp)?")
"""Also of earlier versions, and what was not renamed."""

WRITE_INTERVAL_S: Final = 3.0
"""Between two writes: so much of what was promised or renewed last is forgotten when an engine is killed."""


class LeaseFile:
    """The leases of one engine on disk."""

    def __init__(
        self,
        folder: Callable[[], Path],
        identity: bytes,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        folder    of the engine's blocks; made when something is written. Raises OSError when there is none to be had
        identity  of namespace and layout, without a line break
        clock     of `expires_s`, in seconds, and
        wall      in Unix seconds
        """
        self._folder = folder
        self._head = MAGIC + identity + b"\n"
        self.clock, self._wall = clock, wall

    @property
    def _path(self) -> str:
        return f"{self._folder()}/engine.leases"

    def read(self) -> list[Lease]:
        """What was promised and is not over, as degraded leases without a number, the most valuable first; of equal
        ones that which ends last. Deletes a file in which nothing is of use. Never fails."""
        now, leases = self.clock(), list[Lease]()
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._path}.tmp")
            with open(self._path, "rb") as file:
                leases = self._parse(file.read(MOST_BYTES + 1), now)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError, TypeError) as error:
            log.warning("the leases on disk are forgotten: %s", error)
        if not leases:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        return sorted(leases, key=lambda lease: lease.value(now), reverse=True)

    def _parse(self, content: bytes, now: float) -> list[Lease]:
        """Raises ValueError or TypeError for what `write` has not written."""
        body = content[:-CHECKSUM_BYTES]
        if not _is_whole(content):
            raise ValueError("the file is torn")
        if not body.startswith(self._head):
            raise ValueError("the file is of another version, namespace or layout")
        leases = [_read_line(line, now - self._wall()) for line in body[len(self._head) :].splitlines()]
        for lease in leases:
            lease.expires_s = min(lease.expires_s, now + lease.ttl_s)  # the wall clock may have been put back
        return [lease for lease in leases if lease.expires_s > now]

    def write(self, leases: Iterable[Lease]) -> None:
        """Puts these in the place of what was written before; without any there is no file. Raises OSError, and the
        file is what it was."""
        ahead_s = self._wall() - self.clock()
        lines = [_write_line(lease, ahead_s) for lease in leases]
        if lines:
            content = self._head + b"".join(lines)
            write_file(self._path, f"{self._path}.tmp", [content, xxhash.xxh3_128_digest(content)])
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


class LeaseSaving:
    """When the file of one tier is written. Pure bookkeeping on the loop's thread."""

    def __init__(self, tier: Tier, file: LeaseFile, leases: Leases, account: Account) -> None:
        self._tier = tier
        self._file = file
        self._leases = leases
        self._account = account
        self._written = leases.revision
        self._next_s: float | None = None  # not before then; None before the first time
        self._writing = False

    @property
    def next_s(self) -> float | None:
        """When there is something to write; None when there is nothing."""
        if self._writing or not self._changed:
            return None
        return max(self._tier.pause_until_s, self._account.now if self._next_s is None else self._next_s)

    def pump(self) -> None:
        """Begins to write, if it is time."""
        due_s = self.next_s
        if due_s is not None and due_s <= self._account.now:
            self._tier.run_steps(self.write())

    def write(self) -> Steps[Exception | None]:
        """Writes as soon as the tier's thread comes to it, whether something has changed or not. The tier is ready."""
        self._writing, revision = True, self._leases.revision
        error: Exception | None = yield self._write
        self._writing = False
        self._next_s = self._account.now + WRITE_INTERVAL_S
        if error is None:
            self._written = revision
        else:
            self._account.failed(self._tier, 0, error)
        return error

    def write_last(self) -> None:
        """On the tier's thread, when the engine stops."""
        if self._changed:
            self._write()

    @property
    def _changed(self) -> bool:
        return self._tier.ready and self._written != self._leases.revision

    def _write(self) -> Exception | None:
        """On the tier's thread."""
        try:
            self._file.write(self._leases.kept_below())
        except Exception as error:
            return error
        return None


def _is_whole(content: bytes) -> bool:
    body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
    return len(content) <= MOST_BYTES and xxhash.xxh3_128_digest(body) == checksum


def _write_line(lease: Lease, ahead_s: float) -> bytes:
    """
    ahead_s  of the wall clock before that of the leases
    """
    names = [lease.tenant, lease.salt, lease.digest.hex(), lease.tail.hex(), lease.fingerprint.hex()]
    return json.dumps([*names, lease.tokens, lease.depth, lease.ttl_s, lease.expires_s + ahead_s]).encode() + b"\n"


def _read_line(line: bytes, ahead_s: float) -> Lease:
    """
    ahead_s  of the clock of the leases before the wall clock
    """
    tenant, salt, digest, tail, fingerprint, tokens, depth, ttl_s, expires_s = json.loads(line)
    numbers = (tokens, depth, ttl_s, expires_s)
    if not (isinstance(tenant, str) and isinstance(salt, str) and all(map(math.isfinite, numbers)) and ttl_s > 0):
        raise ValueError("a lease in the file makes no sense")
    return Lease(
        tenant,
        salt,
        digest=bytes.fromhex(digest),
        tail=bytes.fromhex(tail),
        fingerprint=bytes.fromhex(fingerprint),
        tokens=int(tokens),
        depth=int(depth),
        ttl_s=float(ttl_s),
        expires_s=expires_s + ahead_s,
        number=0,
    )
