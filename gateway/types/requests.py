"""One sequence to be generated, its request for an engine slot, and its trace."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple, Protocol

from engine.protocol import Breakpoint, Lane, Sampling
from engine.protocol.frozen import dataclass
from gateway.types.events import Event, Usage
from gateway.types.prompts import Constraint, Prompt, PromptParam, Thinking, ToolUse
from gateway.types.tenants import Allowance, Scope, Tenant

Tier = Literal["priority", "default", "flex"]
"""Of the online lane: the order of waiting requests."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What became of the breakpoints of a request that has some.

    degraded  breakpoints that ordinary eviction may take; all of them, where an engine knows no leases
    kept      the last breakpoint, when none is degraded
    """

    degraded: int
    kept: Breakpoint | None

    @property
    def state(self) -> Literal["kept", "degraded"]:
        return "degraded" if self.kept is None else "kept"


@dataclass(frozen=True, slots=True)
class Hit:
    """An answer that was remembered, and what generating it had taken.

    kind           "exact": the answer to this very request; "semantic": to one that means the same
    prompt_tokens  of the request that it was generated for
    generation_ms  from its arrival to its last token
    """

    kind: Literal["exact", "semantic"]
    prompt_tokens: int
    completion_tokens: int
    generation_ms: float


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a request says of the response cache. Everything here restricts what is reused or with whom, but `asked`,
    which takes part where the tenant's policy leaves that to requests.

    asked       None leaves it to the policy; False: nothing of it is looked up, shared or kept
    read        whether what was answered before will do
    write       whether the answer may be kept
    only_cached nothing is generated for it: it is answered from the cache, or refused
    max_age_s   of what will do
    ttl_s       for which the answer is kept, at most
    partition   separates what would be shared; of the client's making
    semantic    whether what means the same will do; None leaves it to the policy
    similarity  that such an answer needs at least; it may only raise the cache's own bound
    """

    asked: bool | None = None
    read: bool = True
    write: bool = True
    only_cached: bool = False
    max_age_s: float | None = None
    ttl_s: float | None = None
    partition: str = ""
    semantic: bool | None = None
    similarity: float | None = None


PLAIN_REUSE = Reuse()


class AnswerCheck(Protocol):
    """Looks at a whole answer before its client gets any of it."""

    def asked(self, request: Request) -> Request:
        """The request with all that the check has to see, and without the check."""
        ...

    def passed(self, events: Sequence[Event], request: Request) -> Sequence[Event]:
        """The answer to `asked(request)` as the request itself wants it. Raises CheckFailedError."""
        ...


Outcome = Literal["exact", "shared", "semantic", "miss", "bypass"]


class Lookup(NamedTuple):
    """What the response cache had for a request.

    outcome     "exact": the answer to this very request; "shared": the same, while it was generated for another;
                "semantic": that to one that means the same; "bypass": the cache had no part in it
    reason      of a bypass, one word
    entry       id of the answer that was found, or would be kept; it tells nothing of the request
    age_s       of the answer that was found
    similarity  of the request that it was given to, where that was another
    unwanted    a bypass that the client asked for
    """

    outcome: Outcome
    reason: str = ""
    entry: str = ""
    age_s: float = 0.0
    similarity: float | None = None
    unwanted: bool = False

    @property
    def found(self) -> bool:
        return self.outcome in ("exact", "shared", "semantic")

    @property
    def all_there(self) -> bool:
        """Whether the whole answer was found, so that there is nothing to wait for between its chunks."""
        return self.outcome in ("exact", "semantic")


class Repeat(NamedTuple):
    """What the response cache gave to a request, as long as the very same request would get it again.

    num_bytes  that it keeps in memory
    again      the cache gives it once more, and has counted that. None: it would not give this answer now
    """

    num_bytes: int
    again: Callable[[], Lookup | None]


class Lost(NamedTuple):
    """When an engine lost a block, and to whose request, where that is known."""

    at_s: float  # since 1970
    tenant: str = ""
    request_id: str = ""


class Candidate(NamedTuple):
    """An engine that might have had a request, as the router saw it: the least score wins.

    wait_s   until what is in front of the request is done; that it had to wait, where there was no other engine
    score_s  that, and its own prefill, weighted; None where there was no other engine
    """

    engine: str
    cached_tokens: int
    wait_s: float
    score_s: float | None
    chosen: bool


@dataclass(slots=True)
class Trace:
    """What happened to a request, filled in by the pipeline; the log line, the metrics and the headers read it."""

    engine: str | None = None
    prompt: Prompt | None = None  # of its request, under `salt`: for what is told of it when it is over
    body: Mapping[str, Any] | None = None  # the same of one that an upstream gets as its client wrote it
    salt: str = ""
    uncached: bool = False  # its client wants nothing to be reused, and nothing of it can be
    route: list[Candidate] = field(
        default_factory=list
    )  # engines that it might have had, the one that it got among them
    shared: Trace | None = None  # of the work whose answer it waits for, together with other requests
    hit: Hit | None = None  # then nothing was computed for it, but for `paid_tokens`
    fork: bool = False  # its prompt is accounted for with another answer's
    prompt_tokens: int = 0
    cached_tokens: int = 0  # whose blocks were physically reused
    lost: Lost | None = None  # the block behind those, which its engine had held
    cached_late: bool = False  # its engine reports them behind the first token
    predicted_tokens: int | None = None  # of cached_tokens, by the index; None: nothing was to be reused
    reported_cached_tokens: int = 0  # as in Usage
    missed_by_key: bool = False  # nothing was reused, and a prompt with another prompt_cache_key began like it
    cache_write_tokens: int = 0
    lease_read_tokens: int = 0  # of the longest lease that the prompt begins with, to the token
    lease_write_tokens: int = 0  # beyond those, up to the last breakpoint that is kept from now on
    lease_writes: tuple[tuple[float, int], ...] = ()  # as in Usage
    lease_reads: tuple[int, ...] = ()  # tokens of all leases that the prompt begins with, longest first
    breakpoints: tuple[Breakpoint, ...] = ()  # of the prompt, shortest prefix first
    kept_tokens: int = 0  # up to the last of them that is kept
    lease: Lease | None = None
    by_upstream: bool = False  # it was an upstream that answered, and its cache that was read; or is to, for a line
    created: tuple[float, int] = (0.0, 0)  # time to live and tokens of what an upstream was told to cache before it
    storage_token_s: int = 0  # tokens times seconds for which an upstream was told to keep them
    completion_tokens: int = 0
    reasoning_tokens: int = 0  # of these
    dropped: tuple[str, ...] = ()  # parameters that the upstream's API has no field for
    allowance: Allowance | None = None  # that an upstream of another API told, in place of the tenant's own
    upstream_id: str = ""  # by which it knows the request
    unmetered: bool = False  # an upstream answered without a usage
    paid_tokens: int = 0  # of an answer that was begun for another request: computed after that one had left
    tokenized_tokens: int = 0  # of prompt_tokens, those that had to be tokenised anew
    retries: int = 0  # times that another engine took over, before or after the first token
    looked_up_ms: float = 0.0  # from arrival until the response cache had no answer, or was not asked; 0: it had one
    encoded_ms: float = 0.0  # from arrival until an engine's prompt was rendered and tokenised
    overhead_ms: float = 0.0  # the gateway's own time before the engine had the request, waiting in a queue excluded
    queue_ms: float = 0.0  # waiting for a slot, in the gateway and in the engine
    first_token_ms: float | None = None  # from arrival
    finish: str | None = None
    lookup: Lookup | None = None  # in the response cache; None: it was not asked
    repeat: Repeat | None = None  # of an answer that was in the cache's memory

    @property
    def usage(self) -> Usage:
        """As it is now: completion tokens grow."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.reported_cached_tokens,
            cache_write_tokens=self.cache_write_tokens,
            lease=self.lease.state if self.lease else None,
            lease_read_tokens=min(self.lease_read_tokens, self.prompt_tokens),
            lease_writes=self.lease_writes,
            reasoning_tokens=self.reasoning_tokens,
        )


@dataclass(slots=True)
class Group:
    """Requests for several answers to one prompt. They go to one engine, which computes their prompt once.

    size    how many there are
    number  by which the engine knows them
    """

    size: int
    number: int = field(default_factory=itertools.count(1).__next__)
    incarnation: str | None = None  # of the engine that was chosen for the first of them
    choosing: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated. `sampling.max_tokens` 0 means up to the context's end, or nothing for `prewarm`."""

    request_id: str
    tenant: Tenant
    model: str
    prompt: Prompt
    sampling: Sampling
    received_s: float  # monotonic clock
    deadline_s: float  # monotonic clock; nothing is waited for past it
    stop: tuple[str, ...] = ()  # strings that end the answer and are not part of it
    prompt_param: PromptParam = "messages"  # the name of the prompt in error messages
    lane: Lane = "online"
    tier: Tier = "default"  # says nothing in the batch lane
    priority: int = 0  # among its tenant's own, the least first; says nothing in the batch lane
    scope: Scope | None = None  # None is the tenant's own
    affinity: str = ""  # requests with the same one are sent to the same engine, where nothing speaks against it
    use_cache: bool = True  # False: nothing is reused, and nothing of it can be
    only_leased: bool = False  # what was reused without a lease is not reported as cached
    prewarm: bool = False  # computes the prompt, so that it is cached, and generates nothing
    fit: bool = False  # max_tokens that are more than the context has left are cut to that, and not refused
    constraint: Constraint | None = None
    tool_use: ToolUse | None = None  # None: what the model writes is text, whatever it looks like
    thinking: Thinking | None = None  # None: the model thinks as it does usually, as it always does on an engine
    group: Group | None = None
    number: int = 0  # among the requests of its group; the prompt is accounted for with the first
    work: int = 0  # that it is to render and hash its prompt (tasks.work_of)
    stream: bool = False  # the client gets chunks as they come; else chunks may have any size
    reuse: Reuse = PLAIN_REUSE
    check: AnswerCheck | None = None  # the answer is held back until it has passed
    trace: Trace = field(default_factory=Trace)

    @property
    def salt(self) -> str:
        """Under which its blocks are kept and found."""
        return self.tenant.salt if self.scope is None else self.scope.salt


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a slot at an engine, as the queue sees it.

    deadline_s     monotonic clock; nothing is waited for past it
    cached_tokens  leading tokens of the prompt that each incarnation holds; one that is missing holds none
    only           the incarnation that it has to be, for requests that belong together
    avoid          incarnations that failed it, and get it only where there is no other
    lane           online, or batch: then it has a slot only where no online request wants one
    tier           order in the online lane
    priority       the same among requests of one tenant, before anything else: the least goes first
    weight         of the tenant's share
    digests        of the prompt's full blocks, where it is known who holds them; the lane looks for what begins like it
    block_size     tokens of each
    affinity       of engines that would have the first token at the same time, requests with the same one choose the
                   same, at every gateway; empty: the one that was given less
    route          gets the best engines that there were when it got its own; None: nobody wants to know
    """

    tenant: str
    prompt_tokens: int
    deadline_s: float
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    only: str | None = None
    avoid: frozenset[str] = frozenset()
    lane: Lane = "online"
    tier: Tier = "default"
    priority: int = 0
    weight: float = 1.0
    digests: bytes = b""
    block_size: int = 0
    affinity: str = ""
    route: list[Candidate] | None = field(default=None, compare=False)


class Arrived(Protocol):
    """What has come from a client; `received_s` is by the monotonic clock."""

    @property
    def received_s(self) -> float: ...


def elapsed_ms(one: Arrived) -> float:
    """Milliseconds since it arrived."""
    return (time.monotonic() - one.received_s) * 1e3
