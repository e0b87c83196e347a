"""One file as it is on disk, whatever is killed at whatever moment: whole or not at all.

    ID.data   the bytes
    ID.json   everything else; the file is there from when this one is, until this one is gone

Blocking, and every function raises OSError. Whoever changes something holds the lock of the folder (folder.py).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Final

import orjson

from gateway import disk
from gateway.types import StoredFile

log = logging.getLogger(__name__)

_NO_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def put(folder: Path, data: Path, stored: StoredFile) -> None:
    """Makes a file of bytes that are durable, which are its own from then on. Durable when this returns; when it fails,
    nothing of it is left."""
    path, description = data_of(folder, stored.id), _description_of(folder, stored.id)
    part = folder / f"{stored.id}.json.part"
    try:
        os.rename(data, path)
        _write(part, orjson.dumps(asdict(stored)), description)
    except BaseException:
        for left in (description, part, path):
            left.unlink(missing_ok=True)
        raise


def read(folder: Path, file_id: str) -> StoredFile | None:
    """What is known of it; None when there is no such file, or nothing of it can be read."""
    path = _description_of(folder, file_id)
    try:
        return StoredFile(**orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        log.warning("%s is no description of a file", path)
        return None


def data_of(folder: Path, file_id: str) -> Path:
    """Where its bytes are."""
    return folder / f"{file_id}.data"


def link(folder: Path, file_id: str, path: Path) -> None:
    """Puts its bytes at `path`, too: durable when this returns, and independent of it."""
    data = data_of(folder, file_id)
    try:
        os.link(data, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(data, path)
        _sync_file(path)
    disk.sync_folder(path.parent)


def remove(folder: Path, file_id: str) -> bool:
    """Whether it was there. The description first: from then on there is no such file."""
    try:
        _description_of(folder, file_id).unlink()
    except FileNotFoundError:
        return False
    data_of(folder, file_id).unlink(missing_ok=True)
    return True


def is_left(folder: Path, name: str, names: set[str]) -> bool:
    """Whether nobody will ever ask for what has this name, one of all `names` in the folder."""
    stem, _, kind = name.partition(".")
    if kind == "part":
        return not disk.is_written(folder / name)
    if kind == "data":
        return f"{stem}.json" not in names
    if kind == "json":
        return f"{stem}.data" not in names
    return kind == "json.part"  # written only by who holds the folder's lock, which is us


def _description_of(folder: Path, file_id: str) -> Path:
    return folder / f"{file_id}.json"


def _write(part: Path, body: bytes, path: Path) -> None:
    """The file at `path`, whole or not at all; all that was renamed in its folder before is durable with it."""
    with part.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    disk.sync_folder(path.parent)
    os.rename(part, path)
    disk.sync_folder(path.parent)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
