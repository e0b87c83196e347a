"""Requests and answers as the response cache handles them, whichever backend generates: our own engines
(engine_answers.py) or an upstream (upstream_answers.py). stage.py does the rest once for both."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

from gateway.types import FinishReason, Hit, Lookup, Request, Reuse, Scope, Trace, UpstreamRequest

Item = TypeVar("Item")
"""Of an answer: an Event of an engine, or an upstream's head and its bytes."""

Mode = Literal["on", "ask", "off"]

VERSION: Final = 1
"""Of keys and of what is stored under them: a change of either starts with an empty cache."""

END: Final[Any] = object()
"""The last item of answers that do not say themselves where they end."""

Audited = Callable[[str, str, Trace, float], None]
"""Reports what an audit used: the tenant with the hit, the model as figures name it, the trace, and milliseconds. Never
raises."""

Regenerate = Callable[[], Awaitable[str | None]]
"""Generates an answer of its own to be compared, and returns its text; None where it is more than a text, or not
complete. Raises what generating raises."""


class Situation(NamedTuple):
    """A chat without the user's last text.

    digest  of everything else; only texts of one situation are compared
    text    the user's last
    """

    digest: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Match:
    """The answer with this key, of another request that means the same."""

    key: bytes
    similarity: float


class Stored(NamedTuple, Generic[Item]):
    """An answer of the cache, in the form that a request wants."""

    items: Sequence[Item]
    prompt_tokens: int
    completion_tokens: int
    generation_ms: float
    finish: FinishReason | None = None

    def hit(self, lookup: Lookup) -> Hit:
        kind: Literal["exact", "semantic"] = "semantic" if lookup.outcome == "semantic" else "exact"
        return Hit(kind, self.prompt_tokens, self.completion_tokens, self.generation_ms)


class Recorded(NamedTuple):
    """A new answer, to be stored.

    model  as operators know it
    text   for requests that only mean the same; None: they do not get it
    """

    model: str
    body: bytes
    text: str | None


Refused = Literal["too_large", "truncated", "other"]
"""Why an answer is not stored."""


@dataclass(slots=True, eq=False)
class Query(ABC, Generic[Item]):
    """A request that may be answered from the cache.

    key     under which its answer is stored
    owner   of its answer: a tenant, or a namespace that several share
    looked  what the semantic cache found for it
    """

    request: Request | UpstreamRequest
    key: bytes
    owner: str
    looked: Any = field(init=False, default=None)

    metered_at_end = False
    """Whether the tokens of an answer are known only at its end."""

    @property
    def tenant(self) -> str:
        return self.request.tenant.name

    @property
    def model(self) -> str:
        """As clients name it."""
        return self.request.model

    @property
    def reuse(self) -> Reuse:
        return self.request.reuse

    @property
    def age_ms(self) -> float:
        """Milliseconds since the request's arrival."""
        return (time.monotonic() - self.request.received_s) * 1e3

    @property
    def flight_key(self) -> Hashable | None:
        """Equal for requests that may share one generation; None: it shares none, as one that is not to be stored."""
        reuse = self.reuse
        shares = reuse.read and reuse.write and not reuse.only_cached
        return (self.key, self.request.lane, reuse, self._wants()) if shares else None

    @abstractmethod
    def _wants(self) -> tuple[Hashable, ...]:
        """What else decides how long an answer takes, or in which form it comes."""

    @abstractmethod
    def generate(self, trace: Trace) -> AsyncGenerator[Item, None]:
        """A new answer, metered into this trace. The last item is a Finished, or END."""

    def off_path(self) -> Query[Item]:
        """The same for a comparison, with a trace of its own: it runs in what the online queue leaves."""
        now, request = time.monotonic(), self.request
        deadline_s, changes = now + request.deadline_s - request.received_s, self._off_path()
        changed = replace(request, received_s=now, deadline_s=deadline_s, lane="batch", trace=Trace(), **changes)
        return replace(self, request=changed)

    @abstractmethod
    def _off_path(self) -> dict[str, Any]:
        """What else is another in the request of a comparison."""

    @abstractmethod
    def read(self, body: bytes, *, shared: bool) -> Stored[Item] | None:
        """A stored answer; None for what cannot be read, or not be had in the form that is wanted. `shared`: requests
        that want it otherwise get the same items."""

    @abstractmethod
    def record(self, items: Sequence[Item], trace: Trace) -> Recorded | Refused:
        """A complete answer as it is to be stored."""

    @abstractmethod
    def text(self, items: Sequence[Item]) -> str | None:
        """The text of a complete answer; None where it is more than a text, or did not end by itself."""

    def label(self, items: Sequence[Item]) -> str:
        """The model that answered, as figures name it."""
        return self.model

    def succeeded(self, first: Item) -> bool:
        """Whether what begins so is an answer, and no error."""
        return True

    def reused(self, item: Item) -> Item:
        """An item that was generated for another request, as this one gets it."""
        return item

    @abstractmethod
    def find_unfit(self, max_temperature: float) -> str | None:
        """Why no other request's answer will do, without a look at its text; None where one may.

        tools     its answer may call some
        form      its answer has to be more than a text, or another form of text
        sampling  its temperature is higher
        """

    @abstractmethod
    def find_situation(self) -> Situation | None:
        """None for what is no chat that ends with a text of its user. Hashes all of it: work for a thread, where
        there is much."""


def find_refusal(reuse: Reuse, mode: Mode) -> str | None:
    """Why the operator or the client does not want the cache: `off`, `not-asked` or `no-store`."""
    if mode == "off" or reuse.asked is False:
        return "off"
    if mode == "ask" and not reuse.asked:
        return "not-asked"
    return None if reuse.read or reuse.write else "no-store"


def owner_of(scope: Scope) -> str:
    """The owner of a scope's answers, for stores and operators. What clients separate theirs with is in the key
    alone."""
    return f"namespace:{scope.namespace}" if scope.namespace else f"tenant:{scope.tenant}"
