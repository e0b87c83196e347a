"""/v1/files of the Anthropic API, over the same files as the OpenAI API's: an id begins with `file_` here and with
`file-` there, and either takes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from multidict import MultiMapping

from gateway.api.anthropic.wire import DEFAULT_LIMIT, MAX_LIMIT, read_page, time_text
from gateway.api.dialect import Route
from gateway.api.fields import in_url, integer, invalid, read_query, table, text, used
from gateway.api.replies import page_json
from gateway.api.uploads import FileRoutes, query_values, store_id
from gateway.files.store import FileStore
from gateway.types import StoredFile

PREFIX: Final = "file_"
PAGE_PREFIX: Final = "page_"
SHORTEST_S, LONGEST_S = 3600, 7_776_000
MAX_IDS: Final = 100

UPLOAD: Final = table(
    used(
        "expires_in_seconds",
        in_url(integer(SHORTEST_S, LONGEST_S)),
        "",
        "Time to live; without it the file is kept until it is deleted.",
    )
)
LIST: Final = table(
    used("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Files of one page, at most."),
    used("page", text(), "string", "The `next_page` of the page before."),
    used("after_id", text(), "string", "The page right after this file, as older SDKs ask."),
    used("before_id", text(), "string", "The page right before this file."),
    used("ids", text(), "up to 100 ids, several times", "Only these; those that there are not are left out."),
)


def file_routes(files: FileStore, upload_timeout_s: float) -> list[Route]:
    deleted = {"type": "file_deleted"}
    return FileRoutes(files, upload_timeout_s, UPLOAD, LIST, _ttl_s, file_json, page, deleted).routes()


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


def page(files: list[StoredFile], query: MultiMapping[str]) -> dict[str, Any]:
    """The page of files, in the order in which they were made, that the query asks for."""
    values, newest_first = read_query(query, LIST), files[::-1]
    if ids := _ids(query):
        return _list_json([stored for stored in newest_first if stored.id in ids], has_more=False)
    limit, cursor = values.get("limit", DEFAULT_LIMIT), values.get("page")
    if "after_id" in values or "before_id" in values:
        on_page, has_more = read_page(query, [PREFIX + stored.id for stored in newest_first])
        return _list_json([one for one in newest_first if PREFIX + one.id in on_page], has_more)
    if cursor is not None:
        if not cursor.startswith(PAGE_PREFIX):
            raise invalid("page", "it is no `next_page` of this list")
        newest_first = [stored for stored in newest_first if stored.id < cursor[len(PAGE_PREFIX) :]]
    return _list_json(newest_first[:limit], len(newest_first) > limit)


def _ttl_s(values: Mapping[str, Any]) -> float | None:
    ttl_s: float | None = values.get("expires_in_seconds")
    return ttl_s


def _list_json(data: list[StoredFile], has_more: bool) -> dict[str, Any]:
    """With what newer SDKs read (`next_page`) and older ones (`last_id`)."""
    next_page = PAGE_PREFIX + data[-1].id if data and has_more else None
    return {**page_json([file_json(stored) for stored in data], has_more=has_more), "next_page": next_page}


def _ids(query: MultiMapping[str]) -> set[str]:
    ids = query_values(query, "ids")
    if len(set(ids)) > MAX_IDS:
        raise invalid("ids", f"at most {MAX_IDS} files can be asked for")
    if ids and ("page" in query or "limit" in query):
        raise invalid("ids", "it goes with neither `page` nor `limit`")
    return {store_id(one) for one in ids}
