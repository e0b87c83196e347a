"""Sends a request to the upstreams of its model, with retries, fallbacks and circuit breakers.

    1. the upstreams of the model that speak the request's dialect, in order (routes.py)
    2. one that failed too often is left out for a while (breaker.py)
    3. where slots are bounded an online request waits for its turn, and a line of a batch always for what online
       requests leave (slots.py); without a slot it goes on to the next upstream
    4. each is tried `retries` times more, until the first byte of an answer is there (answer.py)
    5. the last error that an upstream answered is the answer, where none did better

Nothing is tried again once an answer has begun. When the settings change, requests in flight keep the upstreams that
they began with, whose connections are closed behind the last of them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
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
from gateway.tasks import off_loop, spawn
from gateway.types import UpstreamAnswer, UpstreamRequest, elapsed_ms
from gateway.upstreams.answer import Answer, open_answer, without
from gateway.upstreams.apis import APIS
from gateway.upstreams.bodies import body_for
from gateway.upstreams.cached_prefixes import ALONE, GONE, Cached, Shared
from gateway.upstreams.connections import AttemptFailed
from gateway.upstreams.routes import Route, Routes
from gateway.upstreams.stored import Accounts
from gateway.upstreams.upstream import Closing, Upstream

log = logging.getLogger(__name__)

MAX_LABEL_CHARS: Final = 256
"""Longest model name that becomes a label of metrics, a row of the ledger and a field of the log."""

MAX_LABELS_OF_ONE: Final = 250
"""Labels that the requests of one tenant may add."""

MAX_LABELS: Final = 1000
"""Labels for models that were found by a pattern; further ones are counted under the pattern."""

BUSY_S: Final = 1.0
"""Retry-After when no upstream has a free connection."""


@dataclass(slots=True, eq=False)
class UpstreamSet:
    """The upstreams of one state of the settings. `requests` are in flight that began with it."""

    by_name: Mapping[str, Upstream]
    routes: Routes
    accounts: Accounts
    requests: int = 0


class Upstreams:
    """Sends requests to upstreams, with retries, fallbacks and circuit breakers. `keys`: upstream name -> API key."""

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
        shared: Shared = ALONE,
    ) -> None:
        """proxies    URLs of proxies in front of upstreams, by name
        queue      the limits for requests that wait for a slot
        num_tenants  that are configured
        shared     what gateways know together
        backoff_s  how long the first retry waits where the upstream does not say
        """
        self._make = partial(Upstream, queue=queue or QueueSettings(), clock=clock, shared=shared)
        self._now = UpstreamSet({}, Routes(()), Accounts((), {}, 0))
        self._old: list[UpstreamSet] = []  # with requests in flight
        self._started = False
        self.use(self.plan(settings, keys, proxies or {}, num_tenants))
        self._backoff_s = backoff_s
        self._labels: set[str] = set()
        self._labels_of: Counter[str] = Counter()  # by the tenant whose request was the first
        self._began = int(time.time())

    def plan(
        self,
        settings: Sequence[UpstreamSettings],
        keys: Mapping[str, str],
        proxies: Mapping[str, str],
        num_tenants: int,
    ) -> UpstreamSet:
        """Upstreams of other settings, for `use`. Those of whom nothing is changed are the same as now."""
        by_name: dict[str, Upstream] = {}
        for one in settings:
            made_of = one, keys.get(one.name), proxies.get(one.name)
            now = self._now.by_name.get(one.name)
            same = now is not None and now.made_of == made_of
            by_name[one.name] = now if now is not None and same else self._make(*made_of)
        return UpstreamSet(by_name, Routes(settings), Accounts(settings, keys, num_tenants))

    def use(self, new: UpstreamSet) -> None:
        """Requests that begin from now on are for these. Never fails."""
        old, self._now = self._now, new
        for name, upstream in new.by_name.items():
            if (before := old.by_name.get(name)) is upstream:
                continue
            if before is not None:
                upstream.succeed(before)
            if self._started:
                upstream.start()
        self._old.append(old)
        self._close_unused()

    def serves(self, model: str, tenant: str, *, ours: bool) -> bool:
        """Whether a request for a model goes to an upstream. `ours`: an engine, or the embedder, serves it as well."""
        return any(route.over_engines or not ours for route in self._now.routes.find(model, tenant))

    def routes(self, model: str, tenant: str) -> Sequence[Route]:
        """In the order in which they are tried, whatever their dialect."""
        return self._now.routes.find(model, tenant)

    def speaks(self, model: str, tenant: str, dialect: str, path: str) -> bool:
        """Whether an upstream of the model has the path of a dialect, so that nothing has to be translated."""
        return any(route.speaks(dialect, path) for route in self._now.routes.find(model, tenant))

    def reachable(self, model: str, tenant: str) -> Mapping[str, bool]:
        """Its upstreams, by name -> whether they can be asked now, as far as is known."""
        routes = self._now.routes.find(model, tenant)
        return {route.upstream: not self._now.by_name[route.upstream].breaker.wait_s() for route in routes}

    def models(self, tenant: str) -> Mapping[str, int]:
        """Those that can be named -> Unix second since when they are served."""
        listed = {name: upstream.models for name, upstream in self._now.by_name.items()}
        return dict.fromkeys(self._now.routes.listed(tenant, listed), self._began)

    def hosts(self, model: str) -> Sequence[tuple[str, str]]:
        """URL and own name of a model at each upstream that may answer for it, for some tenant."""
        routes = self._now.routes.of_all(model)
        return [(self._now.by_name[route.upstream].settings.url, route.model) for route in routes]

    def route_text(self, model: str, tenant: str) -> str:
        """Which upstreams and models answer for a model; another text when the settings change."""
        routes = self._now.routes.find(model, tenant)
        return "\n".join(
            f"{route.upstream} {self._now.by_name[route.upstream].settings.url} {route.model}" for route in routes
        )

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """By upstream, for metrics and /admin/stats."""
        return {name: upstream.figures() for name, upstream in self._now.by_name.items()}

    def start(self) -> None:
        """Begins to read the upstreams' lists of models. Needs a running event loop."""
        self._started = True
        for upstream in self._now.by_name.values():
            upstream.start()

    async def close(self) -> None:
        for upstream in {one for used in (self._now, *self._old) for one in used.by_name.values()}:
            await upstream.close()

    def _close_unused(self) -> None:
        """Closes the upstreams that are none of the settings' any more, and no request's."""
        done = [used for used in self._old if not used.requests]
        self._old = [used for used in self._old if used.requests]
        needed = {one for used in (self._now, *self._old) for one in used.by_name.values()}
        for upstream in {one for used in done for one in used.by_name.values()} - needed:
            spawn(upstream.close(), f"close upstream {upstream.name}")

    def _ended(self, used: UpstreamSet) -> None:
        """A request that began with these."""
        used.requests -= 1
        if used is not self._now and not used.requests:
            self._close_unused()

    def answer(self, request: UpstreamRequest) -> AbstractAsyncContextManager[UpstreamAnswer]:
        """The answer, once its first byte is there; leaving the context ends the request at the upstream.

        Raises ModelNotFoundError, NotFoundError, BadRequestError and OverloadedError before any upstream was tried,
        QueueFullError and DeadlineError when there was no slot, UpstreamsAwayError, UpstreamLostError and
        UpstreamTimeoutError when none answered.
        """
        return _Asked(self._begin, request)

    async def _begin(self, request: UpstreamRequest, closing: Closing) -> UpstreamAnswer:
        used = self._now
        used.requests += 1
        closing.append(partial(self._ended, used))
        request.trace.looked_up_ms = elapsed_ms(request)
        routes = await used.accounts.routes_for(request, _routes_of(request, used.routes))
        request.trace.overhead_ms = elapsed_ms(request)
        answer = await self._first_good(request, routes, used.by_name, closing)
        if answer.status < 400:
            request.trace.first_token_ms = elapsed_ms(request)
        return answer

    async def _first_good(
        self, request: UpstreamRequest, routes: Sequence[Route], by_name: Mapping[str, Upstream], closing: Closing
    ) -> UpstreamAnswer:
        """The first answer that is no failure of its upstream; else the last failure that was answered. What was opened
        is closed with `closing`."""
        last: UpstreamAnswer | None = None
        failed: AttemptFailed | None = None
        refused: QueueFullError | DeadlineError | None = None
        for number, route in enumerate(routes, 1):
            try:
                last = await self._attempt(
                    request, route, by_name[route.upstream], closing, others=number < len(routes)
                )
            except AttemptFailed as error:
                failed = error if failed is None or failed.kind in _AWAY else failed
                if error.kind not in _AWAY:  # the breaker has logged
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
        waits_s = [_wait_s(by_name[route.upstream], request.lane) for route in routes]
        raise _error(request.model or request.only, waits_s, failed)

    async def _attempt(
        self, request: UpstreamRequest, route: Route, upstream: Upstream, closing: Closing, *, others: bool
    ) -> UpstreamAnswer:
        """One upstream, in a slot where one is needed, as often as it may be tried. Raises AttemptFailed when it never
        answered, QueueFullError and DeadlineError when an online request got no slot."""
        settings, slot = upstream.settings, Closing()
        try:
            latest_s = await upstream.take_slot(request, slot, others=others)
            body = await _Body.of(request, route, upstream)
            last: UpstreamAnswer | None = None
            failed: AttemptFailed | None = None
            for attempt in range(settings.retries + 1):
                retry_after_s = None
                try:
                    answer = await self._open(request, route, upstream, body, latest_s)
                    closing.append(answer.close)
                    if answer.status < 400:
                        closing += slot  # its body is still to come
                        slot.clear()
                        return self._good_answer(answer, request, route, hides_usage=body.hides_usage)
                    last = await self._error_answer(answer, route, upstream)
                    again, retry_after_s = _retriable(last.status) and not answer.final, answer.retry_after_s
                except AttemptFailed as error:
                    failed, again = error, error.again
                if not again or attempt == settings.retries:
                    break
                if not await self._pause(request, upstream, attempt, retry_after_s, others=others):
                    break
        finally:
            _close(slot)
        if last is not None:
            return last
        assert failed is not None, "the last attempt brought an answer or failed"
        raise failed

    async def _open(
        self, request: UpstreamRequest, route: Route, upstream: Upstream, body: _Body, latest_s: float
    ) -> Answer:
        if not upstream.breaker.admit():
            raise upstream.breaker_open()
        trace = request.trace
        trace.retries += trace.engine is not None
        trace.engine, trace.by_upstream = upstream.name, True
        answer = await open_answer(upstream, request, route.model, body.sent, latest_s)
        if body.cached is None or answer.status not in GONE:
            return answer
        answer.close()  # what it was to read is not there any more
        await upstream.prefixes.forget(body.cached)
        await body.read_nothing(request, route, upstream)
        return await self._open(request, route, upstream, body, latest_s)

    def _good_answer(
        self, answer: Answer, request: UpstreamRequest, route: Route, *, hides_usage: bool
    ) -> UpstreamAnswer:
        hides_usage = hides_usage and answer.is_stream
        headers = without(answer.headers, "content-length") if hides_usage else answer.headers
        chunks = answer.chunks(hides_usage=hides_usage)
        return UpstreamAnswer(route.upstream, answer.status, headers, chunks, self._label(request, route))

    async def _error_answer(self, answer: Answer, route: Route, upstream: Upstream) -> UpstreamAnswer:
        """With its whole body, so that another upstream can be tried first. Raises AttemptFailed where our key is in
        it."""
        body = await answer.whole(upstream.settings.max_error_bytes)
        headers = (*without(answer.headers, "content-length"), ("Content-Length", str(len(body))))
        return UpstreamAnswer(upstream.name, answer.status, headers, _once(body), route.pattern, answer.retry_after_s)

    async def _pause(
        self, request: UpstreamRequest, upstream: Upstream, attempt: int, retry_after_s: float | None, *, others: bool
    ) -> bool:
        """Waits until the next try. False at once when that would be too long, or when the upstream asks for time and
        another one can be tried instead, or takes no lines of batches now."""
        if (retry_after_s is not None and others) or (request.lane == "batch" and upstream.slots.held_off_s()):
            return False
        backoff_s = self._backoff_s * 2**attempt * random.uniform(0.5, 1.0)  # noqa: S311
        wait_s = backoff_s if retry_after_s is None else retry_after_s
        if wait_s > upstream.settings.retry_max_s or time.monotonic() + wait_s >= request.deadline_s:
            return False
        await asyncio.sleep(wait_s)
        return True

    def _label(self, request: UpstreamRequest, route: Route) -> str:
        """The model's name in metrics, once its upstream has answered for it."""
        name, tenant = request.model, request.tenant.name
        if name != route.pattern and name not in self._labels:
            full = len(self._labels) >= MAX_LABELS or self._labels_of[tenant] >= MAX_LABELS_OF_ONE
            if full or len(name) > MAX_LABEL_CHARS:
                return route.pattern
            self._labels.add(name)
            self._labels_of[tenant] += 1
        return name


def _routes_of(request: UpstreamRequest, known: Routes) -> list[Route]:
    tenant = request.tenant.name
    if request.only:
        if named := known.named(request.only, tenant):
            return named
        raise NotFoundError("The upstream that keeps this response is not there any more.")
    routes = known.find(request.model, tenant)
    if not routes:
        raise ModelNotFoundError(request.model)
    if spoken := [route for route in routes if route.speaks(request.dialect, request.path)]:
        return spoken
    raise _other_dialect(request.model, routes[0].dialect)


def _error(model: str, waits_s: Sequence[float], failed: AttemptFailed) -> KvasirError:
    """`waits_s`: until each of the upstreams may be asked again."""
    if failed.kind in _AWAY:
        return UpstreamsAwayError(model, min(waits_s))
    kind = UpstreamTimeoutError if failed.kind == "timeout" else UpstreamLostError
    error = kind(f"No upstream answered for `{model}`: {failed.why}.")
    error.begun = failed.kind not in _UNBEGUN
    return error


def _wait_s(upstream: Upstream, lane: Lane) -> float:
    held_off_s = upstream.slots.held_off_s() if lane == "batch" else 0.0
    return max(upstream.breaker.wait_s(), held_off_s) or BUSY_S


class _Body:
    """What an upstream is sent. `cached` is what it reads of a cache that the gateway keeps there."""

    def __init__(self, cached: Cached | None) -> None:
        self.cached = cached
        self.sent = b""
        self.hides_usage = False

    @classmethod
    async def of(cls, request: UpstreamRequest, route: Route, upstream: Upstream) -> _Body:
        request.trace.created = (0.0, 0)
        body = cls(await upstream.prefixes.find(request, route.model))
        upstream.hints += body.cached is not None
        await body._write(request, route, upstream)
        return body

    async def read_nothing(self, request: UpstreamRequest, route: Route, upstream: Upstream) -> None:
        self.cached, request.trace.created = None, (0.0, 0)
        await self._write(request, route, upstream)

    async def _write(self, request: UpstreamRequest, route: Route, upstream: Upstream) -> None:
        cached, settings = self.cached, upstream.settings
        self.sent, self.hides_usage, hint = await off_loop(
            request.work,
            lambda: body_for(cached.applied(request) if cached else request, route, settings, upstream.seen),
        )
        upstream.hints += hint


class _Asked:
    """What asynccontextmanager would make of a generator, in a third of its calls."""

    def __init__(
        self, begin: Callable[[UpstreamRequest, Closing], Awaitable[UpstreamAnswer]], request: UpstreamRequest
    ) -> None:
        self._begin, self._request = begin, request
        self._closing = Closing()  # an answer that was never read closes nothing by itself

    async def __aenter__(self) -> UpstreamAnswer:
        try:
            self._answer = await self._begin(self._request, self._closing)
        except BaseException:
            _close(self._closing)
            raise
        return self._answer

    async def __aexit__(self, *_: object) -> None:
        try:
            await self._answer.chunks.aclose()
        finally:
            _close(self._closing)


def _close(closing: Closing) -> None:
    while closing:
        closing.pop()()


_AWAY: Final = ("open", "busy")
"""Kinds of failures where nothing was sent."""

_UNBEGUN: Final = ("connect", "key", "redirect")
"""Kinds of failures before the upstream began to work on the request."""


def _log_failover(request: UpstreamRequest, routes: Sequence[Route], failure: str) -> None:
    """Logs that the first route failed and the next one is tried."""
    if len(routes) > 1:
        failed, other = routes[0].upstream, routes[1].upstream
        log.warning("upstream %s failed request %s (%s): %s is tried", failed, request.request_id, failure, other)


def _retriable(status: int) -> bool:
    """Whether the same request may be answered by another try, or by another upstream."""
    return status in (408, 429) or (status >= 500 and status not in (501, 505))


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    if body:
        yield body


def _other_dialect(model: str, dialect: str) -> BadRequestError:
    return BadRequestError(
        f"The model `{model}` is served by an upstream that speaks another API, into which this request cannot be "
        f"translated: ask for it with {APIS[dialect].how_to_ask}.",
        param="model",
        code="wrong_api",
    )
