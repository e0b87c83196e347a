"""Items that an input only names: found in the kept responses that have them. An item's id says of which it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

from gateway.api.fields import shown
from gateway.api.openai.responses.items import Item, response_of
from gateway.api.openai.responses.store import ResponseStore
from gateway.errors import BadRequestError

MAX_REFERENCED: Final = 16
"""Responses whose items one input may refer to."""


async def resolved(store: ResponseStore, tenant: str, items: Sequence[Item]) -> list[Item]:
    """`items`, with what is referred to in place of the references. Raises BadRequestError for what is not there, and
    for what is referred to twice: a prompt would be longer than all that was ever sent."""
    known: dict[str, dict[str, Item]] = {}
    found = []
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            response_id = response_of(item["id"]) or ""
            if response_id not in known:
                known[response_id] = await _by_id(store, tenant, response_id, len(known))
            item = known[response_id].pop(item["id"], {}) or _missing(index, item["id"])
        found.append(item)
    return found


async def _by_id(store: ResponseStore, tenant: str, response_id: str, number: int) -> dict[str, Item]:
    if number == MAX_REFERENCED:
        raise BadRequestError(
            f"Invalid 'input': it refers to items of more than {MAX_REFERENCED} responses.",
            param="input",
            code="invalid_value",
        )
    kept = await store.find(tenant, response_id)
    return {item["id"]: item for item in kept.conversation} if kept else {}


def _missing(index: int, item_id: str) -> NoReturn:
    path = f"input[{index}].id"
    message = f"Invalid '{path}': there is no item with the id '{shown(item_id)}', or it was in the input before."
    raise BadRequestError(message, param=path, code="invalid_value")
