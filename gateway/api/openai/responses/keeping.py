"""Stores responses, before the client gets their end, and runs those of the background.

Background responses run in the gateway that got the request, and are no more durable than it: one that is stopped gives
them the time of its shutdown and stores the rest as failed. Of a gateway that was killed, a later look-up finds the
response past its time and reports it as failed (`settled`). The end replaces what was stored at the beginning, and
nothing else: a response that was cancelled or deleted meanwhile, here or through another gateway, stays so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Final

from gateway import tasks
from gateway.api.middleware import noted
from gateway.api.openai.responses.shape import ResponseShape, failed_response
from gateway.api.openai.responses.store import ResponseStore, StoredResponse
from gateway.api.openai.responses.tools import Item
from gateway.api.record import CLIENT_LEFT, Observer, Record, failed
from gateway.api.replies import Answer
from gateway.api.stream import Account
from gateway.errors import KvasirError, OverloadedError, QueueFullError
from gateway.native import no_panic
from gateway.types import Usage

log = logging.getLogger(__name__)

ENDPOINT: Final = "/v1/responses (background)"
"""Under which the work is metered; the request that began it is metered as any other, without tokens."""

LATE_S: Final = 60.0
"""After its deadline, before a response that is still in progress is taken for lost: clocks differ."""

RETRY_AFTER_S: Final = 5.0
CANCEL_LIMIT_S: Final = 5.0

Work = Coroutine[Any, Any, tuple[list[Answer], Usage]]


class ResponseKeeper(Account):
    """Ends one response, and stores it where there is a `store`. Its object says `store: false` in the end if it could
    not be kept."""

    def __init__(self, store: ResponseStore | None, tenant: str, shape: ResponseShape, items: list[Item]) -> None:
        self.shape = shape
        self._store, self._tenant, self._items = store, tenant, items
        self._begun: bytes | None = None  # as it is kept while it is in progress in the background
        self._done = False
        shape.response["store"] = store is not None

    async def begin(self) -> bool:
        """Keeps it as in progress: its end replaces that, and nothing else. Whether it is kept."""
        stored = StoredResponse(self.shape.response, self._items)
        self._begun = stored.body
        return self._store is not None and await self._store.put(self._tenant, stored)

    async def take(self, answer: Answer, usage: Usage) -> None:
        """The whole answer."""
        self.shape.take(answer)
        await self.completed(usage)

    async def completed(self, usage: Usage) -> None:
        self.shape.finish(usage)
        await self._keep()

    async def failed(self, error: KvasirError) -> None:
        if not self._done:
            self.shape.fail(error)
            await self._keep()

    async def cancelled(self) -> None:
        self.shape.cancel()
        await self._keep()

    def abandoned(self) -> None:
        """The client disconnected. Only one that has received an id can retrieve the response."""
        if self.shape.begun and not self._done:
            tasks.spawn(self.cancelled(), name="keep a cancelled response")

    async def _keep(self) -> None:
        self._done = True
        if self._store is not None:
            stored = StoredResponse(self.shape.response, self._items)
            stored.response["store"] = await self._store.put(self._tenant, stored, self._begun)


class Background:
    """The background responses of this gateway. `shut_down` and `close` end them."""

    def __init__(self, observer: Observer, *, most: int, shutdown_s: float) -> None:
        self._observer = observer
        self._most = most
        self._shutdown_s = shutdown_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._ending: asyncio.Task[None] | None = None

    def admit(self) -> None:
        """Raises QueueFullError when there are too many already, OverloadedError when the server is being stopped."""
        if self._closing:
            raise OverloadedError("The server is being stopped.", retry_after_s=RETRY_AFTER_S)
        if len(self._running) >= self._most:
            raise QueueFullError(f"{self._most} responses run in the background already.", retry_after_s=RETRY_AFTER_S)

    async def start(self, record: Record, keeper: ResponseKeeper, work: Work) -> None:
        """Begins `work`, once the response is kept as in progress. Raises OverloadedError when it cannot be kept."""
        if not await keeper.begin():
            work.close()
            raise OverloadedError("A background response cannot be kept at the moment.", retry_after_s=RETRY_AFTER_S)
        own = replace(record, endpoint=ENDPOINT, traces=record.traces, status=200)
        record.traces, record.hold = [], None
        task = tasks.spawn(self._run(own, keeper, work), name="background response")
        response_id = keeper.shape.response["id"]
        self._running[response_id] = task
        task.add_done_callback(lambda _: self._running.pop(response_id, None))
        await asyncio.sleep(0)  # it runs from here on, so that cancelling it meets its handlers

    async def cancel(self, response_id: str) -> None:
        """Returns when it has ended, if it runs here."""
        if (task := self._running.get(response_id)) is not None:
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_LIMIT_S)

    async def shut_down(self) -> None:
        """Gives what runs the time of a shutdown, the same as requests have, and ends the rest, which is kept as
        failed. Returns at once; `close` waits for it."""
        self._ending = tasks.spawn(self._end(), name="end background responses")

    async def close(self) -> None:
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def _end(self) -> None:
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=self._shutdown_s)
        self._closing = True
        for task in list(self._running.values()):  # those that began meanwhile, too
            await tasks.cancel(task)

    async def _run(self, record: Record, keeper: ResponseKeeper, work: Work) -> None:
        with noted(self._observer, record):
            try:
                with no_panic():
                    (answer,), usage = await work
                await keeper.take(answer, usage)
            except asyncio.CancelledError:
                record.status = CLIENT_LEFT
                if self._closing:
                    await keeper.failed(KvasirError("The server was stopped before the response was complete."))
                else:
                    await keeper.cancelled()
            except Exception as error:
                failure = error
                if not isinstance(failure, KvasirError):
                    log.exception("background response of request %s failed", record.request_id)
                    failure = KvasirError("The server had an error while it answered.")
                failed(record, failure)
                await keeper.failed(failure)


def settled(stored: StoredResponse, timeout_s: float) -> StoredResponse:
    """As it is, but for one whose gateway must be gone: it is in progress and past the time that a request may take."""
    response = stored.response
    if response["status"] != "in_progress" or time.time() < response["created_at"] + timeout_s + LATE_S:
        return stored
    return StoredResponse(failed_response(response, KvasirError("The gateway that worked on it ended.")), stored.items)
