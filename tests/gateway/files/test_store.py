"""Uploads that arrive piece by piece: limits, what is given up, and the sweep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.config import FileSettings
from gateway.disk import Part
from gateway.errors import FileTooLargeError, QueueFullError, QuotaError
from gateway.files.folder import Folder
from gateway.files.store import BUFFER_BYTES, FileStore
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

NOW_S = 1_790_000_000.0


@asynccontextmanager
async def made(root: Path, now_s: list[float] | None = None, **limits: float) -> AsyncIterator[FileStore]:
    settings = tuned(FileSettings, **{"min_free_bytes": 0, **limits})
    store = FileStore(Folder(root, settings, lambda: (now_s or [NOW_S])[0]), settings)
    try:
        yield store
    finally:
        await store.close()


def names(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()} - {"lock"}


async def put(store: FileStore, data: bytes, purpose: str = "user_data", ttl_s: float | None = None) -> str:
    async with store.upload("a") as upload:
        upload.purpose = purpose
        await upload.write(data)
        return (await upload.finish("x", "", ttl_s)).id


async def test_pieces_of_any_size_come_back_in_order(tmp_path: Path) -> None:
    pieces = [bytes([number]) * size for number, size in enumerate((1, 0, BUFFER_BYTES, 7, 3 * BUFFER_BYTES + 1))]
    async with made(tmp_path) as store:
        async with store.upload("a") as upload:
            for piece in pieces:
                await upload.write(piece)
            stored = await upload.finish("x", "", None)
        async with store.reading("a", stored.id) as found:
            assert found is not None
            assert b"".join([piece async for piece in found[1]]) == b"".join(pieces)
        async with store.reading("a", "0" * 32) as nothing:
            assert nothing is None


async def test_batch_files_are_kept_for_as_long_as_the_settings_say_and_others_for_ever(tmp_path: Path) -> None:
    async with made(tmp_path, batch_ttl_s=100.0) as store:
        for purpose, ttl_s in (("batch", None), ("user_data", None), ("batch", 5000.0)):
            await put(store, b"x", purpose, ttl_s)
        assert [stored.expires_s for stored in await store.all_of("a")] == [NOW_S + 100, None, NOW_S + 5000]


@pytest.mark.parametrize(("purpose", "largest"), [("batch", 50), ("vision", 80)])
async def test_a_file_may_be_as_large_as_its_purpose_says_and_not_a_byte_larger(
    tmp_path: Path, purpose: str, largest: int
) -> None:
    async with made(tmp_path, max_file_bytes=80, max_batch_bytes=50) as store:
        await put(store, b"x" * largest, purpose)
        before = names(tmp_path)
        with pytest.raises(FileTooLargeError):
            await put(store, b"x" * (largest + 1), purpose)
        async with store.upload("a") as upload:  # the purpose may come last
            await upload.write(b"x" * 51)
            upload.purpose = "batch"
            with pytest.raises(FileTooLargeError, match=r"files\.max_batch_bytes"):
                await upload.finish("x", "", None)
            with pytest.raises(FileTooLargeError, match="50"):
                upload.expect(51)
    assert names(tmp_path) == before


async def test_an_upload_past_the_quota_ends_when_it_is_and_not_when_all_has_come(tmp_path: Path) -> None:
    async with made(tmp_path, max_bytes=100) as store:
        await put(store, b"x" * 90)
        async with store.upload("a") as upload:
            await upload.write(b"x" * 10)
            with pytest.raises(QuotaError):
                await upload.write(b"x")
    assert len(names(tmp_path)) == 2


async def test_so_many_uploads_run_at_a_time_and_each_gives_its_place_back(tmp_path: Path) -> None:
    async with made(tmp_path, max_uploads=2, max_uploads_per_tenant=1) as store:
        async with store.upload("a"):
            with pytest.raises(QueueFullError, match="Uploads of a tenant: 1"):
                await put(store, b"x")
            async with store.upload("b"):
                with pytest.raises(QueueFullError, match="Uploads at a gateway: 2"):
                    async with store.upload("c"):
                        pass
        await put(store, b"x")


async def test_an_upload_that_is_cancelled_at_any_point_leaves_nothing(tmp_path: Path) -> None:
    async with made(tmp_path) as store:
        for steps in range(12):

            async def upload_large(begun: asyncio.Event) -> None:
                async with store.upload("a") as upload:
                    begun.set()
                    for _ in range(3):
                        await upload.write(b"x" * BUFFER_BYTES)
                    await asyncio.Event().wait()

            begun = asyncio.Event()
            task = asyncio.ensure_future(upload_large(begun))
            for _ in range(steps):
                await asyncio.sleep(0)
            if steps % 3 == 2:
                await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert names(tmp_path) == set()


async def test_nothing_is_left_of_an_upload_whose_beginning_outlives_it_and_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that makes the part is held; the upload is cancelled; the store closes; the thread goes on."""
    beginning, may_begin = threading.Event(), threading.Event()
    real = Folder.begin

    def held(folder: Folder, tenant: str) -> tuple[Part, int]:
        beginning.set()
        may_begin.wait(5)
        return real(folder, tenant)

    async def upload_one() -> None:
        async with store.upload("a"):
            pass

    monkeypatch.setattr(Folder, "begin", held)
    async with made(tmp_path) as store:
        task = asyncio.ensure_future(upload_one())
        await asyncio.to_thread(beginning.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closing = asyncio.ensure_future(store.close())
        await until(lambda: store._threads._shutdown)
        may_begin.set()
        await closing
    assert names(tmp_path) == set()


async def test_nothing_is_left_when_a_write_is_still_running_as_its_upload_ends(tmp_path: Path) -> None:
    """The thread that writes is held; the upload is cancelled; the thread goes on."""
    async with made(tmp_path) as store:
        writing, may_write = threading.Event(), threading.Event()

        async def upload_one() -> None:
            async with store.upload("a") as upload:
                part = upload._part
                real = part.write

                def held(data: bytes) -> None:
                    writing.set()
                    may_write.wait(5)
                    real(data)

                part.write = held  # type: ignore[method-assign]
                await upload.write(b"x" * BUFFER_BYTES)

        task = asyncio.ensure_future(upload_one())
        await asyncio.to_thread(writing.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_write.set()
    assert names(tmp_path) == set()


async def test_files_that_are_over_are_swept_at_the_start_and_again(tmp_path: Path) -> None:
    now_s = [NOW_S]
    async with made(tmp_path, now_s, sweep_s=0.01) as store:
        await put(store, b"x", ttl_s=10)
        await put(store, b"x", ttl_s=20)
        now_s[0] += 10
        store.start()
        await until(lambda: len(names(tmp_path)) == 2)
        now_s[0] += 10
        await until(lambda: names(tmp_path) == set())
