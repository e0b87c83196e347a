"""A gateway's OpenAI API, as far as batches need it, its purge and its replicas. Files are streamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import quote

import aiohttp
import orjson
from aiohttp.payload import BufferedReaderPayload

CHUNK_BYTES: Final = 1 << 20
CONNECT_TIMEOUT_S: Final = 10.0
READ_TIMEOUT_S: Final = 120.0
FAILED: Final = 1
BAD_INPUT: Final = 2


class BatchCommandError(Exception):
    """The message for the user, and the exit status of the process."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class PassingError(BatchCommandError):
    """A retry may succeed."""


def opened(path: Path, mode: str) -> BinaryIO:
    """Raises BatchCommandError."""
    try:
        return path.open(mode)  # type: ignore[return-value]
    except OSError as error:
        raise BatchCommandError(f"{path}: {error.strerror}", BAD_INPUT) from error


class Client:
    """Everything raises BatchCommandError with the gateway's message."""

    def __init__(self, url: str, key: str) -> None:
        """`url` with or without `/v1`."""
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def upload(self, path: Path) -> str:
        """The id of the file."""
        with opened(path, "rb") as file:
            form = aiohttp.FormData(default_to_multipart=True, quote_fields=False)
            form.add_field("purpose", "batch")
            name = os.fsencode(path.name).decode(errors="replace")
            rows = BufferedReaderPayload(file, filename=name)  # by default the path, which may be no text
            form.add_field("file", rows, filename=name, content_type="application/octet-stream")
            return str((await self._json("POST", "/v1/files", data=form))["id"])

    async def create(self, file_id: str, endpoint: str) -> dict[str, Any]:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return await self._json("POST", "/v1/batches", json=body)

    async def batch(self, batch_id: str) -> dict[str, Any]:
        return await self._json("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        return await self._json("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    async def batches(self) -> AsyncIterator[dict[str, Any]]:
        """Newest first."""
        params = {"limit": "100"}
        while True:
            page = await self._json("GET", "/v1/batches", params=params)
            for batch in page["data"]:
                yield batch
            if not page["has_more"]:
                return
            params["after"] = page["last_id"]

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        async with self._response("GET", f"/v1/files/{file_id}/content") as answer:
            async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                yield chunk

    async def purge(self, chosen: dict[str, str]) -> dict[str, Any]:
        """What was removed, by engine. An incomplete purge has status 502 with the same figures."""
        return await self._json("POST", "/admin/cache/blocks/purge", takes=502, json=chosen)

    async def explain(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Why a request missed. What cannot be compared is BAD_INPUT."""
        answer = await self._json("POST", "/admin/explain", takes=400, json=asked)
        if "error" in answer:
            raise BatchCommandError(answer["error"]["message"], BAD_INPUT)
        return answer

    async def reload(self) -> dict[str, Any]:
        """What was changed. Settings that cannot be used are BAD_INPUT, as at the start of a gateway."""
        answer = await self._json("POST", "/admin/reload", takes=400)
        if "error" in answer:
            raise BatchCommandError(answer["error"]["message"], BAD_INPUT)
        return answer

    async def overview(self, span: str) -> dict[str, Any]:
        """Raises BatchCommandError also for what is no overview."""
        answer = await self._json("GET", "/admin/overview", params={"span": span})
        if "totals" not in answer:
            raise BatchCommandError("what answered has no overview")
        return answer

    async def replicas(self, method: str, path: str = "", **options: Any) -> dict[str, Any]:
        """What the gateway answers about its replicas, or to a change of them."""
        return await self._json(method, f"/admin/replicas{path}", **options)

    async def _json(self, method: str, path: str, takes: int | None = None, **options: Any) -> dict[str, Any]:
        async with self._response(method, path, takes, **options) as answer:
            value: dict[str, Any] = await answer.json()
            return value

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, path: str, takes: int | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """`takes`: a status that is no error where the answer is JSON."""
        try:
            async with self._session.request(method, self._url + path, **options) as answer:
                if answer.status >= 400 and (answer.status != takes or answer.content_type != "application/json"):
                    kind = PassingError if answer.status in (429, 502, 503, 504) else BatchCommandError
                    raise kind(await _why(answer))
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PassingError(f"no answer from {self._url}: {error or type(error).__name__}") from error


async def _why(answer: aiohttp.ClientResponse) -> str:
    try:
        return str(orjson.loads(await answer.read())["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"{answer.url} answered with status {answer.status}"
