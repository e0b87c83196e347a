"""/v1beta/files of the Gemini API, over the same files as those of the other APIs, and the texts of files in contents.

    POST /upload/v1beta/files               a description; the answer's x-goog-upload-url says where the bytes go
    POST /upload/v1beta/files?upload_id=ID  bytes, the last ones with the command `finalize`

That is Google's resumable upload. Whoever has its ID may write to it, as upstream: the SDK sends no key with it. An
upload is known to one gateway only.
"""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from gateway import tasks
from gateway.api.body import BodyLimit, body_chunks
from gateway.api.dialect import BYTES, Route
from gateway.api.fields import anything, invalid, no_effect, refused, shown, table, text, used
from gateway.api.gemini.proto import message, read, under
from gateway.api.gemini.wire import PAGE, page, timestamp
from gateway.api.named_files import NamedFiles, text_of, type_of
from gateway.api.record import BODY, RECORD, TENANT, Record
from gateway.api.replies import reply_json
from gateway.api.uploads import PURPOSE, UNNAMED
from gateway.errors import BadRequestError, NotFoundError, UnsupportedError
from gateway.files.store import FileStore, Upload
from gateway.tasks import off_loop
from gateway.types import StoredFile, Tenant

VERSIONS: Final = ("v1", "v1beta")
TTL_S: Final = 48 * 3600.0
"""As upstream: its clients rely on files going away by themselves."""

IDLE_S: Final = 60.0
"""Until an upload whose next bytes do not arrive is dropped; it holds one of files.max_uploads."""

_NO_LIMIT: Final = BodyLimit(1 << 62, "files.max_file_bytes")  # the store counts the bytes of a whole file
_COMMANDS: Final = frozenset(("upload", "finalize"))
_URI: Final = re.compile(r"(?:https?://[^/?#]+/v1(?:beta)?/)?files/([0-9a-f]{32})")
_string = text()

FILE: Final = table(
    used("displayName", text(1024), "string of up to 1024 characters", "Its name."),
    used("mimeType", _string, "string", "Its type."),
    no_effect("sizeBytes", anything, "integer", "Bytes are counted as they arrive."),
    refused("name", "Names are made here.", _string),
)
CREATE: Final = table(used("file", message(FILE), "object: `displayName`, `mimeType`", "What is known of it."))


@dataclass(slots=True)
class _Resumable:
    """An upload that goes on over several requests. `stack` ends it, whole or not."""

    tenant: Tenant
    upload: Upload
    stack: AsyncExitStack
    filename: str
    mime_type: str
    timer: asyncio.TimerHandle
    num_bytes: int = 0
    busy: bool = False


class GeminiFiles:
    """Handlers of /v1beta/files, and uploads that are not complete."""

    def __init__(self, files: FileStore, named: NamedFiles, upload_timeout_s: float) -> None:
        self._files = files
        self._named = named
        self._upload_timeout_s = upload_timeout_s
        self._open: dict[str, _Resumable] = {}  # as many as files.max_uploads

    def routes(self) -> Iterator[Route]:
        for version in VERSIONS:
            one = f"/{version}/files/{{file_id}}"
            summary = "Begins an upload, or goes on with one."
            example = {"file": {"displayName": "notes.txt", "mimeType": "text/plain"}}
            path = f"/upload/{version}/files"
            yield Route("POST", path, self.upload, summary, CREATE, example=example, continues="upload_id")
            yield Route("GET", f"/{version}/files", self.list_files, "The files that are kept.", query=PAGE)
            yield Route("GET", one, self.get_file, "Description of a file.")
            yield Route("DELETE", one, self.delete, "Deletes it.")

    async def close(self) -> None:
        """Nothing is left of uploads that are not complete."""
        for upload_id in list(self._open):
            await self._drop(upload_id)

    # -- uploads ------------------------------------------------------------------------------------------------------

    async def upload(self, http: web.Request) -> web.StreamResponse:
        """POST /upload/v1beta/files"""
        upload_id = http.query.get("upload_id")
        return await (self._begin(http) if upload_id is None else self._go_on(http, upload_id))

    async def _begin(self, http: web.Request) -> web.Response:
        tenant = http[TENANT]
        protocol = http.headers.get("X-Goog-Upload-Protocol", "resumable")
        if protocol != "resumable" or http.headers.get("X-Goog-Upload-Command", "start") != "start":
            raise UnsupportedError(
                "Files are uploaded with X-Goog-Upload-Protocol: resumable, which begins with `start`."
            )
        described = read(http[BODY], CREATE).get("file", {})
        stack = AsyncExitStack()
        upload = await stack.enter_async_context(self._files.upload(tenant.name))
        upload.purpose = PURPOSE
        name = described.get("displayName") or http.headers.get("X-Goog-Upload-File-Name") or UNNAMED
        kind = http.headers.get("X-Goog-Upload-Header-Content-Type") or described.get("mimeType") or BYTES
        upload_id = secrets.token_urlsafe(24)
        timer = self._drop_later(upload_id)
        self._open[upload_id] = _Resumable(tenant, upload, stack, name[:1024], kind[:255], timer)
        try:
            announced = http.headers.get("X-Goog-Upload-Header-Content-Length", "0")
            upload.expect(int(announced) if announced.isdecimal() and len(announced) < 20 else 0)
        except BaseException:
            await self._drop(upload_id)
            raise
        url = f"{_origin(http)}{http.path}?upload_id={upload_id}&upload_protocol=resumable"
        headers = {"X-Goog-Upload-Status": "active", "X-Goog-Upload-URL": url}
        return reply_json({}, headers)

    async def _go_on(self, http: web.Request, upload_id: str) -> web.Response:
        going = self._open.get(upload_id)
        if going is None or going.busy:
            raise NotFoundError(
                "There is no such upload, or it is being written to: it was completed, was idle for too long, or was "
                "begun at another gateway."
            )
        http[RECORD].tenant = going.tenant.name
        commands = {word.strip().lower() for word in http.headers.get("X-Goog-Upload-Command", "").split(",")}
        if not commands <= _COMMANDS:
            raise BadRequestError("X-Goog-Upload-Command has to be `upload` or `upload, finalize`.")
        if http.headers.get("X-Goog-Upload-Offset", "0").strip() != str(going.num_bytes):
            raise BadRequestError(f"X-Goog-Upload-Offset is not {going.num_bytes}, the number of bytes received.")
        stored = None
        going.busy = True
        going.timer.cancel()
        try:
            async with aclosing(body_chunks(http, _NO_LIMIT, self._upload_timeout_s)) as chunks:
                async for chunk in chunks:
                    await going.upload.write(chunk)
                    going.num_bytes += len(chunk)
            if "finalize" in commands:
                stored = await going.upload.finish(going.filename, going.mime_type, TTL_S)
        except BaseException:
            await self._drop(upload_id)
            raise
        if stored is None:
            going.busy, going.timer = False, self._drop_later(upload_id)
            return reply_json({}, {"X-Goog-Upload-Status": "active"})
        await self._drop(upload_id)
        return reply_json({"file": file_json(stored, _origin(http))}, {"X-Goog-Upload-Status": "final"})

    def _drop_later(self, upload_id: str) -> asyncio.TimerHandle:
        """Unless its next bytes arrive."""
        loop = asyncio.get_running_loop()
        return loop.call_later(IDLE_S, lambda: tasks.spawn(self._drop(upload_id), name="drop an upload"))

    async def _drop(self, upload_id: str) -> None:
        """Ends it; what was finished stays."""
        if (going := self._open.pop(upload_id, None)) is not None:
            going.timer.cancel()
            await going.stack.aclose()

    # -- files --------------------------------------------------------------------------------------------------------

    async def list_files(self, http: web.Request) -> web.StreamResponse:
        """GET /v1beta/files"""
        tenant = http[TENANT]
        listed, token = page({stored.id: stored for stored in await self._files.all_of(tenant.name)}, http.query)
        files = [file_json(stored, _origin(http)) for _, stored in listed]
        return reply_json({"files": files, **({"nextPageToken": token} if token else {})})

    async def get_file(self, http: web.Request) -> web.StreamResponse:
        """GET /v1beta/files/{file_id}"""
        tenant, file_id = http[TENANT], http.match_info["file_id"]
        if (stored := await self._files.find(tenant.name, file_id)) is None:
            raise _not_found(file_id)
        return reply_json(file_json(stored, _origin(http)))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1beta/files/{file_id}"""
        tenant, file_id = http[TENANT], http.match_info["file_id"]
        if not await self._files.delete(tenant.name, file_id):
            raise _not_found(file_id)
        return reply_json({})

    async def put(self, record: Record, tenant: Tenant, body: dict[str, Any], *, texts_only: bool = True) -> bool:
        """Puts files into contents that refer to them: texts, or bytes where not `texts_only`; URIs of other servers
        then stay as they are. Whether there were any. Raises BadRequestError for what may not be there, NotFoundError,
        and BodyTooLargeError for more than server.max_body_bytes together."""
        parts = list(_references(body))
        for path, part, name in parts:
            reference, where = part[name], f"{path}.fileData"
            uri = (reference.get("fileUri") or reference.get("file_uri")) if isinstance(reference, dict) else None
            known = _URI.fullmatch(uri) if isinstance(uri, str) else None
            if known is not None:
                del part[name]
                part |= await self._inline(record, tenant, known[1], where, texts_only=texts_only)
            elif texts_only:
                why = "it is no file that was uploaded here; nothing is fetched from elsewhere"
                raise invalid(f"{where}.fileUri", why)
        return bool(parts)

    async def _inline(
        self, record: Record, tenant: Tenant, file_id: str, path: str, *, texts_only: bool
    ) -> dict[str, Any]:
        """What stands in the place of a file."""
        stored, data = await self._named.read(record, tenant, file_id, _not_found(file_id))
        if (text := text_of(data)) is not None:
            return {"text": text}
        if texts_only:
            why = f"'{path}': the file ({shown(stored.mime_type)}) is no text in UTF-8, and only text is used."
            raise UnsupportedError(why, param=path)
        encoded = await off_loop(len(data), lambda: base64.b64encode(data).decode())
        return {"inlineData": {"mimeType": type_of(stored), "data": encoded}}


def file_json(stored: StoredFile, origin: str) -> dict[str, Any]:
    """A file as all routes write it."""
    file_json: dict[str, Any] = {
        "name": f"files/{stored.id}",
        "displayName": stored.filename,
        "mimeType": stored.mime_type,
        "sizeBytes": str(stored.num_bytes),
        "createTime": timestamp(stored.created_s),
        "updateTime": timestamp(stored.created_s),
        "uri": f"{origin}/v1beta/files/{stored.id}",
        "state": "ACTIVE",
        "source": "UPLOADED",
    }
    if stored.expires_s is not None:
        file_json["expirationTime"] = timestamp(stored.expires_s)
    return file_json


def _origin(http: web.Request) -> str:
    """As the client sees us, behind a proxy that ends TLS, too."""
    scheme = http.headers.get("X-Forwarded-Proto", http.scheme)
    return f"{'https' if scheme == 'https' else 'http'}://{http.host}"


_PLACES: Final = {
    *("contents", "parts", "systemInstruction", "system_instruction"),
    *("generateContentRequest", "generate_content_request"),
}
"""Of parts, and of what is around them."""


def _references(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Parts that refer to a file, with their paths, and how they spell it. Other shapes are refused when contents are
    checked."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _references(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name in ("fileData", "file_data"):
            if value.get(name) is not None and value.get("text") is None:
                yield path, value, name
                return
        for name in value.keys() & _PLACES:
            yield from _references(value[name], under(path, name))


def _not_found(file_id: str) -> NotFoundError:
    """The same for unknown, expired and other tenants' ids."""
    return NotFoundError(f"File not found (or permission denied): files/{shown(file_id)}.")
