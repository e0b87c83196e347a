"""/v1/files of the OpenAI API: what is uploaded is kept until its time is over, or it is deleted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.api.dialect import Route
from gateway.api.fields import choice, in_url, integer, missing, read_query, table, text, used
from gateway.api.replies import page_json
from gateway.api.uploads import FileRoutes, no_such_file, store_id
from gateway.files.store import FileStore
from gateway.types import StoredFile

PREFIX: Final = "file-"
PURPOSES: Final = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
SHORTEST_S, LONGEST_S = 3600, 2_592_000
MAX_LIMIT: Final = 10_000

UPLOAD: Final = table(
    used(
        "purpose",
        choice(*PURPOSES),
        f"one of {', '.join(f'`{one}`' for one in PURPOSES)}",
        "What it is for: `batch` is the input of batches, others go with translated requests.",
    ),
    used("expires_after[anchor]", choice("created_at"), "`created_at`", "From when the time to live counts."),
    used(
        "expires_after[seconds]",
        in_url(integer(SHORTEST_S, LONGEST_S)),
        "",
        "Time to live; without it `batch` files are kept for `files.batch_ttl_s`, others until they are deleted.",
    ),
)
LIST: Final = table(
    used("after", text(), "id of a file", "Only those that come after this one, in the order."),
    used("limit", in_url(integer(1, MAX_LIMIT)), ", the default", "Files at most."),
    used("order", choice("asc", "desc"), "`asc` or `desc`, the default", "Latest first is `desc`."),
    used("purpose", text(), "string", "Only those with this purpose."),
)


def file_routes(files: FileStore, upload_timeout_s: float) -> list[Route]:
    deleted = {"object": "file", "deleted": True}
    return FileRoutes(files, upload_timeout_s, UPLOAD, LIST, _ttl_s, file_json, page, deleted).routes()


def file_json(stored: StoredFile) -> dict[str, Any]:
    """The file object. Times are whole seconds; a file never lives longer than its `expires_at`."""
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


def page(files: list[StoredFile], query: Mapping[str, str]) -> dict[str, Any]:
    """The page of files, in the order in which they were made, that the query asks for. The file that it comes after
    need not be there any more: ids are in that order, too."""
    values = read_query(query, LIST)
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
    data = [file_json(stored) for stored in (files[::-1] if descending else files)[:limit]]
    return {"object": "list", **page_json(data, has_more=len(files) > limit)}


def _ttl_s(values: Mapping[str, Any]) -> float | None:
    anchor, seconds = values.get("expires_after[anchor]"), values.get("expires_after[seconds]")
    if anchor is None and seconds is not None:
        raise missing("expires_after[anchor]")
    if seconds is None and anchor is not None:
        raise missing("expires_after[seconds]")
    return None if seconds is None else float(seconds)
