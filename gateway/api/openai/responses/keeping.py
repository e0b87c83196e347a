"""Keeps a response as soon as it is known how it ended, before its client knows: what was told can be asked for.

What is kept says how it ended: completed, incomplete, failed, or cancelled when a client left in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway import tasks
from gateway.api.openai.responses.items import Item
from gateway.api.openai.responses.shape import ResponseShape
from gateway.api.openai.responses.store import Kept, ResponseStore
from gateway.errors import KvasirError
from gateway.types import Usage


class ResponseKeeper:
    """A stream.Keeper, of one response. Its object says `store: false` in the end if it could not be kept."""

    def __init__(self, store: ResponseStore, tenant: str, shape: ResponseShape, items: Sequence[Item]) -> None:
        self._store = store
        self._tenant = tenant
        self._shape = shape
        self._items = list(items)
        self._done = False
        shape.response["store"] = True

    async def completed(self, usage: Usage) -> None:
        self._shape.finish(usage)
        await self._keep()

    async def failed(self, error: KvasirError) -> None:
        if not self._done:
            self._shape.fail(error)
            await self._keep()

    def abandoned(self) -> None:
        """The client left. Only one that was told an id can ask for it again."""
        if self._shape.begun and not self._done:
            self._shape.cancel()
            tasks.spawn(self._keep(), name="keep a cancelled response")

    async def _keep(self) -> None:
        self._done = True
        response = self._shape.response
        response["store"] = await self._store.put(self._tenant, Kept(response, self._items))
