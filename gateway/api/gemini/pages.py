"""Lists in pages, as Google's APIs have them: pageSize, and a token that says where the next page begins. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from gateway.api.fields import in_url, integer, read_query, table, text, used
from gateway.errors import BadRequestError

_T = TypeVar("_T")
DEFAULT_SIZE: Final = 50
MAX_SIZE: Final = 1000

PAGE: Final = table(
    used("pageSize", in_url(integer(0, 2**31 - 1)), "integer, default 50", "Items of a page, 1000 at most."),
    used("pageToken", text(), "string", "The `nextPageToken` of the page before."),
)


def page(items: Mapping[str, _T], query: Mapping[str, str]) -> tuple[Sequence[tuple[str, _T]], str]:
    """The items of the page that is asked for, in the order of their keys, and the token of the next one, empty at the
    end. A token stays valid while items come and go. Raises BadRequestError for a size or token that is none."""
    values = read_query(query, PAGE)
    size, after = min(values.get("pageSize") or DEFAULT_SIZE, MAX_SIZE), _after(values)
    keys = sorted(key for key in items if after is None or key > after)
    shown = keys[:size]
    token = base64.urlsafe_b64encode(shown[-1].encode()).decode() if len(keys) > size else ""
    return [(key, items[key]) for key in shown], token


def _after(query: Mapping[str, Any]) -> str | None:
    if not (written := query.get("pageToken")):
        return None
    try:
        return base64.b64decode(written.encode(), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise BadRequestError("Invalid 'pageToken': it is none that was given out.", param="pageToken") from None
