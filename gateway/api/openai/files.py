"""/v1/files of the OpenAI API: what is uploaded is kept until its time is over, or it is deleted.

uploads.py reads forms and writes bytes, a store keeps them.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from gateway.api.dialect import Route
from gateway.api.fields import Parameter, choice, in_url, integer, missing, read, read_query, text
from gateway.api.record import TENANT
from gateway.api.replies import reply_json
from gateway.api.uploads import FileRoutes, FileStore, no_such_file, read_form, store_id
from gateway.types import StoredFile

PREFIX: Final = "file-"
PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
SHORTEST_S, LONGEST_S = 3600, 2_592_000
MAX_LIMIT: Final = 10_000

_purpose = choice(*PURPOSES)
_upload = (
    Parameter(
        "purpose",
        _purpose,
        f"one of {', '.join(f'`{one}`' for one in PURPOSES)}",
        "What it is for: `batch` is the input of batches. Nothing else is done with the others yet.",
    ),
    Parameter("expires_after[anchor]", choice("created_at"), "`created_at`", "From when the time to live counts."),
    Parameter(
        "expires_after[seconds]",
        in_url(integer(SHORTEST_S, LONGEST_S)),
        f"integer {SHORTEST_S} to {LONGEST_S}",
        "Time to live; without it `batch` files are kept for `files.batch_ttl_s`, others until they are deleted.",
    ),
)
UPLOAD: Final = {parameter.name: parameter for parameter in _upload}
_list = (
    Parameter("after", text(), "id of a file", "Only those that come after this one, in the order."),
    Parameter("limit", in_url(integer(1, MAX_LIMIT)), f"integer 1 to {MAX_LIMIT}, the default", "Files at most."),
    Parameter("order", choice("asc", "desc"), "`asc` or `desc`, the default", "Latest first is `desc`."),
    Parameter("purpose", text(), "string", "Only those with this purpose."),
)
LIST: Final = {parameter.name: parameter for parameter in _list}


class Files:
    """Holds what its handlers need."""

    def __init__(self, files: FileStore, upload_timeout_s: float) -> None:
        self._files = files
        self._upload_timeout_s = upload_timeout_s

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/files", self.upload, "Uploads a file.", form=UPLOAD, required=("purpose",)),
            Route("GET", "/v1/files", self.list_files, "The files that are kept.", query=LIST),
            *FileRoutes(self._files, file_json, {"object": "file", "deleted": True}).routes(),
        ]

    async def upload(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/files"""
        tenant = http[TENANT]
        async with self._files.upload(tenant.name) as upload:

            def on_value(name: str, value: str) -> None:
                if name == "purpose":
                    upload.purpose = _purpose(value, name)

            form = await read_form(http, upload, self._upload_timeout_s, on_value)
            values = read(form.values, UPLOAD, ("purpose",))
            stored = await upload.finish(form.filename or "", form.mime_type, _ttl_s(values))
        return reply_json(file_json(stored))

    async def list_files(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/files"""
        tenant = http[TENANT]
        data, has_more = page(await self._files.all_of(tenant.name), read_query(http.query, LIST))
        ids = [PREFIX + stored.id for stored in data]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return reply_json({"object": "list", "data": [*map(file_json, data)], **ends, "has_more": has_more})


def file_json(stored: StoredFile) -> dict[str, Any]:
    """As every route tells it. Times are whole seconds, and a file is never there longer than it says."""
    return {
        "id": PREFIX + stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": int(stored.created_s),
        "expires_at": None if stored.expires_s is None else int(stored.expires_s),
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }


def page(files: list[StoredFile], values: dict[str, Any]) -> tuple[list[StoredFile], bool]:
    """The page that `values` ask for of files in the order in which they were made, and whether there are more. The
    file that it comes after need not be there any more: ids are in that order, too."""
    descending = values.get("order", "desc") == "desc"
    after, purpose = values.get("after"), values.get("purpose")
    if purpose is not None:
        files = [stored for stored in files if stored.purpose == purpose]
    if after is not None:
        place = store_id(after)
        if not place:
            raise no_such_file(after)
        files = [stored for stored in files if (stored.id < place if descending else stored.id > place)]
    limit = values.get("limit", MAX_LIMIT)
    return (files[::-1] if descending else files)[:limit], len(files) > limit


def _ttl_s(values: dict[str, Any]) -> float | None:
    anchor, seconds = values.get("expires_after[anchor]"), values.get("expires_after[seconds]")
    if anchor is None and seconds is not None:
        raise missing("expires_after[anchor]")
    if seconds is None and anchor is not None:
        raise missing("expires_after[seconds]")
    return seconds
