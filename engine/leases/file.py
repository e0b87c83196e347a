"""The leases that an engine keeps on disk, in a file beside their blocks. Survives a restart.

    <folder of the namespace>/<writer, hex>.leases        0600

    file  magic and version | identity | one line of JSON for each lease | XXH3-128 of all that

Each engine writes one file of its own, whole, beside its place, and renames it into it. It holds a lock on it as long
as it lives, so that whoever starts later can tell the files of engines that are gone: it takes over what they promised,
and deletes them once it has written a file that says so. What living engines keep is read as well, because the blocks
in the folder are common: an engine that did not know of a lease would delete what another one promised.

The engine's clock means nothing after a restart: times are converted to Unix seconds here, and back. A file that is
torn, of another version, namespace or layout has no leases in it. No torch, no policy: engine/leases/saving.py says
when to write, engine/leases/leases.py what is kept again. `read`, `write` and `close` are called by one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import xxhash

from engine.leases.tree import Lease

log = logging.getLogger(__name__)

MAGIC: Final = b"KVASIRL\x01"  # the last byte is the version of the format
CHECKSUM_BYTES: Final = 16

MOST_FILES: Final = 64
"""That are read at the start, the youngest; more engines than that do not share a folder."""

MOST_BYTES: Final = 256 << 20
"""Of a file that is read: more than max_leases of the longest tails take."""

TEMPORARY_AGE_S: Final = 60.0
"""A file that was not renamed after so long was left behind by an engine that is gone."""

LEASE_FILE: Final = re.compile(r"[0-9a-f]{32}\.leases")
TEMPORARY: Final = re.compile(r"[0-9a-f]{32}\.leases\.tmp")


@dataclass(frozen=True, slots=True)
class _Claim:
    """A file of an engine that is gone, locked by this one."""

    path: str
    file: int


class LeaseFile:
    """The leases of one engine on disk, and at the start those of all that share its folder."""

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
        self._name = f"{secrets.token_hex(16)}.leases"
        self._file: int | None = None  # the one that is at the path, open for its lock
        self._claims: list[_Claim] = []

    @property
    def _path(self) -> str:
        return f"{self._folder()}/{self._name}"

    # -- the start ----------------------------------------------------------------------------------------------------

    def read(self) -> list[Lease]:
        """What was promised and is not over, as degraded leases without a number, the most valuable first; of equal
        ones that which ends last. Never fails."""
        now, unix_s = self.clock(), self._wall()
        found: dict[tuple[str, str, bytes, bytes, bytes], Lease] = {}
        for path in self._find_files():
            for lease in self._read_file(path, now, unix_s):
                key = (lease.tenant, lease.salt, lease.digest, lease.tail, lease.fingerprint)
                if key not in found or found[key].expires_s < lease.expires_s:
                    found[key] = lease
        return sorted(found.values(), key=lambda lease: lease.value(now), reverse=True)

    def _find_files(self) -> list[str]:
        """Deletes what a dead engine left half."""
        files: list[tuple[float, str]] = []
        try:
            with os.scandir(self._folder()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        written_s = entry.stat(follow_symlinks=False).st_mtime
                        if LEASE_FILE.fullmatch(entry.name):
                            files.append((written_s, entry.path))
                        elif TEMPORARY.fullmatch(entry.name) and written_s < time.time() - TEMPORARY_AGE_S:
                            _delete(entry.path)
        except OSError:
            return []
        return [path for _, path in sorted(files, reverse=True)[:MOST_FILES]]

    def _read_file(self, path: str, now: float, unix_s: float) -> list[Lease]:
        """One whose writer is gone is claimed, or deleted at once when nothing in it is of any use."""
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return []
        try:
            leases = self._parse(_read_all(file), now, unix_s)
        except (OSError, ValueError, TypeError) as error:
            log.warning("the leases in one file are forgotten: %s", error)
            leases = []
        is_gone = _lock(file, path)
        if is_gone and leases:
            self._claims.append(_Claim(path, file))
            return leases
        if is_gone is not False and not leases:
            _delete(path)
        os.close(file)
        return leases

    def _parse(self, content: bytes, now: float, unix_s: float) -> list[Lease]:
        """Raises ValueError or TypeError for what `write` has not written."""
        body, checksum = content[:-CHECKSUM_BYTES], content[-CHECKSUM_BYTES:]
        if xxhash.xxh3_128_digest(body) != checksum:
            raise ValueError("it is torn")
        if not body.startswith(self._head):
            raise ValueError("it is of another version, namespace or layout")
        leases = [_read_line(line, now - unix_s) for line in body[len(self._head) :].splitlines()]
        for lease in leases:
            lease.expires_s = min(lease.expires_s, now + lease.ttl_s)  # the wall clock may have been put back
        return [lease for lease in leases if lease.expires_s > now]

    # -- what is kept -------------------------------------------------------------------------------------------------

    def write(self, leases: Iterable[Lease]) -> None:
        """Puts these in the place of what was written before; without any there is no file. What was claimed at the
        start is deleted then. Raises OSError, and the file is what it was."""
        lines, ahead_s = [self._head], self._wall() - self.clock()
        lines += (_write_line(lease, ahead_s) for lease in leases)
        if len(lines) > 1:
            self._replace(b"".join(lines))
        else:
            _delete(self._path)
            self._unlock()
        for claim in self._claims:
            _delete(claim.path)
        self._release_claims()

    def close(self) -> None:
        """From now on this engine counts as gone, and its file is there for the next."""
        self._unlock()
        self._release_claims()

    def _replace(self, content: bytes) -> None:
        temporary = f"{self._path}.tmp"
        file = self._create(temporary)
        try:
            with contextlib.suppress(OSError):  # without locks, the file is deleted when all that it says is over
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            whole = content + xxhash.xxh3_128_digest(content)
            if os.write(file, whole) != len(whole):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
            os.replace(temporary, self._path)
        except OSError:
            os.close(file)
            _delete(temporary)
            raise
        self._unlock()
        self._file = file

    def _create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            own = self._folder()
            for folder in (own.parent, own):
                folder.mkdir(mode=0o700, parents=folder is own.parent, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _unlock(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _release_claims(self) -> None:
        for claim in self._claims:
            os.close(claim.file)
        self._claims = []


def purge_leases(path: str, prefix: str) -> int:
    """Takes the leases whose salt begins so out of the file of an engine that is gone, and which nobody takes over at
    the moment. A file that cannot be read, or in which nothing is left, is deleted. Returns how many there were; 1 for
    a file that cannot be read. Raises OSError, and the file is what it was."""
    with open(path, "rb") as file:
        status, content = os.fstat(file.fileno()), file.read(MOST_BYTES + 1)
    body = content[:-CHECKSUM_BYTES]
    head, _, lines = body.partition(b"\n")
    is_sound = len(content) <= MOST_BYTES and xxhash.xxh3_128_digest(body) == content[-CHECKSUM_BYTES:]
    if not (is_sound and head.startswith(MAGIC) and LEASE_FILE.fullmatch(os.path.basename(path))):
        os.unlink(path)
        return 1
    every = lines.splitlines(keepends=True)
    kept = [line for line in every if not _has_salt(line, prefix)]
    if not kept:
        os.unlink(path)
    elif len(kept) < len(every):
        whole = head + b"\n" + b"".join(kept)
        temporary = f"{path}.tmp"
        with open(temporary, "wb") as file:
            file.write(whole + xxhash.xxh3_128_digest(whole))
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(temporary, path)
    return len(every) - len(kept)


def _has_salt(line: bytes, prefix: str) -> bool:
    """Also for one that is no lease."""
    try:
        return str(json.loads(line)[1]).startswith(prefix)
    except (ValueError, TypeError, IndexError, KeyError):
        return True


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
        raise ValueError("it has a lease that makes no sense")
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


def _read_all(file: int) -> bytes:
    return b"".join(_parts(file, min(os.fstat(file).st_size, MOST_BYTES)))


def _parts(file: int, size: int) -> Iterator[bytes]:
    while size > 0 and (part := os.read(file, size)):
        size -= len(part)
        yield part


def _lock(file: int, path: str) -> bool | None:
    """Whether the writer of the file at a path is gone; None when the file system cannot tell. The writer may have put
    another one there since this was opened."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return None


def _delete(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
