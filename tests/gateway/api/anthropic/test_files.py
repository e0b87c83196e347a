"""/v1/files through the real anthropic SDK, and the same files through the openai SDK."""

from __future__ import annotations

from pathlib import Path

import anthropic
import pytest

from gateway.config import FileSettings, TenantSettings
from tests.fakes.gateway import running
from tests.fakes.tuned import tuned

SETTINGS = tuned(FileSettings, min_free_bytes=0)


async def test_a_file_goes_round(tmp_path: Path) -> None:
    path = tmp_path / "Prüfung.txt"
    path.write_bytes(b"some text")
    async with running(files=SETTINGS, now=lambda: 1_790_000_000.7) as gateway:
        client = gateway.anthropic()
        made = await client.files.upload(file=path, expires_in_seconds=7200)
        assert (made.type, made.filename, made.size_bytes, made.mime_type) == ("file", path.name, 9, "text/plain")
        assert made.created_at.timestamp() == 1_790_000_000
        assert made.expires_at is not None
        assert made.expires_at.timestamp() == 1_790_007_200
        assert made.downloadable
        assert await client.files.retrieve_metadata(made.id) == made
        assert await (await client.files.download(made.id)).read() == b"some text"
        assert (await client.files.delete(made.id)).type == "file_deleted"
        for call in (client.files.retrieve_metadata, client.files.download, client.files.delete):
            with pytest.raises(anthropic.NotFoundError, match=made.id):
                await call(made.id)


async def test_the_sdk_pages_through_all_files_newest_first() -> None:
    async with running(files=SETTINGS) as gateway:
        client = gateway.anthropic()
        made = [(await client.files.upload(file=b"x")).id for _ in range(5)]
        for limit in (1, 2, 5, 6):
            assert [one.id async for one in client.files.list(limit=limit)] == made[::-1]
        asked = client.files.list(ids=[made[0], made[3], "file_of_nobody"])
        assert [one.id async for one in asked] == [made[3], made[0]]
        for query, wrong in (({"page": "x"}, "page"), ({"limit": "0"}, "limit"), ({"ids": "a", "limit": "1"}, "ids")):
            with pytest.raises(anthropic.BadRequestError, match=f"{wrong}: "):
                await client.files.list(extra_query=query)


async def test_older_sdks_page_with_ids() -> None:
    async with running(files=SETTINGS) as gateway:
        client = gateway.anthropic()
        made = [(await client.files.upload(file=b"x")).id for _ in range(3)]
        for query, ids, more in (
            ({"limit": "2", "after_id": made[2]}, [made[1], made[0]], False),
            ({"limit": "1", "after_id": made[2]}, [made[1]], True),
            ({"limit": "2", "before_id": made[0]}, [made[2], made[1]], False),
        ):
            listed = await client.get("/v1/files", cast_to=object, options={"params": query})
            assert isinstance(listed, dict)
            assert ([one["id"] for one in listed["data"]], listed["has_more"]) == (ids, more)
            assert (listed["first_id"], listed["last_id"]) == (ids[0], ids[-1])


async def test_both_dialects_have_the_same_files_of_the_same_tenant() -> None:
    tenants = (TenantSettings(name="a", keys=("key-of-aaaa",)), TenantSettings(name="b", keys=("key-of-bbbb",)))
    async with running(files=SETTINGS, tenants=tenants) as gateway:
        ours, theirs = gateway.anthropic("key-of-aaaa"), gateway.sdk("key-of-aaaa")
        made = await ours.files.upload(file=b"x")
        (listed,) = (await theirs.files.list()).data
        assert (listed.id, listed.purpose) == (made.id.replace("_", "-"), "user_data")
        assert (await theirs.files.content(made.id)).content == b"x"
        batch = await theirs.files.create(file=b"y", purpose="batch")
        assert await (await ours.files.download(batch.id)).read() == b"y"
        with pytest.raises(anthropic.NotFoundError):
            await gateway.anthropic("key-of-bbbb").files.retrieve_metadata(made.id)


@pytest.mark.parametrize("seconds", [3599, 7_776_001])
async def test_a_time_to_live_out_of_range_is_refused(seconds: int) -> None:
    async with running(files=SETTINGS) as gateway:
        with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds: "):
            await gateway.anthropic().files.upload(file=b"x", expires_in_seconds=seconds)
        assert (await gateway.anthropic().files.list()).data == []


async def test_a_file_that_is_too_large_is_too_large_for_the_sdk() -> None:
    async with running(files=tuned(FileSettings, min_free_bytes=0, max_file_bytes=10)) as gateway:
        with pytest.raises(anthropic.APIStatusError) as refused:
            await gateway.anthropic().files.upload(file=b"x" * 11)
        assert refused.value.status_code == 413
        assert refused.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
