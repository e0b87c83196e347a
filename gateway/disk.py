"""Files that survive a power failure, and parts of them that are known to be somebody's. Blocking, and every function
raises OSError: those who keep something on disk (files/folder.py, queues/batch/folder.py) say what it means to them, a
Part by itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of an OSError: there is no room."""


class Part:
    """A file that is being written, by one thread at a time, and locked for as long as it is. Whoever renames it keeps
    it; what was not renamed is gone after `discard`."""

    def __init__(
        self,
        folder: Path,
        check_room: Callable[[int, int], None],
        translated: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """A new one, for this user only.

        check_room  raises what it likes when, besides so many bytes, there may not be so many more
        translated  a context around whatever may raise OSError
        """
        self.path = folder / f"{secrets.token_hex(16)}.part"
        self.num_bytes = 0
        self._check_room = check_room
        self._translated = translated
        self._one_at_a_time = threading.Lock()  # who was cancelled discards while a write may still run
        self._descriptor: int | None = None
        with translated():
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                lock(self._descriptor)
            except BaseException:
                self.discard()
                raise

    def write(self, data: bytes) -> None:
        """At its end. Does nothing once it is closed."""
        with self._one_at_a_time, self._translated():
            if self._descriptor is None:
                return
            self._check_room(self.num_bytes, len(data))
            write_all(self._descriptor, data)
            self.num_bytes += len(data)

    def sync(self) -> None:
        """Returns when what was written survives a power failure."""
        with self._one_at_a_time, self._translated():
            if self._descriptor is not None:
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Gives up the lock."""
        with self._one_at_a_time:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None

    def discard(self) -> None:
        """Leaves nothing behind; what was renamed stays."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self.close()


def lock(descriptor: int) -> None:
    """Until it is closed, or this process ends. Raises BlockingIOError when somebody else has it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_written(part: Path, *, new_s: float = 0.0) -> bool:
    """Whether somebody who lives has locked it, or it is younger than `new_s` and may not be locked yet. Also when it
    is gone: it was kept or discarded meanwhile."""
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
