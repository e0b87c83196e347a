"""Files of all tenants in one folder, durable and shared by gateways: a file is there whole or not at all, whatever is
killed when. Blocking: store.py calls this from threads.

    ROOT/TENANT/lock       held (flock) while files are added, removed or swept
    ROOT/TENANT/NAME.part  an upload, or a description; locked by the process that writes it
    ROOT/TENANT/ID.data    the bytes
    ROOT/TENANT/ID.json    the description; a file exists from when it is written until it is removed
    ROOT/TENANT/ID.gone    instead of both, of a batch's result that was deleted: a batch whose end Redis lost in a
                           fail-over ends again, with files of the same ids

A sweep removes what a killed process left: a part that is not locked, bytes without a description.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, Final

import orjson

from gateway import disk
from gateway.config import FileSettings
from gateway.errors import QuotaError
from gateway.types import BATCH_OUTPUT, StoredFile

log = logging.getLogger(__name__)

WHAT: Final = "Files"
LOCK_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.01
GONE_S: Final = 86_400.0  # after a batch's end in which it may end again

_NO_LINK: Final = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
_ID: Final = re.compile(r"[0-9a-f]{32}")


class Folder:
    """The files below `root`, which is created with the first one."""

    def __init__(self, root: Path, settings: FileSettings, now: Callable[[], float]) -> None:
        """`now` is seconds since 1970."""
        self._root = root
        self._settings = settings
        self._now = now
        self._known: dict[str, dict[str, StoredFile]] = {}  # descriptions that were read; they never change

    def begin(self, tenant: str) -> tuple[disk.Part, int]:
        """An upload, and the bytes that the tenant has room for. Raises QuotaError past the count, StorageError."""
        with self._locked(tenant) as folder:
            room = self._room(tenant, 0)
            return disk.Part(folder, self._check_disk, WHAT), room

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
        """Makes a file of an upload: durable, and visible to every gateway, when this returns. With a `file_id` of an
        existing file, that one stays as it is and is returned; one that was deleted stays so.

        Raises QuotaError, StorageFullError and StorageError; the caller discards the part in any case.
        """
        part.sync()
        with self._locked(tenant) as folder:
            if file_id is not None and (there := self.find(tenant, file_id)) is not None:
                return there
            self._room(tenant, part.num_bytes)
            now_s = self._now()
            stored = StoredFile(
                id=file_id or self._next_id(tenant, now_s),
                filename=filename,
                purpose=purpose,
                mime_type=mime_type,
                num_bytes=part.num_bytes,
                created_s=now_s,
                expires_s=None if ttl_s is None else now_s + ttl_s,
            )
            if (folder / f"{stored.id}.gone").exists():
                return stored
            description = disk.Part(folder, self._check_disk, WHAT)
            try:
                part.keep_as(folder / f"{stored.id}.data")
                description.write(orjson.dumps(asdict(stored)))
                description.keep_as(folder / f"{stored.id}.json")
            except BaseException:
                _remove(folder, stored.id)
                raise
            finally:
                description.discard()
        return stored

    def all_of(self, tenant: str) -> list[StoredFile]:
        """In the order of creation."""
        with disk.translated(WHAT):
            return [stored for _, stored in sorted(self._read(tenant).items()) if not self._is_over(stored)]

    def find(self, tenant: str, file_id: str) -> StoredFile | None:
        """`file_id` may be any string."""
        if not _ID.fullmatch(file_id):
            return None
        with disk.translated(WHAT):
            stored = _read_description(self._root / tenant, file_id)
        return None if stored is None or self._is_over(stored) else stored

    def open(self, tenant: str, file_id: str) -> tuple[StoredFile, BinaryIO] | None:
        """Its bytes stay readable until they are closed, even if it is deleted meanwhile."""
        stored = self.find(tenant, file_id)
        with disk.translated(WHAT), suppress(FileNotFoundError):
            if stored is not None:
                return stored, (self._root / tenant / f"{file_id}.data").open("rb", buffering=0)
        return None

    def link(self, tenant: str, file_id: str, path: Path) -> bool:
        """Puts its bytes at `path`, too, where they stay when it is deleted: durable when this returns. False if there
        is no such file. Raises StorageFullError and StorageError."""
        if self.find(tenant, file_id) is None:
            return False
        data = self._root / tenant / f"{file_id}.data"
        with disk.translated(WHAT):
            try:
                os.link(data, path)
            except FileNotFoundError:
                if path.parent.is_dir():
                    return False
                raise
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                shutil.copyfile(data, path)
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            disk.sync_folder(path.parent)
        return True

    def delete(self, tenant: str, file_id: str) -> bool:
        """Whether it existed."""
        if (stored := self.find(tenant, file_id)) is None:
            return False
        with self._locked(tenant) as folder:
            if stored.purpose == BATCH_OUTPUT and not self._is_forgotten(gone := f"{file_id}.gone"):
                (folder / gone).touch(0o600)
            return _remove(folder, file_id)

    def sweep(self) -> int:
        """Removes expired files and what killed processes left. How much that was."""
        removed = 0
        with disk.translated(WHAT):
            tenants = sorted(path.name for path in self._root.iterdir() if path.is_dir()) if self._root.is_dir() else []
        for tenant in tenants:
            with self._locked(tenant) as folder:
                over = [file_id for file_id, stored in self._read(tenant).items() if self._is_over(stored)]
                removed += sum(_remove(folder, file_id) for file_id in over)
                names = set(os.listdir(folder))
                left = [name for name in names if _is_left(folder, name, names) or self._is_forgotten(name)]
                for name in left:
                    (folder / name).unlink(missing_ok=True)
                removed += len(left)
        return removed

    # -- one tenant's folder, whose lock is held where something is changed -------------------------------------------

    @contextmanager
    def _locked(self, tenant: str) -> Iterator[Path]:
        folder = self._root / tenant
        with disk.translated(WHAT):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _lock(descriptor)
                yield folder
            finally:
                os.close(descriptor)

    def _check_disk(self, _: int, more_bytes: int) -> None:
        if not disk.has_room(self._root, more_bytes, self._settings.min_free_bytes):
            raise disk.full(WHAT)

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
        """Descriptions of all files, expired ones too. Raises OSError."""
        folder, known = self._root / tenant, self._known.get(tenant, {})
        if not folder.is_dir():
            return {}
        ids = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
        found = {file_id: known.get(file_id) or _read_description(folder, file_id) for file_id in ids}
        self._known[tenant] = {file_id: stored for file_id, stored in found.items() if stored is not None}
        return self._known[tenant]

    def _is_forgotten(self, name: str) -> bool:
        """Whether this is ID.gone of a batch that ended too long ago to end again. An id begins with its time."""
        file_id, _, kind = name.partition(".")
        if kind != "gone" or not _ID.fullmatch(file_id):
            return False
        return int(file_id[:16], 16) / 1e6 <= self._now() - GONE_S

    def _is_over(self, stored: StoredFile) -> bool:
        return stored.expires_s is not None and stored.expires_s <= self._now()


def too_many_bytes(max_bytes: int) -> QuotaError:
    return QuotaError(f"All files together would have more than {max_bytes} bytes (files.max_bytes). Delete some.")


def _lock(descriptor: int) -> None:
    """Raises TimeoutError, which is an OSError, when it is held for too long."""
    give_up_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return disk.lock(descriptor)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"the lock was held for {LOCK_TIMEOUT_S:g} s") from None
            time.sleep(POLL_S)


def _read_description(folder: Path, file_id: str) -> StoredFile | None:
    """None when there is no such file, or its description is unreadable. Raises OSError."""
    path = folder / f"{file_id}.json"
    try:
        return StoredFile(**orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        log.warning("%s is no description of a file", path)
        return None


def _remove(folder: Path, file_id: str) -> bool:
    """Whether it existed. The description goes first: from then on there is no such file. Raises OSError."""
    description = folder / f"{file_id}.json"
    existed = description.exists()
    description.unlink(missing_ok=True)
    (folder / f"{file_id}.data").unlink(missing_ok=True)
    return existed


def _is_left(folder: Path, name: str, names: set[str]) -> bool:
    """Whether this one of all `names` in the folder belongs to no file. Raises OSError."""
    stem, _, kind = name.partition(".")
    if kind == "part":
        return not disk.is_written(folder / name)
    return (kind == "data" and f"{stem}.json" not in names) or (kind == "json" and f"{stem}.data" not in names)
