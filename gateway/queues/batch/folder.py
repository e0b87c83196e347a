"""What jobs have on disk, in a folder that all gateways share. Blocking: called from threads.

    ROOT/TENANT/NAME.part          arriving rows; locked (flock) by the living process that writes them
    ROOT/TENANT/JOB/input.jsonl    the rows of a job
    ROOT/TENANT/JOB/lines          where each line is in them: offset and bytes, as in _ENTRY
    ROOT/TENANT/JOB/NAME.spool     results, one behind the other, written by one gateway each; Redis knows which count
    ROOT/TENANT/JOB/results.jsonl  all results of a job that has ended, if they do not become files

All but the spools is renamed into place when it is complete. A spool's end may be torn; no result points to it.
Everything raises StorageError.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final

from gateway import disk
from gateway.errors import BodyTooLargeError, StorageFullError
from gateway.queues.batch.base import Job, Line

WHAT: Final = "Batches"

NEW_S: Final = 60.0
"""Rows that are younger may not be locked yet."""

_ENTRY: Final = struct.Struct("<QI")


class JobFolder:
    """The jobs below `root`, which is created with the first one."""

    def __init__(self, root: Path, *, min_free_bytes: int) -> None:
        self._root = root
        self._min_free_bytes = min_free_bytes
        self._appending = threading.Lock()

    def num_bytes(self, tenant: str) -> int:
        """Bytes of all jobs of a tenant."""
        total = 0
        with disk.translated(WHAT):
            for folder, _, names in os.walk(self._root / tenant):
                for name in names:
                    with suppress(FileNotFoundError):  # removed meanwhile
                        total += os.stat(os.path.join(folder, name)).st_size
        return total

    # -- input --------------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, max_bytes: int) -> disk.Part:
        """Arriving rows, for `put_input` or to be discarded. Writing raises BodyTooLargeError and StorageFullError."""

        def check_room(num_bytes: int, more_bytes: int) -> None:
            if num_bytes + more_bytes > max_bytes:
                raise BodyTooLargeError(max_bytes, setting="batches.max_request_bytes")
            self.check_room(more_bytes)

        folder = self._root / tenant
        with disk.translated(WHAT):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return disk.Part(folder, check_room, WHAT)

    def make(self, job: Job) -> Path:
        """Creates its folder. Returns where its rows belong."""
        with disk.translated(WHAT):
            folder = self._of(job)
            folder.mkdir(parents=True, mode=0o700)
            disk.sync_folder(folder.parent)
        return folder / "input.jsonl"

    def put_input(self, job: Job, rows: disk.Part) -> None:
        """Creates its folder with these rows. Durable when this returns."""
        rows.keep_as(self.make(job))

    @contextmanager
    def rows(self, job: Job) -> Iterator[BinaryIO]:
        """All of them. An OSError of the reader is a StorageError, too."""
        with disk.translated(WHAT), (self._of(job) / "input.jsonl").open("rb") as file:
            yield file

    def put_lines(self, job: Job, lines: Sequence[Line]) -> None:
        """Where its lines are."""
        with self.writing(job) as part:
            part.write(b"".join(_ENTRY.pack(*line) for line in lines))
            part.keep_as(self._of(job) / "lines")

    def read_lines(self, job: Job, start: int, count: int, max_bytes: int | None = None) -> list[bytes]:
        """The rows of so many lines from one on; as many of them as have `max_bytes` together, but one at least."""
        with disk.translated(WHAT), (self._of(job) / "input.jsonl").open("rb", buffering=0) as rows:
            found = self._find_lines(job, start, count)
            fitting = num_fitting([size for _, size in found], max_bytes)
            return [os.pread(rows.fileno(), size, offset) for offset, size in found[:fitting]]

    def row_bytes(self, job: Job, line: int) -> int:
        """Of one line's row."""
        with disk.translated(WHAT):
            return self._find_lines(job, line, 1)[0][1]

    def _find_lines(self, job: Job, start: int, count: int) -> list[tuple[int, int]]:
        """Offset and size of rows. Raises OSError."""
        with (self._of(job) / "lines").open("rb") as index:
            entries = os.pread(index.fileno(), count * _ENTRY.size, start * _ENTRY.size)
        if len(entries) != count * _ENTRY.size:
            raise OSError(errno.EIO, f"the lines of {job.id} are not all there")
        return list(_ENTRY.iter_unpack(entries))

    # -- results ------------------------------------------------------------------------------------------------------

    def append(self, job: Job, spool: str, body: bytes) -> int:
        """The offset of the result, which survives a power failure when this returns. `spool` is written by this
        process alone. Raises StorageFullError."""
        path = self._of(job) / f"{spool}.spool"
        with disk.translated(WHAT):
            self.check_room(len(body))
            with open(path, "ab", buffering=0, opener=partial(os.open, mode=0o600)) as file:
                with self._appending:
                    offset = os.fstat(file.fileno()).st_size
                    disk.write_all(file.fileno(), body + b"\n")
                os.fsync(file.fileno())
            if not offset:
                disk.sync_folder(path.parent)
        return offset

    def read(self, job: Job, places: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Results by spool, offset and bytes; None for what is not there."""
        found: list[bytes | None] = []
        files: dict[str, BinaryIO | None] = {}
        with disk.translated(WHAT), ExitStack() as stack:
            for spool, offset, num_bytes in places:
                if spool not in files:
                    files[spool] = _opened(self._of(job) / f"{spool}.spool")
                    stack.enter_context(files[spool] or nullcontext())
                file = files[spool]
                body = b"" if file is None else os.pread(file.fileno(), num_bytes, offset)
                found.append(body if len(body) == num_bytes > 0 else None)
        return found

    @contextmanager
    def writing(self, job: Job) -> Iterator[disk.Part]:
        """A file of a job, to be kept in the block. Writing raises StorageFullError."""
        part = disk.Part(self._of(job), lambda _, more_bytes: self.check_room(more_bytes), WHAT)
        try:
            yield part
        finally:
            part.discard()

    def put_results(self, job: Job, part: disk.Part) -> None:
        """All results of a job, in place of the ones before. Durable when this returns."""
        part.keep_as(self._of(job) / "results.jsonl")

    def open_results(self, job: Job) -> BinaryIO | None:
        """Readable until they are closed. None when there are none."""
        with disk.translated(WHAT):
            return _opened(self._of(job) / "results.jsonl")

    # -- removal ------------------------------------------------------------------------------------------------------

    def clean(self, job: Job) -> None:
        """Leaves nothing but its results. May be repeated: a gateway that lost a line, and did not know it yet,
        may have written its result after the job's end."""
        with disk.translated(WHAT):
            folder = self._of(job)
            if folder.is_dir():
                for path in folder.iterdir():
                    if path.name != "results.jsonl":
                        path.unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()  # when there are none

    def remove(self, tenant: str, job_id: str) -> None:
        with disk.translated(WHAT):
            shutil.rmtree(self._root / tenant / job_id, ignore_errors=True)

    def jobs(self) -> list[tuple[str, str]]:
        """Tenant and id of all jobs that have a folder."""
        with disk.translated(WHAT):
            folders = (path for tenant in self._tenants() for path in tenant.iterdir() if path.is_dir())
            return sorted((path.parent.name, path.name) for path in folders)

    def sweep(self) -> int:
        """Removes rows that stopped arriving. How many there were."""
        with disk.translated(WHAT):
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
        """Whether any result could be written."""
        if not self._root.is_dir():
            return True  # nothing was written yet
        try:
            with disk.translated(WHAT):
                self.check_room(0)
        except StorageFullError:
            return False
        return True

    def check_room(self, num_bytes: int) -> None:
        """Raises StorageFullError when so many bytes would leave less than others need."""
        if not disk.has_room(self._root, num_bytes, self._min_free_bytes):
            raise disk.full(WHAT)

    def _tenants(self) -> list[Path]:
        return [path for path in self._root.iterdir() if path.is_dir()] if self._root.is_dir() else []

    def _of(self, job: Job) -> Path:
        return self._root / job.tenant / job.id


def _opened(path: Path) -> BinaryIO | None:
    """None when there is no such file. Raises OSError."""
    try:
        return path.open("rb", buffering=0)
    except FileNotFoundError:
        return None


def num_fitting(sizes: Sequence[int], max_bytes: int | None) -> int:
    """How many of them, from the first on, are no more than `max_bytes` together; one at least, if there is one."""
    if max_bytes is None:
        return len(sizes)
    fitting = sum(total <= max_bytes for total in accumulate(sizes))
    return max(fitting, min(1, len(sizes)))
