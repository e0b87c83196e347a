"""Files that survive a power failure, and locked parts of them. Blocking. Parts and `translated` raise StorageError;
every other function raises OSError, for files/folder.py and queues/batch/folder.py to translate.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from gateway.errors import StorageError, StorageFullError

log = logging.getLogger(__name__)

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of an OSError: there is no room."""


class Part:
    """A file that is being written, by one thread at a time, and locked meanwhile. It becomes a file with `keep_as`, or
    is gone after `discard`."""

    def __init__(self, folder: Path, check_room: Callable[[int, int], None], what: str) -> None:
        """Creates it, for this user only.

        check_room  raises an error when, besides so many bytes, there may not be so many more
        what        "Files", say, for error messages
        """
        self.path = folder / f"{secrets.token_hex(16)}.part"
        self.num_bytes = 0
        self._check_room = check_room
        self._what = what
        self._one_at_a_time = threading.Lock()  # a cancelled request discards it while a write may still run
        self._descriptor: int | None = None
        with translated(what):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                lock(self._descriptor)
            except BaseException:
                self.discard()
                raise

    def write(self, data: bytes) -> None:
        """At its end. Does nothing once it is closed."""
        with self._one_at_a_time, translated(self._what):
            if self._descriptor is None:
                return
            self._check_room(self.num_bytes, len(data))
            write_all(self._descriptor, data)
            self.num_bytes += len(data)

    def sync(self) -> None:
        """Returns when what was written survives a power failure."""
        with self._one_at_a_time, translated(self._what):
            if self._descriptor is not None:
                os.fsync(self._descriptor)

    def keep_as(self, path: Path) -> None:
        """Renames it; it stays locked until it is discarded. Durable when this returns."""
        self.sync()
        with translated(self._what):
            os.rename(self.path, path)
            sync_folder(path.parent)

    def discard(self) -> None:
        """Unlocks it, and leaves nothing behind; what was renamed stays."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with self._one_at_a_time:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raises StorageFullError or StorageError in place of an OSError."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be written or read: %s", what.lower(), error)
        if error.errno in FULL:
            raise full(what) from error
        raise StorageError(f"{what} cannot be written or read at the moment.") from error


def full(what: str) -> StorageFullError:
    return StorageFullError(f"There is no room for {what.lower()} on the server's disk; nothing was stored.")


def lock(descriptor: int) -> None:
    """Locks it until it is closed, or this process ends. Raises BlockingIOError when it is locked."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_written(part: Path, *, new_s: float = 0.0) -> bool:
    """Whether a living process has locked it, or it is younger than `new_s` and may not be locked yet. Also when it is
    gone: it was kept or discarded meanwhile."""
    try:
        descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if new_s and time.time() - os.fstat(descriptor).st_mtime < new_s:
            return True
        lock(descriptor)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def has_room(place: Path | int, num_bytes: int, min_free_bytes: int) -> bool:
    """Whether `min_free_bytes` are left on the disk of a path, or of a descriptor, behind so many more."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize - num_bytes >= min_free_bytes


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def sync_folder(folder: Path) -> None:
    """What was made, renamed and removed in it is durable when this returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
