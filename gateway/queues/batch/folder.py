"""What jobs have on disk, in a folder that all gateways share. Blocking: called from threads.

    ROOT/TENANT/NAME.part          rows that are being sent; locked (flock) by whoever writes them while they live
    ROOT/TENANT/JOB/input.jsonl    the rows of a job
    ROOT/TENANT/JOB/lines          where each line is in them: offset and bytes, as in _ENTRY
    ROOT/TENANT/JOB/NAME.spool     results, each of one gateway, one behind the other; which of them count, Redis knows
    ROOT/TENANT/JOB/results.jsonl  all results, once the job has ended, where they became no files

What is written in one go is renamed into place. A spool's end may be torn; nobody points to it.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final

from gateway import disk
from gateway.errors import BodyTooLargeError, StorageError, StorageFullError
from gateway.queues.batch.base import Job, Line

log = logging.getLogger(__name__)

NEW_S: Final = 60.0
"""Rows that are younger may not be locked yet."""

_ENTRY: Final = struct.Struct("<QI")


class JobFolder:
    """The jobs below `root`, which is made when the first one comes."""

    def __init__(self, root: Path, *, min_free_bytes: int) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes
        self._appending = threading.Lock()

    def num_bytes(self, tenant: str) -> int:
        """That all jobs of a tenant have. Raises StorageError."""
        total = 0
        with translated():
            for folder, _, names in os.walk(self._root / tenant):
                for name in names:
                    with suppress(FileNotFoundError):  # it is gone by now
                        total += os.stat(os.path.join(folder, name)).st_size
        return total

    # -- input --------------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, max_bytes: int) -> disk.Part:
        """Rows that are to be sent; ended by `put_input`, or by discarding them. Raises StorageError, and writing them
        BodyTooLargeError and StorageFullError."""

        def check_room(num_bytes: int, more_bytes: int) -> None:
            if num_bytes + more_bytes > max_bytes:
                raise BodyTooLargeError(max_bytes, setting="batches.max_request_bytes")
            self.check_room(more_bytes)

        folder = self._root / tenant
        with translated():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return disk.Part(folder, check_room, translated)

    def make(self, job: Job) -> Path:
        """Its folder; where its rows belong comes back. Raises StorageError."""
        with translated():
            folder = self._of(job)
            folder.mkdir(parents=True, mode=0o700)
            disk.sync_folder(folder.parent)
        return folder / "input.jsonl"

    def put_input(self, job: Job, rows: disk.Part) -> None:
        """Its folder, with what was sent as its rows. Durable when this returns. Raises StorageError."""
        self._keep(rows, self.make(job))

    @contextmanager
    def rows(self, job: Job) -> Iterator[BinaryIO]:
        """All of them. Raises StorageError, also for an OSError of who reads."""
        with translated(), (self._of(job) / "input.jsonl").open("rb") as file:
            yield file

    def put_lines(self, job: Job, lines: Sequence[Line]) -> None:
        """Where its lines are. Raises StorageFullError and StorageError."""
        with self.writing(job) as part:
            part.write(b"".join(_ENTRY.pack(*line) for line in lines))
            self._keep(part, self._of(job) / "lines")

    def read_lines(self, job: Job, start: int, count: int, max_bytes: int | None = None) -> list[bytes]:
        """The rows of so many lines from one on; as many of them as have `max_bytes` together, but one at least. Raises
        StorageError."""
        with translated(), self._input(job) as rows:
            found = self._find_lines(job, start, count)
            fitting = num_fitting([size for _, size in found], max_bytes)
            return [os.pread(rows.fileno(), size, offset) for offset, size in found[:fitting]]

    def row_bytes(self, job: Job, line: int) -> int:
        """Of one line's row. Raises StorageError."""
        with translated():
            return self._find_lines(job, line, 1)[0][1]

    def _find_lines(self, job: Job, start: int, count: int) -> list[tuple[int, int]]:
        """Offset and size of rows."""
        with (self._of(job) / "lines").open("rb") as index:
            entries = os.pread(index.fileno(), count * _ENTRY.size, start * _ENTRY.size)
        if len(entries) != count * _ENTRY.size:
            raise OSError(errno.EIO, f"the lines of {job.id} are not all there")
        return list(_ENTRY.iter_unpack(entries))

    # -- results ------------------------------------------------------------------------------------------------------

    def append(self, job: Job, spool: str, body: bytes) -> int:
        """The offset at which the result is; it survives a power failure when this returns. `spool` is written by this
        process alone. Raises StorageFullError and StorageError."""
        with translated():
            self.check_room(len(body))
            path = self._of(job) / f"{spool}.spool"
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with self._appending:
                    offset = os.fstat(descriptor).st_size
                    disk.write_all(descriptor, body + b"\n")
                os.fdatasync(descriptor)
                if not offset:
                    disk.sync_folder(path.parent)
            finally:
                os.close(descriptor)
        return offset

    def read(self, job: Job, places: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Results by spool, offset and bytes; None for what is not there. Raises StorageError."""
        found: list[bytes | None] = []
        with translated(), _Spools(self._of(job)) as spools:
            for spool, offset, num_bytes in places:
                file = spools.open(spool)
                body = b"" if file is None else os.pread(file.fileno(), num_bytes, offset)
                found.append(body if len(body) == num_bytes > 0 else None)
        return found

    @contextmanager
    def writing(self, job: Job) -> Iterator[disk.Part]:
        """A file of a job that is whole or not there at all. Raises StorageFullError and StorageError."""
        part = disk.Part(self._of(job), lambda _, more_bytes: self.check_room(more_bytes), translated)
        try:
            yield part
        finally:
            part.discard()

    def put_results(self, job: Job, part: disk.Part) -> None:
        """All results of a job, in place of those that were there. Durable when this returns. Raises StorageError."""
        self._keep(part, self._of(job) / "results.jsonl")

    def open_results(self, job: Job) -> BinaryIO | None:
        """They stay readable until they are closed. None when there are none. Raises StorageError."""
        with translated():
            try:
                return (self._of(job) / "results.jsonl").open("rb", buffering=0)
            except FileNotFoundError:
                return None

    # -- what goes ----------------------------------------------------------------------------------------------------

    def clean(self, job: Job) -> None:
        """Leaves nothing but its results. Raises StorageError."""
        with translated():
            folder = self._of(job)
            if folder.is_dir():
                for path in folder.iterdir():
                    if path.name != "results.jsonl":
                        path.unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()  # when there are none

    def remove(self, tenant: str, job_id: str) -> None:
        """Raises StorageError."""
        with translated():
            shutil.rmtree(self._root / tenant / job_id, ignore_errors=True)

    def jobs(self) -> list[tuple[str, str]]:
        """Tenant and id of all that have a folder. Raises StorageError."""
        with translated():
            folders = (path for tenant in self._tenants() for path in tenant.iterdir() if path.is_dir())
            return sorted((path.parent.name, path.name) for path in folders)

    def sweep(self) -> int:
        """Removes rows that nobody sends any more. How many there were. Raises StorageError."""
        with translated():
            parts = [
                path
                for tenant in self._tenants()
                for path in tenant.glob("*.part")
                if not disk.is_written(path, new_s=NEW_S)
            ]
            for path in parts:
                path.unlink(missing_ok=True)
        return len(parts)

    def has_room(self) -> bool:
        """Whether any result could be written. Raises StorageError."""
        if not self._root.is_dir():
            return True  # nobody has written anything yet
        try:
            with translated():
                self.check_room(0)
        except StorageFullError:
            return False
        return True

    def check_room(self, num_bytes: int) -> None:
        """Raises StorageFullError when so many bytes would leave less than others need."""
        if not disk.has_room(self._root, num_bytes, self._min_free_bytes):
            raise _full()

    def _tenants(self) -> list[Path]:
        return [path for path in self._root.iterdir() if path.is_dir()] if self._root.is_dir() else []

    def _of(self, job: Job) -> Path:
        return self._root / job.tenant / job.id

    def _input(self, job: Job) -> BinaryIO:
        return (self._of(job) / "input.jsonl").open("rb", buffering=0)

    def _keep(self, part: disk.Part, path: Path) -> None:
        part.sync()
        with translated():
            os.rename(part.path, path)
            disk.sync_folder(path.parent)


class _Spools:
    """Context manager around the spools of one job that are read, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO | None] = {}

    def __enter__(self) -> _Spools:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._files.values():
            if file is not None:
                file.close()

    def open(self, spool: str) -> BinaryIO | None:
        if spool not in self._files:
            try:
                self._files[spool] = (self._folder / f"{spool}.spool").open("rb", buffering=0)
            except FileNotFoundError:
                self._files[spool] = None
        return self._files[spool]


@contextmanager
def translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in disk.FULL:
            raise _full() from error
        log.warning("jobs cannot be written or read: %s", error)
        raise StorageError("Batches cannot be written or read at the moment.") from error


def num_fitting(sizes: Sequence[int], max_bytes: int | None) -> int:
    """How many of them, from the first on, are no more than `max_bytes` together; one at least, if there is one."""
    if max_bytes is None:
        return len(sizes)
    fitting = sum(total <= max_bytes for total in accumulate(sizes))
    return max(fitting, min(1, len(sizes)))


def _full() -> StorageFullError:
    return StorageFullError("There is no room for this batch on the server's disk.")
