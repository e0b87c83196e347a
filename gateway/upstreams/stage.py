"""An answer from one of the upstreams of a model: which are asked, how often, and whose error is passed on in the end.

    1. the upstreams of the model that speak the request's dialect, in order (routes.py)
    2. one that failed too often is left out for a while (breaker.py)
    3. where places are bounded an online request waits for its turn (online_slots.py), and a line of a batch always
       for what online requests leave (slots.py); who gets none goes on to the next upstream
    4. each is tried `retries` times more, until the first byte of an answer is there
    5. the last error that an upstream answered is the answer, where none did better

Nothing is tried again once an answer has begun.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any, Final

from engine.protocol import Lane
from gateway.config import QueueSettings, UpstreamSettings
from gateway.errors import (
    BadRequestError,
    DeadlineError,
    KvasirError,
    ModelNotFoundError,
    NotFoundError,
    QueueFullError,
    UpstreamLostError,
    UpstreamsAwayError,
    UpstreamTimeoutError,
)
from gateway.tasks import off_loop
from gateway.types import UpstreamAnswer, UpstreamRequest
from gateway.upstreams.accounts import Accounts
from gateway.upstreams.bodies import body_for
from gateway.upstreams.failures import AttemptFailed
from gateway.upstreams.listing import Listing
from gateway.upstreams.opened import Opened
from gateway.upstreams.placing import take_place
from gateway.upstreams.routes import Route, Routes
from gateway.upstreams.stored import telling_ids
from gateway.upstreams.told_usage import without_usage
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

MAX_LABEL_CHARS: Final = 256
"""Of a model's name that is a label of metrics, a row of the ledger and in the log; some servers answer to any."""

MAX_LABELS_OF_ONE: Final = 250
"""Of these names, that one tenant's requests may add: it leaves some for the others'."""

MAX_LABELS: Final = 1000
"""Names of models that were found by a pattern and are labels of metrics; what is more is under the pattern."""

BUSY_S: Final = 1.0
"""What a client is told to wait whose upstreams have no connection left."""


class Upstreams:
    """Of all [[upstreams]]. `keys` has those of upstreams that have one."""

    def __init__(
        self,
        settings: Sequence[UpstreamSettings],
        keys: Mapping[str, str],
        *,
        proxies: Mapping[str, str] | None = None,
        queue: QueueSettings | None = None,
        num_tenants: int = 1,
        clock: Callable[[], float] = time.monotonic,
        backoff_s: float = 0.25,
    ) -> None:
        """proxies    URLs of proxies in front of upstreams, by name
        queue      the limits for those who wait for a slot
        num_tenants  that are configured
        backoff_s  how long the first retry waits where the upstream does not say
        """
        queue = queue or QueueSettings()
        self._max_wait_s = queue.max_wait_s
        self._by_name = {
            one.name: Upstream(one, keys.get(one.name), queue=queue, clock=clock, proxy=(proxies or {}).get(one.name))
            for one in settings
        }
        self._routes = Routes(settings)
        self._accounts = Accounts(settings, keys, num_tenants)
        self._listing = Listing(list(self._by_name.values()))
        self._backoff_s = backoff_s
        self._labels: set[str] = set()
        self._labels_of: Counter[str] = Counter()  # by the tenant who asked for them first
        self._started = int(time.time())

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        """Whether a request for a model goes to an upstream. `ours`: an engine, or the embedder, serves it as well."""
        return any(route.over_engines or not ours for route in self._routes.find(model, tenant))

    def models(self, dialect: str, tenant: str) -> Mapping[str, int]:
        """Those that can be named -> Unix second since when they are served."""
        return dict.fromkeys(self._routes.listed(dialect, tenant, self._listing.told), self._started)

    def whose(self, model: str, tenant: str) -> str:
        """Which upstreams and models answer for a model; another text when the settings change."""
        routes = self._routes.find(model, tenant)
        asked = [f"{route.upstream} {self._by_name[route.upstream].settings.url} {route.model}" for route in routes]
        return "\n".join(asked)

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """By upstream, for metrics and /admin/stats."""
        return {name: upstream.figures() for name, upstream in self._by_name.items()}

    def start(self) -> None:
        """Begins to ask upstreams for their lists of models. Needs a running event loop."""
        self._listing.start()

    async def close(self) -> None:
        await self._listing.close()
        for upstream in self._by_name.values():
            await upstream.close()

    @asynccontextmanager
    async def answer(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """The answer, once its first byte is there; leaving the context ends the request at the upstream.

        Raises ModelNotFoundError, NotFoundError, BadRequestError and OverloadedError before anybody was asked,
        QueueFullError and DeadlineError when there was no place to be asked in, UpstreamsAwayError, UpstreamLostError
        and UpstreamTimeoutError when nobody answered.
        """
        routes = await self._accounts.holding(request, self._routes_of(request))
        request.trace.overhead_ms = (time.monotonic() - request.received_s) * 1e3
        with ExitStack() as closing:  # pieces that nobody began to read close nothing
            answer = await self._first_good(request, routes, closing)
            if answer.status < 400:
                request.trace.first_token_ms = (time.monotonic() - request.received_s) * 1e3
            async with aclosing(answer.pieces):
                yield answer

    def _routes_of(self, request: UpstreamRequest) -> list[Route]:
        tenant = request.tenant.name
        if request.only:
            if named := self._routes.named(request.only, tenant):
                return named
            raise NotFoundError("The upstream that keeps this response is not there any more.")
        routes = self._routes.find(request.model, tenant)
        if not routes:
            raise ModelNotFoundError(request.model)
        if spoken := [route for route in routes if route.dialect == request.dialect]:
            return spoken
        raise _other_dialect(request.model, routes[0].dialect)

    async def _first_good(
        self, request: UpstreamRequest, routes: Sequence[Route], closing: ExitStack
    ) -> UpstreamAnswer:
        """The first answer that is no failure of its upstream; else the last failure that was answered. What was opened
        is closed with `closing`."""
        last: UpstreamAnswer | None = None
        failed: AttemptFailed | None = None
        refused: QueueFullError | DeadlineError | None = None
        for number, route in enumerate(routes, 1):
            try:
                last = await self._ask(request, route, closing, others=number < len(routes))
            except AttemptFailed as error:
                failed = error if failed is None or failed.kind in _AWAY else failed
                if error.kind not in _AWAY:  # what is left alone has its line
                    _log_failover(request, routes[number - 1 :], error.kind)
                continue
            except (QueueFullError, DeadlineError) as error:
                refused = refused or error
                if time.monotonic() >= request.deadline_s:
                    break
                continue
            if not _retriable(last.status):
                break
            _log_failover(request, routes[number - 1 :], f"status {last.status}")
        if last is not None:
            return last
        if refused is not None and (failed is None or failed.kind in _AWAY):
            raise refused
        assert failed is not None, "there is at least one route"
        raise self._error(request.model or request.only, request.lane, routes, failed)

    async def _ask(self, request: UpstreamRequest, route: Route, closing: ExitStack, *, others: bool) -> UpstreamAnswer:
        """One upstream, in a place where one is needed. Raises AttemptFailed when it never answered, QueueFullError and
        DeadlineError when an online request got no place."""
        upstream = self._by_name[route.upstream]
        if request.lane == "online" and upstream.online is None:
            return await self._try(request, route, closing, others=others)
        with ExitStack() as place:
            placed = await take_place(request, upstream, place, self._max_wait_s, others=others)
            answer = await self._try(placed, route, closing, others=others)
            if answer.status < 400:  # its body is still to come
                closing.enter_context(place.pop_all())
            return answer

    async def _try(self, request: UpstreamRequest, route: Route, closing: ExitStack, *, others: bool) -> UpstreamAnswer:
        """One upstream, as often as it may be tried. Raises AttemptFailed when it never answered."""
        upstream = self._by_name[route.upstream]
        body, metered, hint = await off_loop(request.work, lambda: body_for(request, route, upstream))
        upstream.hints += hint
        last: UpstreamAnswer | None = None
        for attempt in range(upstream.settings.retries + 1):
            again = attempt < upstream.settings.retries
            try:
                opened = await self._open(request, route, upstream, body)
                closing.callback(opened.close)
                if opened.status < 400:
                    return self._good_answer(opened, request, route, take_usage_out=metered)
                last = await self._error_answer(opened, request, route, upstream)
            except AttemptFailed as error:
                if last is not None:
                    return last
                if not (again and error.again and await self._pause(request, upstream, attempt, None, others=others)):
                    raise
                continue
            again = again and _retriable(last.status) and not opened.final
            if not (again and await self._pause(request, upstream, attempt, opened.retry_after_s, others=others)):
                return last
        assert last is not None, "the last attempt returned or raised"
        return last

    async def _open(self, request: UpstreamRequest, route: Route, upstream: Upstream, body: bytes) -> Opened:
        if not upstream.breaker.admit():
            raise AttemptFailed("open", f"{upstream.name} is left alone", again=False)
        trace = request.trace
        trace.retries += trace.engine is not None
        trace.engine, trace.by_upstream = upstream.name, True
        return await upstream.open(request, route.model, body)

    def _good_answer(
        self, opened: Opened, request: UpstreamRequest, route: Route, *, take_usage_out: bool
    ) -> UpstreamAnswer:
        pieces, headers = opened.pieces(request), opened.headers
        max_bytes = self._by_name[route.upstream].settings.max_metered_bytes
        if request.made is not None and opened.status == 200:
            told = partial(request.made, route.upstream)
            pieces = telling_ids(pieces, told, stream=opened.is_stream, max_bytes=max_bytes)
        if take_usage_out and opened.is_plain_stream:
            pieces = without_usage(pieces, max_bytes)
            headers = tuple(item for item in headers if item[0].lower() != "content-length")
        return UpstreamAnswer(route.upstream, opened.status, headers, pieces, self._label(request, route))

    async def _error_answer(
        self, opened: Opened, request: UpstreamRequest, route: Route, upstream: Upstream
    ) -> UpstreamAnswer:
        """With its whole body, so that others can be asked first. Raises AttemptFailed where our key is in it."""
        body = await opened.whole(request, upstream.settings.max_error_bytes)
        headers = tuple(item for item in opened.headers if item[0].lower() != "content-length")
        headers += (("Content-Length", str(len(body))),)
        return UpstreamAnswer(upstream.name, opened.status, headers, _once(body), route.pattern, opened.retry_after_s)

    async def _pause(
        self, request: UpstreamRequest, upstream: Upstream, attempt: int, asked_s: float | None, *, others: bool
    ) -> bool:
        """Waits until the next try. False at once when that would be too long, or when the upstream asks for time and
        somebody else can be asked instead, or wants no lines of batches now."""
        if (asked_s is not None and others) or (request.lane == "batch" and upstream.batch_slots.wait_s()):
            return False
        wait_s = self._backoff_s * 2**attempt * random.uniform(0.5, 1.0) if asked_s is None else asked_s  # noqa: S311
        if wait_s > upstream.settings.retry_max_s or time.monotonic() + wait_s >= request.deadline_s:
            return False
        await asyncio.sleep(wait_s)
        return True

    def _label(self, request: UpstreamRequest, route: Route) -> str:
        """Of a model that its upstream has answered for."""
        name, tenant = request.model, request.tenant.name
        if name != route.pattern and name not in self._labels:
            full = len(self._labels) >= MAX_LABELS or self._labels_of[tenant] >= MAX_LABELS_OF_ONE
            if full or len(name) > MAX_LABEL_CHARS:
                return route.pattern
            self._labels.add(name)
            self._labels_of[tenant] += 1
        return name

    def _error(self, model: str, lane: Lane, routes: Sequence[Route], failed: AttemptFailed) -> KvasirError:
        if failed.kind in _AWAY:
            return UpstreamsAwayError(model, min(self._wait_s(route, lane) for route in routes))
        kind = UpstreamTimeoutError if failed.kind == "timeout" else UpstreamLostError
        error = kind(f"No upstream answered for `{model}`: {failed.why}.")
        error.begun = failed.kind not in _UNBEGUN
        return error

    def _wait_s(self, route: Route, lane: Lane) -> float:
        upstream = self._by_name[route.upstream]
        held_off_s = upstream.batch_slots.wait_s() if lane == "batch" else 0.0
        return max(upstream.breaker.wait_s(), held_off_s) or BUSY_S


_AWAY: Final = ("open", "busy")
"""Kinds of attempts that were not made."""

_UNBEGUN: Final = ("connect", "key", "redirect")
"""Kinds of failures after which nobody has begun to work on the request."""


def _log_failover(request: UpstreamRequest, routes: Sequence[Route], failure: str) -> None:
    """That the first one failed and the next one is asked. The log writes so many of these in a minute."""
    if len(routes) > 1:
        failed, other = routes[0].upstream, routes[1].upstream
        log.warning("upstream %s failed request %s (%s): %s is asked", failed, request.request_id, failure, other)


def _retriable(status: int) -> bool:
    """Whether the same request may be answered by another try, or by somebody else."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    if body:
        yield body


_TITLES: Final = {
    "openai": ("OpenAI", "POST /v1/chat/completions"),
    "anthropic": ("Anthropic", "POST /v1/messages"),
    "gemini": ("Google Gen AI", "POST /v1beta/models/{model}:generateContent"),
}


def _other_dialect(model: str, dialect: str) -> BadRequestError:
    sdk, path = _TITLES[dialect]
    return BadRequestError(
        f"The model `{model}` is served by an upstream that speaks another API, and requests are not translated: "
        f"ask for it with the {sdk} SDK ({path}).",
        param="model",
        code="wrong_api",
    )
