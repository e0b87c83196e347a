"""Pages of lists as the Anthropic API has them: `limit`, `after_id` and `before_id` in, first and last id out. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from multidict import MultiMapping

from gateway.api.fields import Parameter, choice, in_url, integer, invalid, read_query, shown, text

DEFAULT_LIMIT: Final = 20
MAX_LIMIT: Final = 1000

_lifecycle = choice("active", "deprecated", "retired")
_page: Final = (
    Parameter("limit", in_url(integer(1, MAX_LIMIT)), "integer 1 to 1000, default 20", "Models of one page, at most."),
    Parameter("after_id", text(), "string", "The page right after this model."),
    Parameter("before_id", text(), "string", "The page right before this model."),
    Parameter(
        "lifecycle",
        _lifecycle,
        "`active`, `deprecated`, `retired`, several times",
        "Only models of these stages.",
    ),
)
MODELS: Final = {parameter.name: parameter for parameter in _page}


@dataclass(frozen=True, slots=True)
class Page:
    """The ids of one page; `has_more` in the direction in which the client goes."""

    ids: Sequence[str]
    has_more: bool

    def body(self, data: list[dict[str, Any]]) -> dict[str, Any]:
        """`data` are the objects of the ids."""
        return {
            "data": data,
            "has_more": self.has_more,
            "first_id": self.ids[0] if self.ids else None,
            "last_id": self.ids[-1] if self.ids else None,
        }


def read_page(query: MultiMapping[str], ids: Sequence[str]) -> Page:
    """The page of `ids` that the query asks for. All are active. Raises BadRequestError with the parameter's name."""
    wanted = [item for key in ("lifecycle", "lifecycle[]") for item in query.getall(key, [])]
    stages = {_lifecycle(stage, "lifecycle") for stage in wanted}
    if stages and "active" not in stages:
        ids = ()
    values = read_query(query, MODELS)
    limit, after, before = values.get("limit", DEFAULT_LIMIT), values.get("after_id"), values.get("before_id")
    if after is not None and before is not None:
        raise invalid("before_id", "only one of `after_id` and `before_id` is possible")
    if before is not None:
        end = _place(ids, before, "before_id")
        start = max(0, end - limit)
        return Page(ids[start:end], start > 0)
    start = 0 if after is None else _place(ids, after, "after_id") + 1
    return Page(ids[start : start + limit], len(ids) > start + limit)


def _place(ids: Sequence[str], one: str, name: str) -> int:
    if one not in ids:
        raise invalid(name, f"there is no {shown(one)!r} in this list")
    return ids.index(one)
