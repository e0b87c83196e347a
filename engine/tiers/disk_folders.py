"""Folders of blocks: which engine has which, what is in them, and the end of what engines left that are gone.

    <folder>/lock                             held while an engine chooses, or what others left is looked through
    <folder>/<namespace and numerics, hex>/lock   held by the engine whose folder it is; the second engine of the
    <folder>/<namespace and numerics, hex>-1/lock   same two has this one, and so on

Two engines never read, write or delete in one folder, so neither has to know what the other one keeps. The system gives
a lock back when its process ends, however it ends. What cannot be read is missing. Runs on the tier's thread;
engine/tiers/disk_store.py keeps what is claimed here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from engine.leases.file import LEASE_FILE
from engine.tiers.block_file import in_pages

log = logging.getLogger(__name__)

MOST_ENGINES: Final = 64
"""Of one namespace that share a folder."""

OWNER_BYTES: Final = 64
BLOCK_FILE: Final = re.compile(r"([0-9a-f]{32})\.kv")
TEMPORARY: Final = re.compile(r"[0-9a-f]{32}\.\d+\.\d+\.tmp")
_BLOCK_FOLDER: Final = re.compile(r"[0-9a-f]{32}(-[1-9]\d?)?")
_SUBFOLDER: Final = re.compile(r"[0-9a-f]{2}")
_LOCK: Final = "lock"


class Part(NamedTuple):
    """Some of the files of a folder that engines share, few enough for one job of a copy thread."""

    folder: str  # of one engine's blocks
    name: str  # of a folder in it; empty for its leases


class Swept(NamedTuple):
    """What became of some files.

    left   files that could not be read or deleted
    owner  the engine that has the folder and lives, so that nothing was touched; None when there is none
    """

    files: int = 0  # deleted
    num_bytes: int = 0
    left: int = 0
    owner: str | None = None


@dataclass(slots=True)
class File:
    path: str
    used_s: float  # Unix second
    num_bytes: int


# -- which engine has a folder ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnFolder:
    """A folder that no other engine uses until `release`, or until this process ends."""

    path: Path
    file: int  # open for its lock

    @property
    def is_held(self) -> bool:
        """False when the lock was deleted or moved, alone or with its folder: others would not find it. Raises
        OSError."""
        try:
            return os.path.samestat(os.stat(self.path / _LOCK), os.fstat(self.file))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        os.close(self.file)


def claim(folder: Path, root: str, owner: str) -> OwnFolder:
    """The first folder of a namespace that no living engine has, so that an engine gets that of its predecessor. Waits
    for others that choose or look through at the moment. Raises OSError.

    owner  what others read that find the folder in use, OWNER_BYTES at most
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


def _read_owner(path: Path) -> str:
    """Of a folder that an engine has; empty when it does not say."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path / _LOCK, "rb") as file:
        return file.read(OWNER_BYTES).decode()
    return ""


def _lock(file: int) -> bool | None:
    """False when another process has it, None when the file system cannot tell."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# -- what is in a folder ----------------------------------------------------------------------------------------------


def entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def find_others(folder: Path, own: Path) -> list[Path]:
    """All folders of blocks but the engine's own, of this model and of others, also those of engines that live."""
    found = [Path(entry.path) for entry in entries(folder) if entry.is_dir(follow_symlinks=False)]
    return sorted(path for path in found if path != own and _BLOCK_FOLDER.fullmatch(path.name))


def find_parts(path: Path) -> list[Part]:
    """Of one engine's folder, its leases last."""
    names = [entry.name for entry in entries(path) if entry.is_dir(follow_symlinks=False)]
    return [Part(str(path), name) for name in names if _SUBFOLDER.fullmatch(name)] + [Part(str(path), "")]


def files_of(part: Part) -> list[File]:
    """Blocks or leases, and what was not renamed."""
    names = (BLOCK_FILE, TEMPORARY) if part.name else (LEASE_FILE,)
    files = []
    for entry in entries(f"{part.folder}/{part.name}"):
        if any(name.fullmatch(entry.name) for name in names):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                files.append(File(entry.path, status.st_mtime, in_pages(status.st_size)))
    return files


# -- what goes --------------------------------------------------------------------------------------------------------


def delete(path: str) -> None:
    """If it is there and may be."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove(paths: Iterable[str]) -> Swept:
    """Deletes these files, and counts those that were there."""
    files = num_bytes = left = 0
    for path in paths:
        try:
            size = os.stat(path, follow_symlinks=False).st_size
            os.unlink(path)
        except FileNotFoundError:
            continue
        except OSError:
            left += 1
        else:
            files, num_bytes = files + 1, num_bytes + in_pages(size)
    return Swept(files, num_bytes, left)


def remove_if_empty(part: Part) -> None:
    """Of a folder in which there is nothing but its lock, too. Inside of `choosing`."""
    path = Path(part.folder, part.name)
    with contextlib.suppress(OSError):
        if not part.name and os.listdir(path) == [_LOCK]:
            (path / _LOCK).unlink()
        path.rmdir()


def sweep(folder: Path, part: Part, oldest_s: float) -> Swept:
    """Deletes files of a part that were used last before that Unix second, unless an engine has them that lives;
    folders that are empty go too. Meanwhile no engine can take the folder over. Never fails."""
    own = Path(part.folder)
    try:
        with choosing(folder):
            os.listdir(own / part.name)
            if not is_abandoned(own):
                return Swept(owner=_read_owner(own))
            swept = remove(file.path for file in files_of(part) if file.used_s < oldest_s)
            remove_if_empty(part)
            return swept
    except FileNotFoundError:
        return Swept()
    except OSError:
        return Swept(left=1)
