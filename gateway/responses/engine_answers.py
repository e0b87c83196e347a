"""Our own engines as a backend of the response cache: which requests it is for, and their answers. Pure but for
`generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.protocol import Hello
from gateway.config import ResponseCacheSettings
from gateway.responses.base import Mode, Query, Recorded, Refused, Situation, Stored, find_refusal, owner_of
from gateway.responses.key import find_situation, request_key
from gateway.responses.recording import decode, encode, text_of
from gateway.types import ChatPrompt, Event, Finished, Request, Scope, Started, Trace, Usage

Generate = Callable[[Request], AsyncGenerator[Event, None]]
"""Steps 2 to 6 of the pipeline."""


def find_bypass(request: Request, settings: ResponseCacheSettings, mode: Mode) -> str | None:
    """Why the cache has no part in it, as one word for headers and metrics; None where it has. `mode` is its tenant's.

    off        the operator does not want it for this tenant, or the client for this request
    not-asked  the tenant's requests have to ask for it
    no-store   neither read nor stored, as the client wants
    prewarm    nothing is generated
    uncached   the client wants nothing to be reused, not even blocks
    tools      the answer may call tools, which the client then runs
    sampling   the next answer to it would be another
    """
    reuse = request.reuse
    if (reason := find_refusal(reuse, mode)) is not None:
        return reason
    if request.prewarm:
        return "prewarm"
    if not request.use_cache:
        return "uncached"
    if request.tool_use is not None and not (settings.tool_calls or reuse.asked):
        return "tools"
    # With temperature 0 or a seed an engine would give the same answer again.
    deterministic = request.sampling.temperature == 0 or request.sampling.seed is not None
    if not (settings.requests == "all" or reuse.asked or deterministic):
        return "sampling"
    return None


@dataclass(slots=True, eq=False)
class EngineQuery(Query[Event]):
    """See Query. `hello` is the model's."""

    request: Request
    hello: Hello
    steps: Generate
    settings: ResponseCacheSettings

    @classmethod
    def of(cls, request: Request, hello: Hello, steps: Generate, settings: ResponseCacheSettings) -> EngineQuery:
        owner = owner_of(request.scope or Scope(tenant=request.tenant.name))
        return cls(request, request_key(request, hello), owner, hello, steps, settings)

    def _wants(self) -> tuple[Hashable, ...]:
        return self.request.tier, self.request.priority

    def generate(self, trace: Trace) -> AsyncGenerator[Event, None]:
        return self.steps(replace(self.request, trace=trace))

    def _off_path(self) -> dict[str, Any]:
        return {"group": None}

    def read(self, body: bytes, *, shared: bool) -> Stored[Event] | None:
        """All at once: in the chunks that it came in, for requests that stream."""
        return decode(body, joined=not (shared or self.request.stream))

    def record(self, items: Sequence[Event], trace: Trace) -> Recorded | Refused:
        last, body = items[-1], encode(items, self.age_ms)
        if isinstance(last, Finished) and last.reason == "length" and not self.settings.truncated:
            return "truncated"
        return "other" if body is None else Recorded(self.model, body, text_of(items))

    def text(self, items: Sequence[Event]) -> str | None:
        return text_of(items)

    def reused(self, item: Event) -> Event:
        if type(item) is not Started and type(item) is not Finished:
            return item
        prompt, completion = item.usage.prompt_tokens, item.usage.completion_tokens
        return replace(item, usage=Usage(prompt, completion, cached_tokens=prompt))

    def find_unfit(self, max_temperature: float) -> str | None:
        request = self.request
        prompt = request.prompt
        if request.tool_use is not None or (isinstance(prompt, ChatPrompt) and prompt.tools):
            return "tools"
        if request.constraint is not None or request.sampling.logprobs is not None or request.group is not None:
            return "form"
        return "sampling" if request.sampling.temperature > max_temperature else None

    def find_situation(self) -> Situation | None:
        return find_situation(self.request, self.hello)
