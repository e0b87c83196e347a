"""/v1beta/files with the real google-genai SDK, and contents that refer to files."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.genai import errors, types

from gateway.api.gemini import files as uploads
from gateway.config import FileSettings, TenantSettings
from gateway.types import ChatPrompt
from tests.fakes.gateway import Gateway, running
from tests.fakes.gemini import gemini
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

TENANTS = tuple(TenantSettings(name=name, keys=(f"{name}-key-1",)) for name in ("north", "south"))
PATH = "/upload/v1beta/files"
START = {"X-Goog-Upload-Protocol": "resumable", "X-Goog-Upload-Command": "start"}
NOTES = "Die Brücke öffnet um 9 Uhr.\n"


def limits(**more: Any) -> FileSettings:
    return tuned(FileSettings, **{"min_free_bytes": 0, **more})


@asynccontextmanager
async def sdk(gateway: Gateway, key: str = "none-none", **options: Any) -> AsyncIterator[Any]:
    made = gemini(gateway.url, key, **options)
    try:
        yield made.aio
    finally:
        await made.aio.aclose()
        made.close()


def notes(data: bytes = NOTES.encode()) -> io.BytesIO:
    return io.BytesIO(data)


def as_text(name: str = "notes.txt") -> types.UploadFileConfig:
    return types.UploadFileConfig(display_name=name, mime_type="text/plain")


@pytest.mark.parametrize("version", ["v1", "v1beta"])
async def test_a_file_goes_round_and_is_listed_on_both_versions(version: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(NOTES.encode())
    async with (
        running(files=limits(), tenants=TENANTS) as gateway,
        sdk(gateway, "north-key-1", api_version=version) as north,
    ):
        made = await north.files.upload(file=path, config={"display_name": "../my notes"})
        assert (made.display_name, made.mime_type, made.size_bytes) == (
            "../my notes",
            "text/plain",
            len(NOTES.encode()),
        )
        assert (made.state, made.source) == (types.FileState.ACTIVE, types.FileSource.UPLOADED)
        assert (made.expiration_time - made.create_time).total_seconds() == uploads.TTL_S
        assert await north.files.get(name=made.name) == made
        assert [one async for one in await north.files.list()] == [made]
        async with sdk(gateway, "south-key-1", api_version=version) as south:
            assert [one async for one in await south.files.list()] == []
            with pytest.raises(errors.ClientError, match="File not found"):
                await south.files.get(name=made.name)
        openai_ids = [one.id for one in (await gateway.sdk("north-key-1").files.list()).data]
        assert openai_ids == ["file-" + made.name.removeprefix("files/")]
        await north.files.delete(name=made.name)
        with pytest.raises(errors.ClientError, match="File not found"):
            await north.files.delete(name=made.name)


async def test_a_large_file_comes_in_several_requests() -> None:
    data = bytes(range(256)) * 36_000  # 9 MiB: the SDK sends 8 at a time
    async with running(files=limits()) as gateway:
        client = gemini(gateway.url)
        made = await asyncio.to_thread(client.files.upload, file=notes(data), config=as_text("big"))
        client.close()
        assert made.size_bytes == len(data)
        (listed,) = (await gateway.sdk().files.list()).data
        assert (await gateway.sdk().files.content(listed.id)).content == data


async def test_pages_of_files() -> None:
    async with running(files=limits()) as gateway, sdk(gateway) as client:
        made = [await client.files.upload(file=notes(), config=as_text(str(number))) for number in range(3)]
        pager = await client.files.list(config={"page_size": 2})
        assert [one.name async for one in pager] == [one.name for one in made]


async def begin(gateway: Gateway, **headers: str) -> str:
    async with gateway.session.post(gateway.url + PATH, json={"file": {}}, headers=START | headers) as answer:
        assert (answer.status, answer.headers["X-Goog-Upload-Status"]) == (200, "active")
        assert await answer.json() == {}
        return answer.headers["X-Goog-Upload-URL"]


async def send(gateway: Gateway, url: str, command: str, data: bytes = b"", offset: int = 0) -> tuple[int, Any, str]:
    headers = {"X-Goog-Upload-Command": command, "X-Goog-Upload-Offset": str(offset)}
    async with gateway.session.post(url, data=data, headers=headers) as answer:
        return answer.status, await answer.json(), answer.headers.get("X-Goog-Upload-Status", "")


async def test_the_resumable_protocol_step_by_step() -> None:
    async with running(files=limits(), tenants=TENANTS) as gateway:
        url = await begin(gateway, **{"x-goog-api-key": "north-key-1"})
        assert url.startswith(gateway.url)
        assert await send(gateway, url, "upload", b"ab") == (200, {}, "active")
        assert (await send(gateway, url, "delete"))[0] == 400
        status, body, _ = await send(gateway, url, "upload, finalize", b"cd", offset=3)
        assert (status, body["error"]["status"]) == (400, "INVALID_ARGUMENT")
        status, body, final = await send(gateway, url, "upload, finalize", b"cd", offset=2)
        assert (status, final, body["file"]["sizeBytes"]) == (200, "final", "4")
        assert (await send(gateway, url, "upload"))[0] == 404
        assert (await send(gateway, f"{gateway.url}{PATH}?upload_id=guess", "upload"))[0] == 404
        async with gateway.session.post(gateway.url + PATH, json={}, headers=START) as refused:
            assert refused.status == 401


async def test_an_upload_that_is_complete_or_idle_holds_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(files=limits(max_uploads=1)) as gateway:
        url = await begin(gateway)
        async with gateway.session.post(gateway.url + PATH, json={}, headers=START) as refused:
            assert refused.status == 429
        assert (await send(gateway, url, "upload, finalize"))[2] == "final"
        monkeypatch.setattr(uploads, "IDLE_S", 0.0)
        url = await begin(gateway)

        async def has_room() -> bool:
            async with gateway.session.post(gateway.url + PATH, json={}, headers=START) as answer:
                return answer.status == 200

        await until(has_room)
        assert (await send(gateway, url, "upload"))[0] == 404


async def test_a_file_over_the_limit_is_refused_before_its_bytes_come() -> None:
    async with running(files=limits(max_file_bytes=10)) as gateway, sdk(gateway) as client:
        with pytest.raises(errors.ClientError) as refused:
            await client.files.upload(file=notes(b"x" * 11), config=as_text())
        assert refused.value.code == 413


async def test_a_text_file_in_contents_is_its_text() -> None:
    async with running(files=limits(), tenants=TENANTS) as gateway, sdk(gateway, "north-key-1") as client:
        made = await client.files.upload(file=notes(), config=as_text())
        await client.models.generate_content(model="demo", contents=[made, "When does it open?"])
        prompt = gateway.pipeline.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages == [{"role": "user", "content": NOTES + "When does it open?"}]
        assert (await client.models.count_tokens(model="demo", contents=[made])).total_tokens == 40
        async with sdk(gateway, "south-key-1") as south:
            with pytest.raises(errors.ClientError, match="File not found"):
                await south.models.generate_content(model="demo", contents=[made])


@pytest.mark.parametrize(
    ("uri", "words"),
    [("https://example.com/a.pdf", "nothing is fetched"), ("gs://bucket/a", "nothing is fetched"), ("", "nothing is")],
)
async def test_what_was_not_uploaded_here_is_not_fetched(uri: str, words: str) -> None:
    async with running() as gateway, sdk(gateway) as client:
        part = {"file_data": {"file_uri": uri, "mime_type": "text/plain"}}
        with pytest.raises(errors.ClientError, match=words) as refused:
            await client.models.generate_content(model="demo", contents=[{"role": "user", "parts": [part]}])
        assert refused.value.code == 400


async def test_a_file_that_is_no_text_is_a_clear_400() -> None:
    async with running(files=limits()) as gateway, sdk(gateway) as client:
        for data in (b"\x89PNG\r\n\x1a\n\xff", b"a\0b"):
            config = types.UploadFileConfig(mime_type="image/png")
            made = await client.files.upload(file=notes(data), config=config)
            with pytest.raises(errors.ClientError, match=r"contents\[0\].*image/png.* no text"):
                await client.models.generate_content(model="demo", contents=[made])
        assert not gateway.pipeline.requests
