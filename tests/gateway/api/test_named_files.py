"""Uploaded files in requests that are translated: each client's SDK uploads one and names it, and the upstream gets its
bytes; other tenants' files are not there."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import orjson
import pytest
from google.genai import errors, types

from gateway.api.lines import LineRequest
from gateway.api.routes import RUNNER
from gateway.types import ANONYMOUS, Tenant
from tests.fakes.client_fields import result_with, with_parts
from tests.fakes.gemini import gemini
from tests.fakes.hosted import answers
from tests.fakes.upstream import StubUpstream, upstream
from tests.fakes.whole import Whole, whole

PNG = b"\x89PNG\r\n\x1a\n\xfb\xff\xbe"
PDF = b"%PDF-1.7\n\xff"


@asynccontextmanager
async def gateway(dialect: str, **sections: Any) -> AsyncIterator[tuple[Whole, StubUpstream]]:
    async with upstream(*[answers(dialect, ["Seen."], stream=False)] * 4) as stub:
        table = stub.settings(retries=0, dialect=dialect).model_dump(exclude={"key"}) | {"key": "sk-upstream"}
        async with whole(engines=0, sections={"upstreams": [table], **sections}) as running:
            yield running, stub


def sent(stub: StubUpstream) -> str:
    return orjson.dumps(stub.got[-1].json).decode()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_files_of_openais_clients_go_with_the_request() -> None:
    async with (
        gateway("anthropic") as (running, stub),
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as sdk,
    ):
        image = await sdk.files.create(file=("a.png", PNG), purpose="vision")
        paper = await sdk.files.create(file=("a.pdf", PDF), purpose="user_data")
        chat: Any = with_parts("openai", {"type": "file", "file": {"file_id": paper.id}})
        answer = await sdk.chat.completions.create(model="up-1", **chat)
        assert answer.choices[0].message.content == "Seen."
        (block,) = stub.got[-1].json["messages"][0]["content"]
        source = {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)}
        assert block == {"type": "document", "title": "a.pdf", "source": source}
        line = LineRequest("/v1/chat/completions", Tenant(ANONYMOUS), {"model": "up-1", **chat})
        assert (await running.app[RUNNER].answer(line)).status == 200
        assert stub.got[-1].json["messages"][0]["content"] == [block]
        item: Any = result_with("responses", {"type": "input_image", "file_id": image.id, "detail": "auto"})
        first = await sdk.responses.create(model="up-1", **item)
        assert (first.output_text, encoded(PNG) in sent(stub)) == ("Seen.", True)
        kept = await sdk.responses.input_items.list(first.id)  # by its id, and not with its bytes
        assert image.id in str(kept)
        await sdk.responses.create(model="up-1", previous_response_id=first.id, input="Again?")
        assert encoded(PNG) in sent(stub)


async def test_files_of_anthropics_clients_go_with_the_request() -> None:
    async with (
        gateway("gemini") as (running, stub),
        anthropic.AsyncAnthropic(base_url=running.url, api_key="none", max_retries=0) as sdk,
    ):
        image = await sdk.beta.files.upload(file=("a.png", PNG, "image/png"))
        notes = await sdk.beta.files.upload(file=("a.txt", "Åse.".encode(), "text/plain"))
        parts: Any = with_parts(
            "anthropic",
            {"type": "image", "source": {"type": "file", "file_id": image.id}},
            {"type": "document", "title": "Notes", "source": {"type": "file", "file_id": notes.id}},
        )
        answer = await sdk.messages.create(model="up-1", max_tokens=9, **parts)
        assert answer.content[0].type == "text"
        assert stub.got[-1].json["contents"][0]["parts"] == [
            {"inlineData": {"mimeType": "image/png", "data": encoded(PNG)}},
            {"text": "Notes\nÅse."},
        ]


async def test_files_and_addresses_of_geminis_clients_go_with_the_request() -> None:
    async with gateway("openai") as (running, stub):
        sdk = gemini(running.url)
        image = await sdk.aio.files.upload(file=io.BytesIO(PNG), config=types.UploadFileConfig(mime_type="image/png"))
        notes = await sdk.aio.files.upload(file=io.BytesIO(b"Ash."), config=types.UploadFileConfig(mime_type="a/b"))
        elsewhere = types.Part.from_uri(file_uri="https://example.org/b.png", mime_type="image/png")
        answer = await sdk.aio.models.generate_content(model="up-1", contents=[image, notes, elsewhere])
        assert answer.text == "Seen."
        assert stub.got[-1].json["messages"][0]["content"] == [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(PNG)}"}},
            {"type": "text", "text": "Ash."},
            {"type": "image_url", "image_url": {"url": "https://example.org/b.png"}},
        ]
        with pytest.raises(errors.ClientError, match=r"contents\[0\].parts\[0\].fileData"):
            part = types.Part.from_uri(file_uri="gs://bucket/b.png", mime_type="image/png")
            await sdk.aio.models.generate_content(model="up-1", contents=[part])
        await sdk.aio.aclose()
        sdk.close()


async def test_files_of_other_tenants_are_not_there() -> None:
    tenants = [{"name": "north", "keys": ["sk-north"]}, {"name": "south", "keys": ["sk-south"]}]
    async with gateway("anthropic", tenants=tenants) as (running, stub):
        options: Any = {"base_url": f"{running.url}/v1", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(api_key="sk-north", **options) as north,
            openai.AsyncOpenAI(api_key="sk-south", **options) as south,
        ):
            paper = await north.files.create(file=("a.pdf", PDF), purpose="user_data")
            part: Any = with_parts("openai", {"type": "file", "file": {"file_id": paper.id}})
            with pytest.raises(openai.NotFoundError, match="No such File object") as refused:
                await south.chat.completions.create(model="up-1", **part)
            assert refused.value.param == "messages[0].content[0].file.file_id"
            await north.chat.completions.create(model="up-1", **part)
    assert len(stub.got) == 1
