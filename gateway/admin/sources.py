"""Where the operator's figures come from. app.py fills this in from the stages; nothing here may block or raise, and
`refresh` alone may wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.protocol import Lane, Load
from gateway.ledger.base import Entry, Figures, Row

EngineState = Literal["connecting", "ready", "draining", "lost"]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine, configured or discovered. Without an incarnation it has not said hello yet."""

    name: str
    url: str
    state: EngineState
    model: str | None = None
    incarnation: str | None = None
    num_blocks: int = 0
    block_size: int = 0
    load: Load = field(default_factory=Load)
    stats: Mapping[str, Any] = field(default_factory=dict)  # its own counters; empty when it does not answer
    receipts: Mapping[str, float] = field(default_factory=dict)  # see gateway/receipts.py
    replica: Mapping[str, Any] = field(default_factory=dict)  # see replicas/fleet.py; empty for a bundled engine


class Ledger(Protocol):
    """See ledger/ledger.py."""

    @property
    def totals(self) -> Mapping[Row, Figures]:
        """Of this gateway since its start; the day is empty."""
        ...

    @property
    def pending(self) -> int: ...

    @property
    def dropped(self) -> int: ...

    @property
    def capped(self) -> int: ...

    def add(self, entry: Entry) -> None:
        """Counts it, today. Never raises."""
        ...

    def priced(self, entry: Entry) -> tuple[str, Figures]:
        """Its currency and figures, by itself."""
        ...

    async def flush(self) -> bool:
        """Whether all that was added is written. Never raises."""
        ...

    async def read(self, first: str, last: str) -> Mapping[Row, Figures]:
        """The rows of these days. Raises RedisDownError."""
        ...


Total = Callable[[dict[str, Any]], Awaitable[dict[str, Any] | None]]


async def no_others(own: dict[str, Any]) -> None:
    """A Total of a process that is a whole gateway."""


def no_traces() -> Mapping[str, int]:
    """Of a process that makes none."""
    return dict.fromkeys(("exported", "failed", "dropped"), 0)


@dataclass(frozen=True, slots=True)
class Sources:
    """Each is asked anew for every scrape.

    refresh     awaited first: fetches what is in other processes, for a bounded time
    engines     every engine, whatever its state
    queue       one of the two lanes (QueueStatus of queues/line.py)
    prompts     model -> figures of its memos and tokeniser; numbers become gauges, the rest is for /admin/stats
    embeddings  figures of the embedder, numbers; empty without the extra
    upstreams   figures of each upstream: requests, in_flight, unmetered, errors by kind, breaker, dialect
    responses   what became of responses that were to be kept, since the start
    ledger      what requests used and saved
    limits      under "tenants" those that tenants have, and who was refused
    redis       at least {"up": bool}, and "outages" since the start
    response_cache  what it holds now, and since the start by outcome, by reason of a bypass, and by event
    batches     figures of the batch lane's worker: in_flight, paused_models, open_jobs, and lines since the start by
                outcome; or empty
    warming     what became of the prompts of [[warm]]
    cold        why too few of them are there to call the gateway ready; None when enough are
    draining    whether the server is ending and wants no new requests
    workers     how many processes of this gateway run, and were started again; empty without any but this
    gateways    how many share this Redis, this one among them
    aliases     policy, and what is known of each target, by alias
    traces      sampled requests since the start, by what became of their spans
    total       the snapshot (admin/sums.py) of all workers together, given that of this process; None without others.
                Raises OverloadedError when it is not to be had
    """

    refresh: Callable[[], Awaitable[None]]
    engines: Callable[[], Sequence[EngineStatus]]
    prefill_tokens_per_s: Callable[[str], float]  # of an engine, by name; 0 for none of ours
    queue: Callable[[Lane], Any]
    prompts: Callable[[], Mapping[str, Mapping[str, Any]]]
    embeddings: Callable[[], Mapping[str, Any]]
    upstreams: Callable[[], Mapping[str, Mapping[str, Any]]]
    responses: Callable[[], Mapping[str, int]]
    ledger: Ledger
    limits: Callable[[], Mapping[str, Any]]
    redis: Callable[[], Mapping[str, Any]]
    response_cache: Callable[[], Mapping[str, Any]]
    batches: Callable[[], Mapping[str, int]]
    lost_lines: Callable[[], int]  # of the log
    malformed: Callable[[], Mapping[str, int]]  # requests that were refused before they had a route, by reason
    draining: Callable[[], bool]
    version: str
    workers: Callable[[], Mapping[str, int]] = dict
    gateways: Callable[[], int] = lambda: 1
    warming: Callable[[], Mapping[str, Any]] = dict
    cold: Callable[[], str | None] = lambda: None
    aliases: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    traces: Callable[[], Mapping[str, int]] = no_traces
    total: Total = no_others

    def all_joined(self) -> bool:
        """Whether there are engines, and all have said what they are. Until then any model may be one of theirs."""
        states = [one.state for one in self.engines()]
        return bool(states) and "connecting" not in states
