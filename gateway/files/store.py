"""Files of tenants, without blocking the event loop: uploads that arrive in chunks, look-ups, and a periodic sweep.
folder.py has the promises; this adds threads, limits of running uploads, and the time to live of batch files.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from gateway import tasks
from gateway.config import FileSettings
from gateway.disk import Part
from gateway.errors import FileTooLargeError, QueueFullError, StorageError
from gateway.files.folder import Folder, too_many_bytes
from gateway.types import BATCH_OUTPUT, StoredFile

log = logging.getLogger(__name__)

_T = TypeVar("_T")

BUFFER_BYTES: Final = 1 << 20  # that are written at once
THREADS: Final = 4
RETRY_AFTER_S: Final = 1.0
JSON_LINES: Final = "application/jsonl"


class Upload:
    """An arriving file. `purpose` may be set at any time before `finish`; it decides how large the file may be."""

    def __init__(self, store: FileStore, tenant: str, part: Part, room_bytes: int) -> None:
        self.purpose = ""
        self._store = store
        self._tenant = tenant
        self._part = part
        self._room_bytes = room_bytes
        self._num_bytes = 0
        self._buffer = bytearray()

    def expect(self, num_bytes: int) -> None:
        """At least so many bytes will arrive. Raises FileTooLargeError and QuotaError."""
        settings = self._store.settings
        limit, name = settings.max_file_bytes, "files.max_file_bytes"
        if self.purpose == "batch":
            limit, name = min((settings.max_batch_bytes, "files.max_batch_bytes"), (limit, name))
        if num_bytes > limit:
            raise FileTooLargeError(limit, name)
        if num_bytes > self._room_bytes:
            raise too_many_bytes(settings.max_bytes)

    async def write(self, data: bytes) -> None:
        """Raises FileTooLargeError, QuotaError, StorageFullError and StorageError."""
        self._num_bytes += len(data)
        self.expect(self._num_bytes)
        self._buffer += data
        if len(self._buffer) >= BUFFER_BYTES:
            await self._flush()

    async def finish(self, filename: str, mime_type: str, ttl_s: float | None) -> StoredFile:
        """It is stored when this returns. `ttl_s` None: the time to live of its purpose. Raises as `write`."""
        self.expect(self._num_bytes)
        await self._flush()
        if ttl_s is None and self.purpose == "batch":
            ttl_s = self._store.settings.batch_ttl_s
        folder, part = self._store.folder, self._part
        return await self._store.run(lambda: folder.keep(part, self._tenant, filename, self.purpose, mime_type, ttl_s))

    async def _flush(self) -> None:
        data, self._buffer = bytes(self._buffer), bytearray()
        await self._store.run(lambda: self._part.write(data))


class FileStore:
    """The files of one folder. `start` and `close` in an event loop; without `start` nothing is swept."""

    def __init__(self, folder: Folder, settings: FileSettings) -> None:
        self.folder = folder
        self.settings = settings
        self._uploads: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="files")
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweeps now, and every files.sweep_s."""
        self._sweeping = tasks.spawn(self._sweep_again(), "files sweep")

    async def close(self) -> None:
        """Returns when nothing is written any more."""
        await tasks.cancel(self._sweeping)
        await asyncio.to_thread(self._threads.shutdown)

    @asynccontextmanager
    async def upload(self, tenant: str) -> AsyncIterator[Upload]:
        """What is not finished when the block is left leaves nothing behind. Raises QueueFullError and QuotaError."""
        self._check_uploads(tenant)
        self._uploads[tenant] += 1
        try:
            async with self._part(tenant) as (part, room_bytes):
                yield Upload(self, tenant, part, room_bytes)
        finally:
            self._uploads[tenant] -= 1

    @asynccontextmanager
    async def _part(self, tenant: str) -> AsyncIterator[tuple[Part, int]]:
        part, room_bytes = await self._acquired(
            lambda: self.folder.begin(tenant), undo=lambda begun: begun[0].discard()
        )
        try:
            yield part, room_bytes
        finally:
            await asyncio.shield(self.run(part.discard))

    async def add(
        self,
        tenant: str,
        file_id: str,
        filename: str,
        ttl_s: float | None,
        chunks: AsyncIterator[bytes],
    ) -> StoredFile:
        """Stores results of a batch, JSON lines, as a file of this id. An existing file stays as it is and is returned,
        and one that was deleted stays so: a step that is repeated after a crash adds nothing. `ttl_s` None: that of
        batch files. Raises QuotaError, StorageFullError and StorageError."""
        if (there := await self.find(tenant, file_id)) is not None:
            return there
        ttl_s = self.settings.batch_ttl_s if ttl_s is None else ttl_s
        async with self._part(tenant) as (part, _):
            async for chunk in chunks:
                await self.run(partial(part.write, chunk))
            keep = partial(self.folder.keep, part, tenant, filename, BATCH_OUTPUT, JSON_LINES, ttl_s, file_id=file_id)
            return await self.run(keep)

    async def link(self, tenant: str, file_id: str, path: Path) -> bool:
        """See Folder.link."""
        return await self.run(lambda: self.folder.link(tenant, file_id, path))

    async def all_of(self, tenant: str) -> list[StoredFile]:
        """In the order of creation."""
        return await self.run(lambda: self.folder.all_of(tenant))

    async def find(self, tenant: str, file_id: str) -> StoredFile | None:
        return await self.run(lambda: self.folder.find(tenant, file_id))

    async def delete(self, tenant: str, file_id: str) -> bool:
        """Whether it existed."""
        return await self.run(lambda: self.folder.delete(tenant, file_id))

    @asynccontextmanager
    async def reading(self, tenant: str, file_id: str) -> AsyncIterator[tuple[StoredFile, AsyncIterator[bytes]] | None]:
        """The file and its bytes in chunks; None when there is none."""
        opened = await self._acquired(
            lambda: self.folder.open(tenant, file_id), undo=lambda opened: None if opened is None else opened[1].close()
        )
        if opened is None:
            yield None
            return
        stored, file = opened
        try:
            yield stored, self._chunks(file)
        finally:
            await asyncio.shield(self.run(file.close))

    async def sweep(self) -> int:
        """See Folder.sweep."""
        return await self.run(self.folder.sweep)

    def run(self, blocking: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, blocking)

    def _check_uploads(self, tenant: str) -> None:
        settings = self.settings
        limits = (
            (self._uploads.total(), settings.max_uploads, "at a gateway"),
            (self._uploads[tenant], settings.max_uploads_per_tenant, "of a tenant"),
        )
        for running, limit, scope in limits:
            if running >= limit:
                message = f"Uploads {scope}: {running} are running, which is the limit."
                raise QueueFullError(message, retry_after_s=RETRY_AFTER_S)

    async def _acquired(self, acquire: Callable[[], _T], *, undo: Callable[[_T], None]) -> _T:
        """What `acquire` returns. If the caller was cancelled by then, the thread that acquired it undoes it: `close`
        waits for that, and no new work can be given to threads while it does."""

        def undone(done: Future[_T]) -> None:
            if not done.cancelled() and done.exception() is None:
                undo(done.result())

        future = self._threads.submit(acquire)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(undone)
            raise

    async def _chunks(self, file: BinaryIO) -> AsyncIterator[bytes]:
        while chunk := await self.run(lambda: file.read(BUFFER_BYTES)):
            yield chunk

    async def _sweep_again(self) -> None:
        while not tasks.was_cancelled():
            try:
                if removed := await self.sweep():
                    log.info("%d files and remains of files were removed", removed)
            except StorageError as error:
                log.warning("files were not swept: %s", error)
            await asyncio.sleep(self.settings.sweep_s)
