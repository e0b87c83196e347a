"""Files on the wire, for the dialects that have them: forms with a file in, bytes out, never whole in memory."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote, unquote

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam
from multidict import MultiMapping

from gateway.api.body import ask_for_body
from gateway.api.dialect import BYTES, FORM, Route
from gateway.api.fields import Parameter, invalid, missing, read, shown
from gateway.api.record import CLIENT_LEFT, RECORD, TENANT, common_headers
from gateway.api.replies import reply_json
from gateway.errors import BadRequestError, NotFoundError, StorageError
from gateway.files.store import FileStore, Upload
from gateway.types import StoredFile, Tenant

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 256 << 10
MAX_PARTS: Final = 16
MAX_VALUE_BYTES: Final = 1024
MAX_FORM_BYTES: Final = 256 << 10  # of a request, besides those of its file
MAX_NAME_CHARS: Final = 1024
CHUNK_TIMEOUT_S: Final = 60.0
"""For a client to read one chunk of a file, which has 1 MiB at most."""
UNNAMED: Final = "unnamed"
PURPOSE: Final = "user_data"
"""Of a file whose dialect has no purposes."""

_PARAMETER: Final = re.compile(r';\s*(name|filename|filename\*)=(?:"((?:[^"\\]|\\.)*)"|([^;"]*))', re.IGNORECASE)
_MALFORMED: Final = (
    ValueError,
    RuntimeError,
    BadHttpMessage,
    web.RequestPayloadError,
    BadContentDispositionHeader,
    BadContentDispositionParam,
)
"""What aiohttp raises for bodies that are no forms."""


@dataclass(frozen=True, slots=True)
class FileRoutes:
    """/v1/files, as a dialect with forms writes it.

    form     fields of an upload besides `file`; `purpose` is among them where clients give one
    query    parameters of the list
    ttl_s    values of an upload's form -> time to live; None: that of the purpose
    render   a file as its dialect writes it
    page     all files of a tenant, oldest first, and the query -> body of the list
    deleted  fields of the answer to its deletion, besides its id
    """

    files: FileStore
    upload_timeout_s: float
    form: Mapping[str, Parameter]
    query: Mapping[str, Parameter]
    ttl_s: Callable[[Mapping[str, Any]], float | None]
    render: Callable[[StoredFile], dict[str, Any]]
    page: Callable[[list[StoredFile], MultiMapping[str]], dict[str, Any]]
    deleted: Mapping[str, Any]

    def routes(self) -> list[Route]:
        every, one = "/v1/files", "/v1/files/{file_id}"
        return [
            Route("POST", every, self.upload, "Uploads a file.", form=self.form, required=self._required),
            Route("GET", every, self.all, "The files that are kept, newest first.", query=self.query),
            Route("GET", one, self.get, "Description of a file."),
            Route("GET", f"{one}/content", self.content, "Bytes of a file.", media=(BYTES,)),
            Route("DELETE", one, self.delete, "Deletes it."),
        ]

    @property
    def _required(self) -> tuple[str, ...]:
        return ("purpose",) if "purpose" in self.form else ()

    async def upload(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/files"""
        async with self.files.upload(http[TENANT].name) as upload:
            upload.purpose = PURPOSE

            def on_value(name: str, value: str) -> None:
                if name == "purpose" and name in self.form:
                    upload.purpose = self.form[name].check(value, name)

            form = await read_form(http, upload, self.upload_timeout_s, on_value)
            ttl_s = self.ttl_s(read(form.values, self.form, self._required))
            stored = await upload.finish(form.filename or "", form.mime_type, ttl_s)
        return reply_json(self.render(stored))

    async def all(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/files"""
        return reply_json(self.page(await self.files.all_of(http[TENANT].name), http.query))

    async def get(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/files/{file_id}"""
        return reply_json(self.render(await find_file(self.files, http[TENANT], http.match_info["file_id"])))

    async def content(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/files/{file_id}/content: the bytes, as they were sent. Raises NotFoundError before the first of them;
        cuts the connection where it cannot send all of them, which is the only way to tell that from a whole file."""
        file_id = http.match_info["file_id"]
        async with self.files.reading(http[TENANT].name, store_id(file_id)) as found:
            if found is None:
                raise no_such_file(file_id)
            stored, chunks = found
            headers = {
                "Content-Type": BYTES,
                "Content-Disposition": f"attachment; filename*=UTF-8''{quote(stored.filename, safe='')}",
                "X-Content-Type-Options": "nosniff",
            }
            return await send_chunks(http, chunks, headers, num_bytes=stored.num_bytes)

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """DELETE /v1/files/{file_id}"""
        file_id = http.match_info["file_id"]
        if not await self.files.delete(http[TENANT].name, store_id(file_id)):
            raise no_such_file(file_id)
        return reply_json({"id": file_id, **self.deleted})


@dataclass
class Form:
    """A form besides the bytes of its file. `filename` None: there was no file."""

    filename: str | None = None
    mime_type: str = BYTES
    values: dict[str, str] = field(default_factory=dict)


async def read_form(http: web.Request, upload: Upload, timeout_s: float, on_value: Callable[[str, str], Any]) -> Form:
    """Writes the part `file` into `upload` and returns all others, in whatever order they come.

    on_value  gets each of them at once. Raises BadRequestError, and what `upload.write` raises.
    """
    if http.content_type != FORM:
        raise BadRequestError(f"A file is sent as {FORM}, with the bytes in the part `file`.")
    if http.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise BadRequestError("A file is sent without Content-Encoding.")
    upload.expect((http.content_length or 0) - MAX_FORM_BYTES)
    ask_for_body(http)
    form = Form()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in _parts(http):
                await _read_part(part, form, upload, on_value)
    except TimeoutError:
        raise BadRequestError("The file did not arrive in time (files.upload_timeout_s).") from None
    if form.filename is None:
        raise missing("file")
    return form


async def send_chunks(
    http: web.Request, chunks: AsyncIterator[bytes], headers: Mapping[str, str], *, num_bytes: int | None = None
) -> web.StreamResponse:
    """Bytes as they come. Cuts the connection where it cannot send all of them: `num_bytes`, where that is known."""
    response = web.StreamResponse(headers={**common_headers(http[RECORD]), **headers})
    response.content_length = left = num_bytes
    await response.prepare(http)
    why = ""
    try:
        async for chunk in chunks:
            async with asyncio.timeout(CHUNK_TIMEOUT_S):
                await response.write(chunk[:left])
            left = None if left is None else left - len(chunk)
    except ConnectionResetError:
        raise
    except TimeoutError:
        why = "its client does not read"
    except (OSError, StorageError) as error:
        why = f"it cannot be read: {error}"
    if left is not None and left > 0:
        why = why or "it has become shorter"
    if not why:
        await response.write_eof()
        return response
    log.warning("a file was not sent to its end: %s", why)
    if http.transport is not None:
        http.transport.abort()
    http[RECORD].status = CLIENT_LEFT
    return response


def store_id(file_id: str) -> str:
    """The store's id for a client's id, which may be any string, in the spelling of either dialect."""
    return file_id[len("file-") :] if file_id.startswith(("file-", "file_")) else ""


def no_such_file(file_id: str, param: str = "id") -> NotFoundError:
    """The same for files that never were, have expired, or are another tenant's."""
    return NotFoundError(
        f"No such File object: {shown(file_id)}", param=param, reason=f"no such file: {shown(file_id)}"
    )


async def find_file(files: FileStore, tenant: Tenant, file_id: str, param: str = "id") -> StoredFile:
    """What is known of the file that a client names in `param`. Raises NotFoundError."""
    stored = await files.find(tenant.name, store_id(file_id))
    if stored is None:
        raise no_such_file(file_id, param)
    return stored


def query_values(query: MultiMapping[str], name: str) -> list[str]:
    """Of a parameter that may come several times, with brackets, or separated by commas."""
    given = [*query.getall(name, []), *query.getall(f"{name}[]", [])]
    return [one for value in given for one in value.split(",") if one]


async def _parts(http: web.Request) -> AsyncIterator[BodyPartReader]:
    with _readable():
        reader = MultipartReader(http.headers, http.content)
    for _ in range(MAX_PARTS):
        with _readable():
            part = await reader.next()
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise BadRequestError("A part of the form is a form itself.")
        yield part
    raise BadRequestError(f"The form has more than {MAX_PARTS} parts.")


async def _read_part(part: BodyPartReader, form: Form, upload: Upload, on_value: Callable[[str, str], Any]) -> None:
    if part.headers.get("Content-Transfer-Encoding", "binary").strip().lower() not in ("binary", "7bit", "8bit"):
        raise BadRequestError("Parts of a form are sent without Content-Transfer-Encoding.")
    name, filename = disposition(part.headers.get("Content-Disposition", ""))
    if name == "file":
        if form.filename is not None:
            raise invalid("file", "there are two, and one request uploads one file")
        form.filename, form.mime_type = filename or UNNAMED, part.headers.get("Content-Type", BYTES)
        while chunk := await _chunk(part):
            await upload.write(chunk)
        return
    value = b""
    while chunk := await _chunk(part):
        value += chunk
        if len(value) > MAX_VALUE_BYTES:
            raise invalid(shown(name), f"it is longer than {MAX_VALUE_BYTES} bytes", code="string_above_max_length")
    if name in form.values:
        raise invalid(shown(name), "it is there twice")
    with _readable():
        form.values[name] = value.decode()
    on_value(name, form.values[name])


async def _chunk(part: BodyPartReader) -> bytes:
    with _readable():
        return bytes(await part.read_chunk(CHUNK_BYTES))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        why = shown(str(error)) if error.args else type(error).__name__
        raise BadRequestError(f"The form cannot be read: {why}.") from None


def disposition(header: str) -> tuple[str, str | None]:
    """The name of a part, and that of its file. A file's name is data, slashes and all: nothing is called so on disk.
    Names may have any characters, as browsers and SDKs write them: UTF-8, with `%22` for a quote. Raises
    BadRequestError."""
    found = {
        name.lower(): re.sub(r'\\(["\\])', r"\1", quoted) if quoted else plain.strip()
        for name, quoted, plain in _PARAMETER.findall(header)
    }
    name, filename = found.get("name"), found.get("filename")
    if name is None:
        raise BadRequestError("A part of the form has no name.")
    if extended := found.get("filename*"):
        filename = unquote(extended.rpartition("'")[2], errors="surrogateescape")
    if filename is None:
        return name, None
    filename = filename.replace("%22", '"')
    try:
        filename.encode()
    except UnicodeEncodeError:
        raise invalid("file", "its name is not UTF-8") from None
    if len(filename) > MAX_NAME_CHARS or not filename.isprintable():
        raise invalid("file", f"its name has more than {MAX_NAME_CHARS} characters, or some that cannot be shown")
    return name, filename
