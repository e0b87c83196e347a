"""/v1/files of the Anthropic API, over the same files as the OpenAI API's: an id begins with `file_` here and with
`file-` there, and either takes both.
"""

from __future__ import annotations

from typing import Any, Final

from aiohttp import web

from gateway.api.anthropic.wire import DEFAULT_LIMIT, MAX_LIMIT, read_page, time_text
from gateway.api.dialect import Route
from gateway.api.fields import Parameter, in_url, integer, invalid, read, read_query, text
from gateway.api.record import TENANT
from gateway.api.replies import reply_json
from gateway.api.uploads import FileRoutes, FileStore, query_values, read_form, store_id
from gateway.types import StoredFile

PREFIX: Final = "file_"
PAGE_PREFIX: Final = "page_"
PURPOSE: Final = "user_data"
SHORTEST_S, LONGEST_S = 3600, 7_776_000
MAX_IDS: Final = 100

UPLOAD: Final = {
    "expires_in_seconds": Parameter(
        "expires_in_seconds",
        in_url(integer(SHORTEST_S, LONGEST_S)),
        f"integer {SHORTEST_S} to {LONGEST_S}",
        "Time to live; without it the file is kept until it is deleted.",
    )
}
_list = (
    Parameter("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Files of one page, at most."),
    Parameter("page", text(), "string", "The `next_page` of the page before."),
    Parameter("after_id", text(), "string", "The page right after this file, as older SDKs ask."),
    Parameter("before_id", text(), "string", "The page right before this file."),
    Parameter("ids", text(), "up to 100 ids, several times", "Only these; those that there are not are left out."),
)
LIST: Final = {parameter.name: parameter for parameter in _list}


class AnthropicFiles:
    """Holds what its handlers need."""

    def __init__(self, files: FileStore, upload_timeout_s: float) -> None:
        self._files = files
        self._upload_timeout_s = upload_timeout_s

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/files", self.upload, "Uploads a file.", form=UPLOAD),
            Route("GET", "/v1/files", self.list_files, "The files that are kept, newest first.", query=LIST),
            *FileRoutes(self._files, file_json, {"type": "file_deleted"}).routes(),
        ]

    async def upload(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/files"""
        tenant = http[TENANT]
        async with self._files.upload(tenant.name) as upload:
            upload.purpose = PURPOSE
            form = await read_form(http, upload, self._upload_timeout_s, lambda name, value: None)
            ttl_s = read(form.values, UPLOAD, ()).get("expires_in_seconds")
            stored = await upload.finish(form.filename or "", form.mime_type, ttl_s)
        return reply_json(file_json(stored))

    async def list_files(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/files"""
        tenant = http[TENANT]
        values = read_query(http.query, LIST)
        newest_first = (await self._files.all_of(tenant.name))[::-1]
        if ids := _ids(http):
            data = [stored for stored in newest_first if stored.id in ids]
            return reply_json(_list_json(data, has_more=False))
        limit, cursor = values.get("limit", DEFAULT_LIMIT), values.get("page")
        if "after_id" in values or "before_id" in values:
            page = read_page(http.query, [PREFIX + stored.id for stored in newest_first])
            on_page = set(page.ids)
            return reply_json(_list_json([one for one in newest_first if PREFIX + one.id in on_page], page.has_more))
        if cursor is not None:
            if not cursor.startswith(PAGE_PREFIX):
                raise invalid("page", "it is no `next_page` of this list")
            newest_first = [stored for stored in newest_first if stored.id < cursor[len(PAGE_PREFIX) :]]
        return reply_json(_list_json(newest_first[:limit], len(newest_first) > limit))


def file_json(stored: StoredFile) -> dict[str, Any]:
    """As every route tells it."""
    return {
        "id": PREFIX + stored.id,
        "type": "file",
        "filename": stored.filename,
        "mime_type": stored.mime_type,
        "size_bytes": stored.num_bytes,
        "created_at": time_text(stored.created_s),
        "downloadable": True,
        "expires_at": None if stored.expires_s is None else time_text(stored.expires_s),
    }


def _list_json(data: list[StoredFile], has_more: bool) -> dict[str, Any]:
    """With what newer SDKs read (`next_page`) and older ones (`last_id`)."""
    return {
        "data": [file_json(stored) for stored in data],
        "has_more": has_more,
        "first_id": PREFIX + data[0].id if data else None,
        "last_id": PREFIX + data[-1].id if data else None,
        "next_page": PAGE_PREFIX + data[-1].id if data and has_more else None,
    }


def _ids(http: web.Request) -> set[str]:
    ids = query_values(http.query, "ids")
    if len(set(ids)) > MAX_IDS:
        raise invalid("ids", f"at most {MAX_IDS} files can be asked for")
    if ids and ("page" in http.query or "limit" in http.query):
        raise invalid("ids", "it goes with neither `page` nor `limit`")
    return {store_id(one) for one in ids}
