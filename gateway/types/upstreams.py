"""Requests that go on to an upstream as they came, what it answers, and how that is given again in another form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple

from engine.protocol import Lane
from engine.protocol.frozen import dataclass
from gateway.types.requests import PLAIN_REUSE, Reuse, Tier, Trace
from gateway.types.tenants import Scope, Tenant


class CachePrefix(NamedTuple):
    """The beginning of a prompt that an upstream may be told to cache, where its API has prefixes as resources of their
    own: the system's and tools' part, and leading contents.

    contents  how many of them are marked; None: nothing is, and what comes again may be cached
    ttl_s     that the client asks for; 0 is the operator's
    """

    contents: int | None = None
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request that goes on to an upstream as the client wrote it.

    path     of the client's URL, `{model}` in the place of the model's name where it has one
    query    of the client's URL, still encoded, without keys; empty without one
    headers  of the client, those alone that are passed on
    values   what the body says, parsed; not to be changed
    metered  whether its answer tells a usage
    lane     one of the batch lane waits for a slot that the online lane leaves
    tier, priority  as in Request, where requests wait for an upstream
    method   of the client's request
    only     name of the one upstream that is asked, whatever it serves; empty: those of the model
    on_created    called with the upstream and the id of a thing stored there, before the client has it. Never raises
    find_creator  the upstream that created the thing with an id for the tenant; None when that is not known. Raises
                  OverloadedError
    prefix   of a translated request that its upstream may be told to cache
    hinted   the client wants what comes again cached, and does not say up to where
    scope    who may get its answer again; None is the tenant alone. What clients separate theirs with is in the body
    work     that it is to look through, hash or edit its body (tasks.work_of)
    """

    request_id: str
    tenant: Tenant
    dialect: str
    model: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    values: Mapping[str, Any]
    received_s: float  # monotonic clock
    deadline_s: float  # monotonic clock
    metered: bool = True
    reuse: Reuse = PLAIN_REUSE
    lane: Lane = "online"
    tier: Tier = "default"
    priority: int = 0
    scope: Scope | None = None
    method: str = "POST"
    only: str = ""
    on_created: Callable[[str, str], Awaitable[None]] | None = None
    work: int = 0
    find_creator: Callable[[str], Awaitable[str | None]] | None = None
    prefix: CachePrefix | None = None
    hinted: bool = False
    trace: Trace = field(default_factory=Trace)

    @property
    def owner(self) -> Scope:
        """The scope that may get its answer again."""
        return self.scope or Scope(tenant=self.tenant.name)


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """An upstream's answer as it came, an error of its own included.

    headers        those that a client may see; without Content-Length the length is not known
    chunks         of the body, as they arrive. Raises UpstreamLostError, or DeadlineError, when it does not come to its
                   end
    label          of the model, for metrics: one of few, whatever clients ask for
    retry_after_s  of an error: when the upstream wants to be asked again, where it says so
    """

    upstream: str
    status: int
    headers: tuple[tuple[str, str], ...]
    chunks: AsyncGenerator[bytes, None]
    label: str
    retry_after_s: float | None = None


Ending = Literal["stop", "tool_calls", "length"]


class Replay:
    """How one route writes an answer in its two forms. Pure; None for what cannot be converted.

    usage_on_request  whether a stream has its usage only where its request asks for that
    """

    usage_on_request = False

    def fold(self, stream: bytes, *, usage: bool = True) -> dict[str, Any] | None:
        """The whole answer that a complete stream has. `usage`: only one with its usage, where whole answers of this
        route have one."""
        return None

    def unfold(self, whole: Mapping[str, Any], *, usage: bool) -> Sequence[bytes] | None:
        """A stream with a whole answer, in chunks."""
        return None

    def restream(self, stream: bytes, *, usage: bool) -> Sequence[bytes] | None:
        """A stream in its own chunks, with or without the usage, where that is on request."""
        return None

    def ending(self, whole: Mapping[str, Any]) -> Ending | None:
        """How it ended; None for an answer that is not complete, or not one."""
        return None

    def text(self, whole: Mapping[str, Any]) -> str | None:
        """Of an answer to a chat that is one text and nothing else."""
        return None
