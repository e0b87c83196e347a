"""Uploaded files that requests for upstreams of other APIs name by their ids here: their bytes go with the request.

    file, input_file, input_image   `file_id` in chats and responses
    image, document                 `source` with a `file_id`, in messages

No file is sent to an upstream to be stored there. Gemini's URIs are in gemini/files.py.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from gateway.api.dialect import BYTES
from gateway.api.media import type_of_name
from gateway.api.record import Record
from gateway.api.uploads import no_such_file, store_id
from gateway.config import ServerSettings
from gateway.errors import BodyTooLargeError, NotFoundError, StorageError
from gateway.files.store import FileStore
from gateway.tasks import off_loop
from gateway.types import StoredFile, Tenant

_T = TypeVar("_T")

_HOLDERS: Final = {"file": "file", "image": "source", "document": "source"}
"""Types of parts -> where in them an id is; of others it is in the part itself."""
_NAMING: Final = frozenset((*_HOLDERS, "input_file", "input_image"))
_INSIDE: Final = ("messages", "input", "content", "output", "file", "source")


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Reads files for requests."""

    server: ServerSettings
    files: FileStore

    async def put(self, record: Record, tenant: Tenant, value: _T, path: str = "") -> _T:
        """A body, or the value at a path of one, with the bytes of files in the place of their ids; itself where it
        names none. Raises what `read` raises."""
        found: dict[int, Any] = {}
        for where, kind, holder in list(_named(value, path)):
            file_id = holder["file_id"]
            unknown = no_such_file(file_id, f"{where}.file_id")
            stored, data = await self.read(record, tenant, store_id(file_id), unknown)
            found[id(holder)] = await off_loop(len(data), partial(_inline, kind, holder, stored, data))
        made: _T = _replaced(value, found) if found else value
        return made

    async def read(
        self, record: Record, tenant: Tenant, file_id: str, unknown: NotFoundError
    ) -> tuple[StoredFile, bytes]:
        """Raises `unknown`, and BodyTooLargeError for more than server.max_body_bytes with all of the request."""
        async with self.files.reading(tenant.name, file_id) as found:
            if found is None:
                raise unknown
            stored, chunks = found
            if stored.num_bytes > self.server.max_body_bytes - record.body_bytes:
                raise BodyTooLargeError(self.server.max_body_bytes)
            if record.body is not None:
                record.body.grow_to(record.body.num_bytes + stored.num_bytes)
            data = b"".join([chunk async for chunk in chunks])
        if len(data) != stored.num_bytes:
            raise StorageError("The file cannot be read at the moment.")
        record.body_bytes += len(data)
        record.work += len(data)
        return stored, data


def type_of(stored: StoredFile) -> str:
    """What the client said, or else what the ending of its name says."""
    if stored.mime_type in ("", BYTES):
        return type_of_name(stored.filename) or BYTES
    return stored.mime_type.partition(";")[0].strip().lower()


def text_of(data: bytes) -> str | None:
    try:
        return None if b"\0" in data else data.decode()
    except UnicodeDecodeError:
        return None


def _named(value: Any, path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The objects with the id of a file, with their paths and the types of their parts. Nothing was checked."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _named(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind in _NAMING:
            inside = _HOLDERS.get(kind)
            holder, where = (value, path) if inside is None else (value.get(inside), f"{path}.{inside}")
            if isinstance(holder, dict) and isinstance(holder.get("file_id"), str):
                yield where, kind, holder
            return
        for name in ("messages", "input", "content", "output"):
            if isinstance(value.get(name), list):
                yield from _named(value[name], f"{path}.{name}" if path else name)


def _inline(kind: str, holder: Mapping[str, Any], stored: StoredFile, data: bytes) -> dict[str, Any]:
    """What stands in the place of the object with the id."""
    rest = {name: value for name, value in holder.items() if name != "file_id"}
    mime_type, encoded = type_of(stored), base64.b64encode(data).decode()
    if kind == "document" and mime_type.startswith("text/") and (text := text_of(data)) is not None:
        return {"type": "text", "media_type": "text/plain", "data": text}
    if kind in ("image", "document"):
        return {"type": "base64", "media_type": mime_type, "data": encoded}
    url = f"data:{mime_type};base64,{encoded}"
    if kind == "input_image":
        return {**rest, "image_url": url}
    return {"filename": stored.filename, **rest, "file_data": url}


def _replaced(value: Any, found: Mapping[int, Any]) -> Any:
    if isinstance(value, list):
        return [_replaced(item, found) for item in value]
    if not isinstance(value, dict):
        return value
    if id(value) in found:
        return found[id(value)]
    return {name: _replaced(inside, found) if name in _INSIDE else inside for name, inside in value.items()}
