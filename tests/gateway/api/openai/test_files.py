"""/v1/files through the real openai SDK."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.openai.files import page
from gateway.config import FileSettings, TenantSettings
from gateway.types import StoredFile
from tests.fakes.gateway import Gateway, running
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

TENANTS = (TenantSettings(name="a", keys=("key-of-aaaa",)), TenantSettings(name="b", keys=("key-of-bbbb",)))
DAY_S = 86_400


def settings(**limits: Any) -> FileSettings:
    return tuned(FileSettings, **{"min_free_bytes": 0, **limits})


def upload(gateway: Gateway, data: Any = b"x", purpose: Any = "batch", key: str = "none", **more: Any) -> Any:
    return gateway.sdk(key).files.create(file=data, purpose=purpose, **more)


async def test_a_file_goes_round_with_path_bytes_and_stream(tmp_path: Path) -> None:
    path = tmp_path / 'Prüf"ung 日本; 1.jsonl'
    path.write_bytes(b'{"a": 1}\n')
    async with running(files=settings(), now=lambda: 1_790_000_000.7) as gateway:
        client = gateway.sdk()
        for data, name in (
            (path, path.name),
            (b'{"a": 1}\n', "upload"),
            (("a.txt", io.BytesIO(b'{"a": 1}\n')), "a.txt"),
        ):
            made = await upload(gateway, data)
            assert (made.object, made.bytes, made.filename, made.purpose) == ("file", 9, name, "batch")
            assert (made.status, made.status_details, made.created_at) == ("processed", None, 1_790_000_000)
            assert made.expires_at == made.created_at + 30 * DAY_S
            assert await client.files.retrieve(made.id) == made
            assert (await client.files.content(made.id)).content == b'{"a": 1}\n'
            deleted = await client.files.delete(made.id)
            assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "file", True)
            for call in (client.files.retrieve, client.files.content, client.files.delete):
                with pytest.raises(openai.NotFoundError, match=made.id):
                    await call(made.id)
        assert (await client.files.list()).data == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b.jsonl", "..", 'say "hi".txt', r"C:\x.txt", "x" * 300, "/"])
async def test_a_name_is_data(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    async with running(files=settings(folder=folder)) as gateway:
        made = await upload(gateway, (name, b"{}"))
        assert made.filename == name
        assert (await gateway.sdk().files.retrieve(made.id)).filename == name
        assert (await gateway.sdk().files.content(made.id)).content == b"{}"
    assert os.listdir(tmp_path) == ["files"]


async def test_a_time_to_live_is_the_clients_or_that_of_the_purpose() -> None:
    now_s = [1_790_000_000.0]
    async with running(files=settings(), now=lambda: now_s[0]) as gateway:
        client = gateway.sdk()
        short = await upload(gateway, expires_after={"anchor": "created_at", "seconds": 3600})
        kept = await upload(gateway, purpose="user_data")
        assert (short.expires_at, kept.expires_at) == (1_790_003_600, None)
        now_s[0] += 3600
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(short.id)
        assert [one.id async for one in client.files.list()] == [kept.id]


async def test_the_sdk_pages_through_all_files_in_either_order() -> None:
    async with running(files=settings()) as gateway:
        client = gateway.sdk()
        made = [(await upload(gateway, purpose="vision" if number == 2 else "batch")).id for number in range(5)]
        for limit in (1, 2, 5, 6):
            assert [one.id async for one in client.files.list(limit=limit)] == made[::-1]
            assert [one.id async for one in client.files.list(limit=limit, order="asc")] == made
        assert [one.id async for one in client.files.list(purpose="batch", limit=2, order="asc")] == made[:2] + made[3:]
        first = await client.files.list(limit=2)
        assert first.has_more
        assert (first.first_id, first.last_id) == (made[4], made[3])  # type: ignore[attr-defined]
        assert not (await client.files.list(limit=5)).has_more
        await client.files.delete(made[3])
        assert [one.id async for one in client.files.list(after=made[3])] == made[2::-1], "it was there"
        with pytest.raises(openai.NotFoundError):
            await client.files.list(after="file_of_nobody"[:4])


async def test_another_tenants_file_is_a_file_that_is_not_there() -> None:
    async with running(files=settings(), tenants=TENANTS) as gateway:
        made = await upload(gateway, key="key-of-aaaa")
        other = gateway.sdk("key-of-bbbb")
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        assert (await other.files.list()).data == []
        with pytest.raises(openai.AuthenticationError):
            await upload(gateway, key="key-of-cccc")
        assert (await gateway.sdk("key-of-aaaa").files.content(made.id)).content == b"x"


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"purpose": "batch_output"}, "purpose", "invalid_value"),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 3599}},
            "expires_after[seconds]",
            "integer_below_min_value",
        ),
        (
            {"expires_after": {"anchor": "created_at", "seconds": 2_592_001}},
            "expires_after[seconds]",
            "integer_above_max_value",
        ),
        ({"expires_after": {"anchor": "now", "seconds": 3600}}, "expires_after[anchor]", "invalid_value"),
        ({"expires_after": {"seconds": 3600}}, "expires_after[anchor]", "missing_required_parameter"),
        ({"expires_after": {"anchor": "created_at"}}, "expires_after[seconds]", "missing_required_parameter"),
        ({"extra_body": {"expires_after[ancor]": "x"}}, "expires_after[ancor]", "unknown_parameter"),
    ],
)
async def test_a_wrong_field_is_refused_with_its_name_and_nothing_is_kept(
    options: dict[str, Any], param: str, code: str
) -> None:
    async with running(files=settings()) as gateway:
        with pytest.raises(openai.BadRequestError) as refused:
            await upload(gateway, **options)
        assert (refused.value.param, refused.value.code) == (param, code)
        assert (await gateway.sdk().files.list()).data == []


async def test_what_is_too_large_is_413_and_what_there_is_no_room_for_says_so() -> None:
    async with running(files=settings(max_file_bytes=3000, max_batch_bytes=2000, max_bytes=4000)) as gateway:
        for data, purpose in ((b"x" * 3001, "vision"), (b"x" * 2001, "batch"), (b"x" * 400_000, "vision")):
            with pytest.raises(openai.APIStatusError) as large:
                await upload(gateway, data, purpose)
            assert (large.value.status_code, large.value.param) == (413, "file")
        await upload(gateway, b"x" * 3000, "vision")
        with pytest.raises(openai.RateLimitError, match=r"files\.max_bytes") as quota:
            await upload(gateway, b"x" * 1001)
        assert quota.value.code == "quota_exceeded"
        assert quota.value.response.headers["x-should-retry"] == "false"
        assert len((await gateway.sdk().files.list()).data) == 1
    async with running(files=settings(min_free_bytes=1 << 60)) as gateway:
        with pytest.raises(openai.InternalServerError, match="no room") as full:
            await upload(gateway)
        assert (full.value.status_code, full.value.code) == (507, "storage_full")
        assert full.value.response.headers["x-should-retry"] == "false"
        with pytest.raises(Exception, match="no room"):
            await gateway.anthropic().files.upload(file=b"x")


async def test_bytes_come_as_a_download_that_no_browser_runs() -> None:
    async with running(files=settings()) as gateway:
        made = await upload(gateway, ("ü.html", b"<script>", "text/html"))
        status, text, headers = await gateway.get(f"/v1/files/{made.id}/content")
    assert (status, text, headers["Content-Length"]) == (200, "<script>", "8")
    assert headers["Content-Type"] == "application/octet-stream"
    assert headers["Content-Disposition"] == "attachment; filename*=UTF-8''%C3%BC.html"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["x-request-id"]


async def test_a_file_that_cannot_be_sent_to_its_end_is_cut_off_and_never_looks_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(files=settings(folder=tmp_path)) as gateway:
        made = await upload(gateway, b"x" * 1000)
        data = tmp_path / "anonymous" / f"{made.id.removeprefix('file-')}.data"
        data.write_bytes(b"x" * 10)
        with pytest.raises(openai.APIConnectionError):
            await gateway.sdk().files.content(made.id)
        data.write_bytes(b"x" * 2000)
        assert (await gateway.sdk().files.content(made.id)).content == b"x" * 1000
    assert "it has become shorter" in caplog.text


async def test_a_client_that_does_not_read_its_file_does_not_hold_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.api.uploads.CHUNK_TIMEOUT_S", 0.05)
    async with running(files=settings(folder=tmp_path)) as gateway:
        made = await upload(gateway, b"x" * (24 << 20))
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
        writer.write(f"GET /v1/files/{made.id}/content HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await until(lambda: "does not read" in caplog.text)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(24 << 20)
        writer.close()


async def has_place(gateway: Gateway) -> bool:
    """Whether one more file may be sent now. The one that shows it is deleted."""
    try:
        made = await upload(gateway)
    except openai.RateLimitError:
        return False
    await gateway.sdk().files.delete(made.id)
    return True


async def test_an_upload_that_is_cut_off_leaves_nothing() -> None:
    """The client leaves in the middle; the next request of the same tenant finds no trace."""
    async with running(files=settings(max_uploads=1)) as gateway:
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n"
        head += b"Content-Type: multipart/form-data; boundary=b\r\n"
        part = b'\r\n--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nhalf of'
        writer.write(head + part)
        await writer.drain()

        async def has_begun() -> bool:
            return not await has_place(gateway)

        await until(has_begun)
        writer.close()
        await writer.wait_closed()
        await until(lambda: has_place(gateway))
        made = await upload(gateway)
        assert [one.id async for one in gateway.sdk().files.list()] == [made.id]


def stored(number: int, purpose: str) -> StoredFile:
    return StoredFile(f"{number:032x}", "x", purpose, "", 0, 0.0, None)


@given(
    purposes=st.lists(st.sampled_from(("batch", "vision")), max_size=12),
    limit=st.integers(1, 5),
    order=st.sampled_from(("asc", "desc", None)),
    purpose=st.sampled_from(("batch", None)),
)
def test_pages_put_together_are_the_whole_list(
    purposes: list[str], limit: int, order: str | None, purpose: str | None
) -> None:
    files = [stored(number, one) for number, one in enumerate(purposes)]
    wanted = {"limit": str(limit), **({"order": order} if order else {}), **({"purpose": purpose} if purpose else {})}
    seen: list[str] = []
    has_more = True
    while has_more:
        told = page(files, {**wanted, **({"after": seen[-1]} if seen else {})})
        has_more = told["has_more"]
        assert len(told["data"]) == limit or not has_more
        seen += [one["id"] for one in told["data"]]
    whole = [f"file-{one.id}" for one in files if purpose in (None, one.purpose)]
    assert seen == (whole if order == "asc" else whole[::-1])
