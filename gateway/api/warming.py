"""Computes the prompts of [[warm]] when an engine or a replica comes up, and keeps them: a request without an answer in
the batch lane, with a breakpoint at the end of the prompt, sent again before that lease ends.

    target    an entry for one scope: computed once for all tenants that share blocks
    place     an incarnation of an engine; an engine that restarts is another place, which has nothing yet
    hosted    where an upstream serves the model and the entry says so: a request for one token, from one gateway of all
              that share a Redis, because it costs money

Several gateways each have an engine compute a target, which costs it nothing from the second one on. The ledger has all
that in the lane `audit`, where what is read from a cache is no saving. A target that fails is tried again, later each
time. `not_ready` holds the gateway's readiness back until one engine of each model has `server.min_warm` of its
targets. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import orjson

from engine.protocol import Hello, Sampling
from gateway import tasks
from gateway.api.aliases import Aliases
from gateway.api.answering import Answering
from gateway.api.call import Call
from gateway.api.openai.request import parse_chat
from gateway.api.openai.wire import OPENAI
from gateway.api.record import Record, failed, known_error
from gateway.api.replies import new_id
from gateway.config import ALL_TENANTS, ConfigError, LeaseSettings, ServerSettings, Settings, WarmSettings, duration_s
from gateway.errors import (
    BadRequestError,
    ForbiddenError,
    KvasirError,
    ModelNotFoundError,
    NoEngineError,
    RedisDownError,
)
from gateway.types import ANONYMOUS, ChatPrompt, Group, Marker, Reuse, Tenant, Trace, elapsed_ms

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
RENEW_SHARE: Final = 0.7
"""Of its time to live, after which a prefix is computed again: there is time to wait for an idle engine."""
RETRY_S: Final = 2.0
"""After the first failure; twice as long after each further one, up to MAX_RETRY_S."""
MAX_RETRY_S: Final = 300.0
MAX_REASON_CHARS: Final = 300
Audited = Callable[[str, str, Trace, float], None]

HOSTED: Final = "hosted"
"""The place of all upstreams."""

_BEHIND: Final = {"role": "user", "content": "."}
"""Behind a prompt that ends with no message of a user: several templates, and hosted APIs, refuse such a one."""


class Claims(Protocol):
    """What gateways that share a Redis do once. Both raise RedisDownError."""

    async def take(self, name: str, ttl_s: float) -> bool:
        """Whether this gateway is to do it; then no other is, for so long."""
        ...

    async def drop(self, name: str) -> None:
        """It has not done it."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """An entry in one scope. `source` says which prompt it is, without its text."""

    source: str
    entry: WarmSettings
    tenant: Tenant
    call: Call

    @property
    def ttl_s(self) -> float:
        return duration_s(self.entry.ttl)


@dataclass(slots=True)
class _State:
    """Of a target at a place."""

    next_s: float = 0.0  # by the clock: not before
    failures: int = 0  # since it was computed last
    why: str = ""
    computed_s: float | None = None  # Unix second
    tokens: int = 0
    cached_tokens: int = 0
    lease: str | None = None


class _Place(NamedTuple):
    """`name` of the engine, or HOSTED; `incarnation` as in Group."""

    name: str
    incarnation: str | None


class Warming:
    """Computes targets, from `start` to `stop`."""

    def __init__(
        self,
        server: ServerSettings,
        targets: Sequence[Target],
        answering: Answering,
        audited: Audited,
        claims: Claims | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        audited  called with tenant, model, trace and milliseconds: what it cost, which has saved nothing yet
        claims   None without others
        """
        self._server, self._answering, self._audited, self._claims = server, answering, audited, claims
        self._clock, self._wall = clock, wall
        self._began_s = clock()
        self._by_model: dict[str, list[Target]] = {}
        for target in targets:
            self._by_model.setdefault(target.call.model, []).append(target)
        self._states: dict[_Place, dict[Target, _State]] = {}
        self._computing: dict[_Place, asyncio.Task[None]] = {}
        self._is_ready = not (server.min_warm and targets)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Nothing happens without targets."""
        if self._by_model:
            self._task = tasks.spawn(self._run(), name="warm prompts")

    async def stop(self) -> None:
        await tasks.cancel(self._task)
        for task in list(self._computing.values()):
            await tasks.cancel(task)

    def warn_of_unknown_models(self) -> None:
        """When the first engines have joined: a line for each model that nothing can warm."""
        for model, targets in self._by_model.items():
            if self._find_places(model):
                continue
            if any(self._is_hosted(target) for target in targets):
                why = "only an upstream serves it; `hosted = true` has it cached there, which costs money"
            else:
                why = "nothing here serves it; they are computed when an engine does"
            log.warning("[[warm]]: %d prompts of model %s are not computed: %s", len(targets), model, why)

    # -- what is shown ------------------------------------------------------------------------------------------------

    def not_ready(self) -> str | None:
        """Why the gateway is not to be called ready yet. Never again, once there was no reason."""
        if self._is_ready:
            return None
        reason = next(self._cold(), None)
        if reason is not None and self._clock() - self._began_s < self._server.warm_timeout_s:
            return reason
        if reason is not None:
            log.warning("ready after %.0f s (server.warm_timeout_s), though %s", self._server.warm_timeout_s, reason)
        self._is_ready = True
        return None

    def figures(self) -> dict[str, Any]:
        """For /admin/stats; never a prompt."""
        prompts = [
            {
                "prompt": target.source,
                "model": model,
                "tenant": target.tenant.name,
                "namespace": target.entry.namespace,
                "ttl_s": target.ttl_s,
                "places": {
                    place.name: _shown(states[target]) for place, states in self._states.items() if target in states
                },
            }
            for model, targets in self._by_model.items()
            for target in targets
        ]
        return {"entries": len(prompts), "prompts": prompts}

    def _cold(self) -> Iterator[str]:
        for model, targets in self._by_model.items():
            wanted = math.ceil(self._server.min_warm * sum(not target.entry.hosted for target in targets))
            most = max(
                (self._num_warm(states, model) for place, states in self._states.items() if place.incarnation),
                default=0,
            )
            if most < wanted:
                yield f"no engine of {model} has {wanted} of its [[warm]] prompts: the best one has {most}"

    def _num_warm(self, states: Mapping[Target, _State], model: str) -> int:
        own = (target for target in states if target.call.model == model and not target.entry.hosted)
        return sum(states[target].computed_s is not None for target in own)

    # -- the work -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not tasks.was_cancelled():
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Begins what is due: one target at a time at each place."""
        now_s, places = self._clock(), dict[_Place, list[Target]]()
        for model in self._by_model:
            places |= self._find_places(model)
        self._states = {place: self._states.get(place, {}) for place in places}
        for place, targets in places.items():
            states = self._states[place]
            due = (target for target in targets if states.setdefault(target, _State()).next_s <= now_s)
            if place not in self._computing and (target := next(due, None)) is not None:
                computing = tasks.spawn(self._compute(place, target, states[target]), name=f"warm {place.name}")
                self._computing[place] = computing
                computing.add_done_callback(partial(self._end, place))
        self.not_ready()

    def _end(self, place: _Place, _: asyncio.Task[None]) -> None:
        del self._computing[place]

    async def settled(self) -> None:
        """Returns when nothing is being computed."""
        while self._computing:
            await asyncio.wait(self._computing.values())

    def _find_places(self, model: str) -> dict[_Place, list[Target]]:
        targets = self._by_model[model]
        try:
            engines = self._answering.models.serving(model)
        except (ModelNotFoundError, NoEngineError):
            hosted = [one for one in targets if one.entry.hosted and self._is_hosted(one)]
            return {_Place(f"{HOSTED}: {model}", None): hosted} if hosted else {}
        except KvasirError:
            return {}
        return {_Place(engine.name, engine.hello.incarnation): targets for engine in engines}

    def _is_hosted(self, target: Target) -> bool:
        return self._answering.pipeline.find_hosted(target.call.model, target.tenant.name) is not None

    async def _compute(self, place: _Place, target: Target, state: _State) -> None:
        renew_s = RENEW_SHARE * target.ttl_s
        if place.incarnation is None and not await self._claim(target, renew_s):
            state.next_s, state.why = self._clock() + MAX_RETRY_S / 10, "another gateway does it, or Redis is down"
            return
        record = Record(
            request_id=f"warm_{new_id()}",
            endpoint="[[warm]]",
            received_s=time.monotonic(),
            dialect=OPENAI,
            tenant=target.tenant.name,
            namespace=target.entry.namespace or "",
            lane="batch",
        )
        try:
            await self._send(place, target, record)
        except Exception as error:
            known = known_error(error, record)
            failed(record, known)
            await self._failed(place, target, state, record, known)
            return
        trace, took_ms = record.trace, elapsed_ms(record)
        if state.computed_s is None:
            where = f"{target.source} of [[warm]] at {place.name}"
            log.info("%s: %d tokens are warm after %.1f s", where, trace.prompt_tokens, took_ms / 1e3)
        self._audited(target.tenant.name, record.model or target.call.model, trace, took_ms)
        state.next_s, state.failures, state.why = self._clock() + renew_s, 0, ""
        state.computed_s, state.tokens = self._wall(), trace.prompt_tokens
        state.cached_tokens = trace.reported_cached_tokens
        state.lease = None if trace.lease is None else trace.lease.state

    async def _send(self, place: _Place, target: Target, record: Record) -> None:
        """Raises KvasirError."""
        call, answering = target.call, self._answering
        if place.incarnation is None:  # a request as any other to the upstream, but for its length
            call = replace(call, prewarm=False, sampling=Sampling(max_tokens=1), reuse=Reuse(asked=False))
        model: Hello = answering.model(call.model, record)
        (request,) = answering.requests(record, target.tenant, call, model)
        if place.incarnation is not None:
            request = replace(request, group=Group(1, incarnation=place.incarnation))
        await answering.collect([request], call, model)

    async def _failed(self, place: _Place, target: Target, state: _State, record: Record, error: KvasirError) -> None:
        pause_s = min(RETRY_S * 2**state.failures, MAX_RETRY_S)
        state.next_s, state.failures = self._clock() + pause_s, min(state.failures + 1, 16)
        state.why = error.message[:MAX_REASON_CHARS]
        if state.failures == 1:
            where = f"{target.source} of [[warm]] at {place.name}"
            log.warning("%s was not computed (%s); /admin/stats says why", where, record.error)
        if place.incarnation is None and self._claims is not None:
            try:
                await self._claims.drop(_name(target))
            except RedisDownError as down:
                log.debug("a claim of [[warm]] stays until it ends: %s", down.message)

    async def _claim(self, target: Target, ttl_s: float) -> bool:
        if self._claims is None:
            return True
        try:
            return await self._claims.take(_name(target), ttl_s)
        except RedisDownError:
            return False


def _name(target: Target) -> str:
    """The same at gateways with the same entry, as long as a digest is."""
    known = repr((target.call.model, target.tenant.name, target.entry.namespace, target.entry.ttl, target.call.prompts))
    return hashlib.sha256(known.encode("utf-8", "surrogatepass")).hexdigest()


def _shown(state: _State) -> dict[str, Any]:
    shown: dict[str, Any] = {"computed_at": state.computed_s and round(state.computed_s, 3), "tokens": state.tokens}
    shown |= {"cached_tokens": state.cached_tokens, "lease": state.lease}
    return shown | {"failures": state.failures, "failed": state.why or None}


# -- settings ---------------------------------------------------------------------------------------------------------


def warm_targets(settings: Settings, answering: Answering, aliases: Aliases) -> list[Target]:
    """Of all entries. Raises ConfigError for a file that cannot be used, and for an entry without a tenant."""
    tenants = [Tenant(one.name) for one in settings.tenants] or [Tenant(ANONYMOUS)]
    targets: list[Target] = []
    for number, entry in enumerate(settings.warm):
        source = f"warm[{number}]" + (f" ({entry.file})" if entry.file is not None else "")
        call, found = _call(source, entry, settings.server.max_body_bytes, settings.leases), dict[Any, Target]()
        for tenant in tenants:
            if tenant.name not in entry.tenants and ALL_TENANTS not in entry.tenants:
                continue
            try:
                salt = answering.namespaces.scope(entry.namespace or "", tenant, key=call.cache_key).salt
            except ForbiddenError:
                continue
            for model in aliases.models(entry.model, tenant.name):
                found.setdefault((model, salt), Target(source, entry, tenant, replace(call, model=model)))
        if not found:
            raise ConfigError(f"{source}: none of its tenants may use the namespace {entry.namespace!r}")
        targets += found.values()
    return targets


def _call(source: str, entry: WarmSettings, max_bytes: int, leases: LeaseSettings) -> Call:
    """Computes its prompt, and generates nothing."""
    try:
        call = parse_chat({**_body(entry, max_bytes), "model": entry.model}, leases)
    except (BadRequestError, OSError, ValueError) as error:
        why = error.message if isinstance(error, BadRequestError) else error
        raise ConfigError(f"{source}: {why}") from None
    (prompt,) = call.prompts
    assert isinstance(prompt, ChatPrompt)
    last, ttl_s = len(prompt.messages) - 1, duration_s(entry.ttl)
    markers = [Marker(0, 0, ttl_s, tool=len(prompt.tools) - 1)] if prompt.tools else []
    markers.append(Marker(last, len(prompt.messages[last]["content"] or ""), ttl_s))
    messages = prompt.messages
    if messages[last]["role"] in ("system", "assistant"):
        messages = [*messages, _BEHIND]
    return Call(
        model=entry.model,
        prompts=(ChatPrompt(messages, add_generation_prompt=False, markers=tuple(markers), tools=prompt.tools),),
        prompt_param="messages",
        sampling=Sampling(max_tokens=0),
        prewarm=True,
        cache_key=call.cache_key,
        cache_salt=call.cache_salt,
    )


def _body(entry: WarmSettings, max_bytes: int) -> dict[str, Any]:
    """Raises OSError for a file that cannot be read, ValueError for one of another form."""
    text = entry.text
    if entry.file is not None:
        if entry.file.stat().st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes} bytes (server.max_body_bytes)")
        text = entry.file.read_text(encoding="utf-8")
        if entry.file.suffix == ".json":
            body = orjson.loads(text)
            if not isinstance(body, dict):
                raise ValueError("it is no JSON object")
            return {name: body[name] for name in ("messages", "tools", "prompt_cache_key") if name in body}
        if not text.strip():
            raise ValueError("it is empty")
    return {"messages": [{"role": "system", "content": text}]}
