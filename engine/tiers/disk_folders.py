"""Which folder of blocks is whose: an engine has one of its own as long as it lives, and takes over what one that is
gone left there.

    <folder>/lock                             held while an engine chooses, or what others left is looked through
    <folder>/<namespace and numerics, hex>/lock   held by the engine whose folder it is; the second engine of the
    <folder>/<namespace and numerics, hex>-1/lock   same two has this one, and so on

Two engines never read, write or delete in one folder, so neither has to know what the other one keeps. The system gives
a lock back when its process ends, however it ends. engine/tiers/disk_store.py keeps what is claimed here;
engine/tiers/disk_scan.py deletes what belongs to no engine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

BLOCK_FOLDER: Final = re.compile(r"[0-9a-f]{32}(-[1-9]\d?)?")
MOST_ENGINES: Final = 64
"""Of one namespace that share a folder."""

OWNER_BYTES: Final = 64
_LOCK: Final = "lock"


@dataclass(frozen=True, slots=True)
class OwnFolder:
    """A folder that no other engine uses until `release`, or until this process ends."""

    path: Path
    file: int  # open for its lock

    def release(self) -> None:
        os.close(self.file)


def claim(folder: Path, root: str, owner: str) -> OwnFolder:
    """The first folder of a namespace that no living engine has, so that an engine gets that of its predecessor. Waits
    for others that choose or look through at the moment. Raises OSError.

    owner  what others are told who find the folder in use, OWNER_BYTES at most
    """
    with choosing(folder):
        for number in range(MOST_ENGINES):
            path = folder / (f"{root}-{number}" if number else root)
            path.mkdir(mode=0o700, exist_ok=True)
            file = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _lock(file) is not False:
                os.ftruncate(file, 0)
                os.pwrite(file, owner.encode(), 0)
                return OwnFolder(path, file)
            os.close(file)
    raise OSError(errno.EBUSY, f"{MOST_ENGINES} engines use it already", str(folder))


@contextlib.contextmanager
def choosing(folder: Path) -> Iterator[None]:
    """Until its end no engine claims a folder. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning(
                "%s: this file system has no locks (%s): engines that share the folder delete one another's blocks; "
                "give each its own engine.disk_dir",
                folder,
                error,
            )
        yield
    finally:
        os.close(file)


def is_abandoned(path: Path) -> bool:
    """Whether no engine has this folder of blocks, and none can get it: inside of `choosing`."""
    try:
        file = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # an earlier version's
    except OSError:
        return False
    try:
        return _lock(file) is True
    finally:
        os.close(file)


def read_owner(path: Path) -> str:
    """Of a folder that an engine has; empty when it does not say."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path / _LOCK, "rb") as file:
        return file.read(OWNER_BYTES).decode()
    return ""


def remove_if_empty(path: Path) -> None:
    """Takes away an abandoned folder in which there is nothing but its lock. Inside of `choosing`."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [_LOCK]:
            (path / _LOCK).unlink()
        path.rmdir()


def _lock(file: int) -> bool | None:
    """False when somebody else has it, None when the file system cannot tell."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
