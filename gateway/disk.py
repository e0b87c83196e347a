"""Files that survive a power failure, and parts of them that are known to be somebody's. Blocking, and every function
raises OSError: those who keep something on disk (files/folder.py, queues/batch/folder.py) say what it means to them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import Final

FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Of an OSError: there is no room."""


def open_part(folder: Path) -> tuple[Path, int]:
    """A new file to be written, for this user only, and its descriptor. It is not locked yet."""
    path = folder / f"{secrets.token_hex(16)}.part"
    return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


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
