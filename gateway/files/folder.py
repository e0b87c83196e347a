"""Files of all tenants in one folder, durable and shared: whatever is killed at whatever moment, a file is there whole
or not at all. Blocking: store.py calls this from threads.

    ROOT/TENANT/lock           held (flock) while files are added, removed or swept
    ROOT/TENANT/NAME.part      an upload; locked by the process that writes it
    ROOT/TENANT/ID.data        the bytes
    ROOT/TENANT/ID.json        everything else; a file is there from when this one is, until this one is gone

There is nothing else to agree with, so several gateways need only the same folder. What a process that is gone has left
(a part that nobody locks, bytes without a description) the next sweep removes.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from gateway import disk
from gateway.config import FileSettings
from gateway.errors import QuotaError, StorageError, StorageFullError
from gateway.types import StoredFile

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.01

_NO_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
_ID: Final = re.compile(r"[0-9a-f]{32}")


class Folder:
    """The files below `root`, which is made when the first one comes."""

    def __init__(self, root: Path, settings: FileSettings, now: Callable[[], float]) -> None:
        """`now` is seconds since 1970."""
        self._root = root
        self._settings = settings
        self._now = now
        self._known: dict[str, dict[str, StoredFile]] = {}  # what was read; files never change

    def begin(self, tenant: str) -> tuple[disk.Part, int]:
        """An upload, and the bytes that the tenant has room for. Raises QuotaError past the count, StorageError."""
        with self._locked(tenant) as folder:
            room = self._room(tenant, 0)
            part = disk.Part(folder, self._check_disk, _translated)
        return part, room

    def keep(
        self,
        part: disk.Part,
        tenant: str,
        filename: str,
        purpose: str,
        mime_type: str,
        ttl_s: float | None,
        *,
        file_id: str | None = None,
    ) -> StoredFile:
        """Makes a file of an upload: it is durable, and every gateway sees it, when this returns.

        file_id  that was chosen before; a file that has it already stays as it is, and is what comes back

        Raises QuotaError, StorageFullError and StorageError; the part is the caller's to discard then.
        """
        part.sync()
        with self._locked(tenant) as folder:
            if file_id is not None and (there := self.find(tenant, file_id)) is not None:
                part.discard()
                return there
            self._room(tenant, part.num_bytes)
            now_s = self._now()
            stored = StoredFile(
                id=self._next_id(tenant, now_s) if file_id is None else file_id,
                filename=filename,
                purpose=purpose,
                mime_type=mime_type,
                num_bytes=part.num_bytes,
                created_s=now_s,
                expires_s=None if ttl_s is None else now_s + ttl_s,
            )
            _put(folder, part.path, stored)
        part.close()
        return stored

    def all_of(self, tenant: str) -> list[StoredFile]:
        """In the order in which they were made."""
        with _translated():
            return [stored for _, stored in sorted(self._read(tenant).items()) if not self._is_over(stored)]

    def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """Any string may be asked for."""
        if not _ID.fullmatch(file_id):
            return None
        with _translated():
            stored = _read_description(self._root / tenant, file_id)
        return None if stored is None or self._is_over(stored) else stored

    def open(self, tenant: str, file_id: str) -> tuple[StoredFile, BinaryIO] | None:
        """Its bytes stay readable until they are closed, even if it is deleted meanwhile."""
        stored = self.find(tenant, file_id)
        if stored is None:
            return None
        with _translated():
            try:
                return stored, _data_of(self._root / tenant, file_id).open("rb", buffering=0)
            except FileNotFoundError:
                return None

    def link(self, tenant: str, file_id: str, path: Path) -> bool:
        """Puts its bytes at `path`, too, where they stay when it is deleted. Whether it was there. Raises
        StorageFullError and StorageError."""
        if self.find(tenant, file_id) is None:
            return False
        with _translated():
            try:
                _link(self._root / tenant, file_id, path)
            except FileNotFoundError:
                if path.parent.is_dir():
                    return False
                raise
        return True

    def delete(self, tenant: str, file_id: str) -> bool:
        """Whether it was there."""
        if self.find(tenant, file_id) is None:
            return False
        with self._locked(tenant) as folder:
            return _remove(folder, file_id)

    def sweep(self) -> int:
        """Removes what is over its time, and what those who are gone have left. How much that was."""
        removed = 0
        with _translated():
            tenants = sorted(path.name for path in self._root.iterdir() if path.is_dir()) if self._root.is_dir() else []
        for tenant in tenants:
            with self._locked(tenant) as folder:
                names = {entry.name for entry in os.scandir(folder)}
                over = [file_id for file_id, stored in self._read(tenant).items() if self._is_over(stored)]
                removed += sum(_remove(folder, file_id) for file_id in over)
                left = [name for name in names if _is_left(folder, name, names)]
                for name in left:
                    (folder / name).unlink(missing_ok=True)
                removed += len(left)
        return removed

    # -- one tenant's folder, whose lock is held where something is changed -------------------------------------------

    @contextmanager
    def _locked(self, tenant: str) -> Iterator[Path]:
        folder = self._root / tenant
        with _translated():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock(descriptor)
                yield folder
            finally:
                os.close(descriptor)

    def _check_disk(self, _: int, more_bytes: int) -> None:
        if not disk.has_room(self._root, more_bytes, self._settings.min_free_bytes):
            raise _full()

    def _room(self, tenant: str, num_bytes: int) -> int:
        """Bytes that the tenant may have besides. Raises QuotaError where `num_bytes` are too many."""
        settings, files = self._settings, self.all_of(tenant)
        if len(files) >= settings.max_files:
            raise QuotaError(f"There are {len(files)} files, as many as there may be (files.max_files). Delete some.")
        room = settings.max_bytes - sum(stored.num_bytes for stored in files)
        if num_bytes > room:
            raise too_many_bytes(settings.max_bytes)
        return room

    def _next_id(self, tenant: str, now_s: float) -> str:
        """Later than all others of the tenant, whatever the clock says: its first half is microseconds."""
        latest = max(self._read(tenant), default="0")[:16]
        return f"{max(round(now_s * 1e6), int(latest, 16) + 1):016x}{secrets.token_hex(8)}"

    def _read(self, tenant: str) -> dict[str, StoredFile]:
        """Of every file, also of those that are over their time."""
        folder, known = self._root / tenant, self._known.get(tenant, {})
        if not folder.is_dir():
            return {}
        ids = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
        found = {file_id: known.get(file_id) or _read_description(folder, file_id) for file_id in ids}
        self._known[tenant] = {file_id: stored for file_id, stored in found.items() if stored is not None}
        return self._known[tenant]

    def _is_over(self, stored: StoredFile) -> bool:
        return stored.expires_s is not None and stored.expires_s <= self._now()


def too_many_bytes(max_bytes: int) -> QuotaError:
    return QuotaError(f"All files together would have more than {max_bytes} bytes (files.max_bytes). Delete some.")


def _full() -> StorageFullError:
    return StorageFullError("There is no room for this file on the server's disk; nothing of it was stored.")


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in disk.FULL:
            log.warning("no room for files: %s", error)
            raise _full() from error
        log.warning("files cannot be written or read: %s", error)
        raise StorageError("Files cannot be written or read at the moment.") from error


def _lock(descriptor: int) -> None:
    """Raises TimeoutError, which is an OSError, when somebody holds it for too long."""
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return disk.lock(descriptor)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the lock was held for {LOCK_TIMEOUT_S:g} s") from None
            time.sleep(POLL_S)


# -- one file on disk, in a folder whose lock is held where something is changed: each raises OSError -----------------


def _put(folder: Path, data: Path, stored: StoredFile) -> None:
    """Makes a file of bytes that are durable, which are its own from then on. Durable when this returns; when it fails,
    nothing of it is left."""
    path, description = _data_of(folder, stored.id), _description_of(folder, stored.id)
    part = folder / f"{stored.id}.json.part"
    try:
        os.rename(data, path)
        _write(part, orjson.dumps(asdict(stored)), description)
    except BaseException:
        for left in (description, part, path):
            left.unlink(missing_ok=True)
        raise


def _read_description(folder: Path, file_id: str) -> StoredFile | None:
    """What is known of it; None when there is no such file, or nothing of it can be read."""
    path = _description_of(folder, file_id)
    try:
        return StoredFile(**orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        log.warning("%s is no description of a file", path)
        return None


def _data_of(folder: Path, file_id: str) -> Path:
    """Where its bytes are."""
    return folder / f"{file_id}.data"


def _link(folder: Path, file_id: str, path: Path) -> None:
    """Puts its bytes at `path`, too: durable when this returns, and independent of it."""
    data = _data_of(folder, file_id)
    try:
        os.link(data, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(data, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    disk.sync_folder(path.parent)


def _remove(folder: Path, file_id: str) -> bool:
    """Whether it was there. The description first: from then on there is no such file."""
    try:
        _description_of(folder, file_id).unlink()
    except FileNotFoundError:
        return False
    _data_of(folder, file_id).unlink(missing_ok=True)
    return True


def _is_left(folder: Path, name: str, names: set[str]) -> bool:
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
