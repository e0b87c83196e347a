"""Sends a request for an alias to its targets, one after the other, until the first byte of an answer.

The order is that of routing.py. The next target is tried where the one before cannot be reached, has too much to do,
fails, is too small for the prompt, or gives an answer that does not pass a check (`cascade`). What is wrong with the
request itself is the client's to know: no other target is tried.

What is known of targets (times, upstreams that asked for a pause, conversations that went elsewhere) is this process's
own; the hash of a conversation is the same everywhere.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from gateway.api.aliases import Aliases
from gateway.api.body import RAW
from gateway.api.checks import Check
from gateway.api.facts import facts_of
from gateway.api.fallback import context_of, why_another
from gateway.api.passthrough import Passthrough
from gateway.api.record import BODY, RECORD, TENANT, ChosenTarget, Record, Spent
from gateway.api.routing import Facts, Order, State, choose_order
from gateway.config import ALL_TENANTS, AliasSettings
from gateway.digests import dump
from gateway.errors import CheckFailedError, KvasirError, ModelNotFoundError, UpstreamRefusedError
from gateway.tasks import off_loop
from gateway.types import Replay, Tenant, elapsed_ms

log = logging.getLogger(__name__)

Attempt = Callable[[], Awaitable[web.StreamResponse]]

NEW_SHARE: Final = 0.2
"""Weight of a new time in a target's figure."""

RECENT_S: Final = 300.0
"""For which the figure of a target counts; then it is measured anew."""

MAX_PAUSE_S: Final = 60.0
"""That a target is tried last, at most, when an upstream asks for time."""

MAX_STICKY: Final = 20_000
"""Conversations that are remembered because they went to another target than that of their key."""

_CHECKED: Final = frozenset(("/v1/chat/completions", "/v1/responses", "/v1/messages", ":generateContent"))
"""Routes whose answers a check can read, but for responses in the background, from which there is no going back."""

_BY_FACTS: Final = frozenset(("cheapest", "weighted", "affinity"))
_MODEL: Final = re.compile(rb'"model"(?:\s*:\s*("(?:[^"\\]|\\.)*"))?')
_ESCAPED: Final = re.compile(rb"\\u006")


class Measured(NamedTuple):
    """Milliseconds to the first token (exponentially weighted), and when the last was measured."""

    ms: float
    at_s: float


@dataclass(slots=True)
class TargetHistory:
    """Of a model. Streams and whole answers, which have no first token for their client, are not compared."""

    times: dict[bool, Measured] = field(default_factory=dict)  # by whether it was a stream
    paused_until_s: float = 0.0


class Router:
    """Tries the targets of aliases. An Observer, which measures them."""

    def __init__(
        self,
        aliases: Aliases,
        passthrough: Passthrough,
        tenants: Sequence[str],
        *,
        cost: Callable[[str, int, int], int | None],
        replays: Mapping[str, Replay],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """tenants  that are configured
        cost     of so many tokens of prompt and answer of a model, by [[prices]]
        replays  by route, as for the response cache
        """
        self._aliases = aliases
        self._passthrough = passthrough
        self._cost = cost
        self._replays = replays
        self._clock = clock
        self._draw = draw
        self._history: defaultdict[str, TargetHistory] = defaultdict(TargetHistory)
        self.replace(tenants)
        self._requests: Counter[tuple[str, str]] = Counter()
        self._sticky: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def replace(self, tenants: Sequence[str]) -> None:
        """The tenants are others now, or the aliases. What is known of targets that stay is kept; a request in flight
        may make a history of one that is none any more."""
        self._tenants = tenants
        targets = {target.model for alias in self._aliases for target in alias.models}
        kept = {model: self._history[model] for model in targets}
        self._history.clear()
        self._history.update(kept)

    def find(self, http: web.Request) -> AliasSettings | None:
        """The alias that a request with a parsed body asks for."""
        asked = http.match_info["model"] if "model" in http.match_info else http[BODY].get("model")
        if not isinstance(asked, str):
            return None
        return self._aliases.find(asked.removeprefix("models/"), http[TENANT].name)

    async def answer(
        self, http: web.Request, alias: AliasSettings, attempt: Attempt, *, generates: bool
    ) -> web.StreamResponse:
        """The first answer. Raises the last error, while nothing was sent.

        attempt    answers for the model that the request has then
        generates  whether any target may answer it; others go to the first one that is up
        """
        record, body, raw = http[RECORD], http[BODY], http[RAW]
        if len(alias.models) == 1:
            return await self._try(http, alias, alias.models[0].model, "only", attempt, body, raw)
        facts = Facts()
        if alias.policy in _BY_FACTS or any(target.is_limited for target in alias.models):
            tenant = http[TENANT].name
            facts = await off_loop(record.work, lambda: facts_of(body, len(raw), tenant))
        order = await self._order(http, alias, facts, generates=generates)
        left, reason, failed = list(order.models), order.reason, None
        while True:
            model = left.pop(0)
            try:
                response = await self._try(http, alias, model, reason, attempt, body, raw, others=bool(left))
            except KvasirError as error:
                why = why_another(error, checked=record.target is not None and record.target.check is not None)
                self._note_pause(model, error)
                left = [other for other in left if self._has_room(other, error)]
                if why is None or not left or self._clock() >= record.received_s + self._passthrough.timeout_s:
                    raise failed if failed is not None and isinstance(error, ModelNotFoundError) else error from None
                if not isinstance(error, CheckFailedError):
                    text = "request %s: %s failed it (%s), %s is tried"
                    log.warning(text, record.request_id, model, type(error).__name__, left[0])
                record.spent.append(Spent(record.model, record.traces))
                reason, failed = why, error
            else:
                if alias.policy == "affinity" and facts.key:
                    self._stick(alias, facts.key, model, reason)
                return response

    def line_target(self, name: str, tenant: Tenant, dialect: str, path: str, *, translated: bool) -> str:
        """The model for a line of a batch: the first target that can answer it now."""
        if (alias := self._aliases.find(name, tenant.name)) is None:
            return name
        models = [target.model for target in alias.models]
        up = (model for model in models if self._is_up(model, tenant))
        return next((model for model in up if translated or self._speaks(model, tenant, dialect, path)), models[0])

    def started(self, record: Record) -> None:
        """Nothing is known yet."""

    def finished(self, record: Record) -> None:
        """Measures the target that answered, whether it was asked for by an alias or by its name."""
        target = record.target
        if target is not None:
            self._requests[target.alias, target.model] += 1
        history = self._history.get(target.model if target is not None else record.model or "")
        firsts = [trace.first_token_ms for trace in record.traces if trace.hit is None]
        if history is None or record.status != 200 or record.lane == "batch" or not firsts or None in firsts:
            return
        ms = min(one for one in firsts if one is not None) if record.stream else record.total_ms
        ms -= target.begun_ms if target is not None else 0.0
        known = self._recent(history, stream=record.stream)
        ms = max(0.0, ms) if known is None else known + NEW_SHARE * (max(0.0, ms) - known)
        history.times[record.stream] = Measured(ms, self._clock())

    def figures(self) -> dict[str, Any]:
        """Of each alias, for /admin/stats."""
        return {
            alias.name: {
                "policy": alias.policy,
                "targets": {target.model: self._figures_of(alias, target.model) for target in alias.models},
            }
            for alias in self._aliases
        }

    def _figures_of(self, alias: AliasSettings, model: str) -> dict[str, Any]:
        history = self._history[model]
        tenants = self._tenants if ALL_TENANTS in alias.tenants else alias.tenants
        times = {"first_token_ms": True, "whole_answer_ms": False}
        return {
            "up": any(self._is_up(model, Tenant(name)) for name in tenants),
            "requests": self._requests[alias.name, model],
            **{name: round(history.times[of].ms, 1) for name, of in times.items() if of in history.times},
        }

    async def _try(
        self,
        http: web.Request,
        alias: AliasSettings,
        model: str,
        reason: str,
        attempt: Attempt,
        body: dict[str, Any],
        raw: bytes,
        *,
        others: bool = False,
    ) -> web.StreamResponse:
        """The answer of this target. `others`: another one may follow."""
        record = http[RECORD]
        record.model, record.traces, record.stream = None, [], False
        check = None
        if alias.policy == "cascade" and others:
            check = Check(alias, body, self._replays.get(_route_of(record.endpoint)))
        record.target = ChosenTarget(
            alias=alias.name,
            policy=alias.policy,
            model=model,
            reason=reason,
            begun_ms=elapsed_ms(record),
            is_only=len(alias.models) == 1,
            has_others=others,
            check=check,
        )
        if "model" in http.match_info:
            http.match_info["model"], http[RAW] = model, raw
        else:
            http[BODY], http[RAW] = {**body, "model": model}, raw
            if self._passthrough.serves(model, http[TENANT]):
                http[RAW] = await off_loop(record.work, lambda: renamed(raw, body, model))
        return await attempt()

    async def _order(self, http: web.Request, alias: AliasSettings, facts: Facts, *, generates: bool) -> Order:
        body, tenant, record = http[BODY], http[TENANT], http[RECORD]
        models = [target.model for target in alias.models]
        states = {
            model: State(
                self._is_up(model, tenant),
                self._recent(self._history[model], stream=_streams(http)),
                self._cost(model, facts.prompt_tokens, facts.completion_tokens) if alias.policy == "cheapest" else None,
            )
            for model in models
        }
        stored = body.get("previous_response_id")
        if isinstance(stored, str):
            holding = await self._holding(stored, models, tenant, record)
            return Order(tuple(sorted(holding, key=lambda model: not states[model].up)), "stored")
        if not generates or "cachedContent" in body:  # what is made for one model is no other's
            return Order((next((model for model in models if states[model].up), models[0]),), "first")
        if alias.policy == "cascade" and (body.get("background") is True or _route_of(record.endpoint) not in _CHECKED):
            return Order((models[-1],), "unchecked")
        sticky = self._stuck(alias, facts.key) if alias.policy == "affinity" else ""
        return choose_order(alias, facts, states, sticky=sticky, draw=self._draw())

    async def _holding(self, stored: str, models: Sequence[str], tenant: Tenant, record: Record) -> Sequence[str]:
        """Those that have a response: at the upstream that made it, or here, where none of their upstreams is asked in
        the client's own API."""
        made_by = await self._passthrough.responses.find_upstream(tenant.name, stored)
        upstreams, dialect, path = self._passthrough.upstreams, record.dialect.name, record.endpoint
        if made_by is not None:
            holding = [model for model in models if made_by in upstreams.reachable(model, tenant.name)]
        else:
            holding = [model for model in models if not self._passes(model, tenant, dialect, path)]
        return holding or models

    def _passes(self, model: str, tenant: Tenant, dialect: str, path: str) -> bool:
        """Whether its requests go on to an upstream as they are."""
        return self._passthrough.serves(model, tenant) and self._speaks(model, tenant, dialect, path)

    def _speaks(self, model: str, tenant: Tenant, dialect: str, path: str) -> bool:
        """True for what is ours."""
        upstreams = self._passthrough.upstreams
        return not self._passthrough.serves(model, tenant) or upstreams.speaks(model, tenant.name, dialect, path)

    def _is_up(self, model: str, tenant: Tenant) -> bool:
        if self._clock() < self._history[model].paused_until_s:
            return False
        if self._passthrough.serves(model, tenant):
            return any(self._passthrough.upstreams.reachable(model, tenant.name).values())
        if model in self._passthrough.embedding_models:
            return True
        with suppress(KvasirError):
            return bool(self._passthrough.registry.serving(model))
        return False

    def _has_room(self, model: str, error: KvasirError) -> bool:
        """Whether a prompt that was too long for another target may fit. That is not known of upstreams."""
        if not (most := context_of(error)):
            return True
        with suppress(KvasirError):
            return self._passthrough.registry.serving(model)[0].hello.context_tokens > most
        return True

    def _note_pause(self, model: str, error: KvasirError) -> None:
        if isinstance(error, UpstreamRefusedError) and error.retry_after_s is not None and error.status in (429, 503):
            self._history[model].paused_until_s = self._clock() + min(error.retry_after_s, MAX_PAUSE_S)

    def _recent(self, history: TargetHistory, *, stream: bool) -> float | None:
        measured = history.times.get(stream)
        return None if measured is None or self._clock() - measured.at_s > RECENT_S else measured.ms

    def _stuck(self, alias: AliasSettings, key: bytes) -> str:
        """Where a conversation went before; empty where it is where its key says."""
        model, until_s = self._sticky.get(alias.name.encode() + key, ("", 0.0))
        return model if self._clock() < until_s else ""

    def _stick(self, alias: AliasSettings, key: bytes, model: str, reason: str) -> None:
        """A conversation that had to go elsewhere is cached there now, and stays."""
        key = alias.name.encode() + key
        self._sticky.pop(key, None)
        if reason != "affinity":
            self._sticky[key] = model, self._clock() + alias.sticky_s
            if len(self._sticky) > MAX_STICKY:
                self._sticky.popitem(last=False)


def renamed(raw: bytes, body: Mapping[str, Any], model: str) -> bytes:
    """A body with another model: the same bytes but for its name, unless it is not certain where that is."""
    found = _MODEL.search(raw)
    may_be_escaped = b"\\" in raw and _ESCAPED.search(raw)
    if found is not None and found[1] and not may_be_escaped and not _MODEL.search(raw, found.end()):
        return b"".join((raw[: found.start(1)], orjson.dumps(model), raw[found.end() :]))
    return dump({**body, "model": model})


def _streams(http: web.Request) -> bool:
    return http.path.endswith(":streamGenerateContent") or http[BODY].get("stream") is True


def _route_of(endpoint: str) -> str:
    """As the response cache names it."""
    return ":generateContent" if endpoint.endswith((":generateContent", ":streamGenerateContent")) else endpoint
