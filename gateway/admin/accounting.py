"""Finished requests into entries of the ledger. An Observer of the middleware; knows no price and no Redis.

Every dialect fills in the same trace, whose prompt tokens include the cached ones however its API tells them, so none
is counted twice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from gateway.api.record import Record
from gateway.ledger.base import AUDIT, Entry
from gateway.types import Hit, Trace

DECAY: Final = 0.99
"""Weight of what was known before, at each request."""
LEAST: Final = 8.0
"""Requests, by weight, before a slope is believed."""
MODELS: Final = 1000


class Accounting:
    """Makes an entry of each request for which something was computed, or remembered."""

    def __init__(self, add: Callable[[Entry], None], prefill_tokens_per_s: Callable[[str], float]) -> None:
        """`prefill_tokens_per_s` is what an engine, by name, has measured; 0 when it has not, or is none of ours."""
        self._add = add
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._times = PrefillTimes()

    def started(self, record: Record) -> None:
        """Nothing is used yet."""

    def finished(self, record: Record) -> None:
        """Only what reached an engine counts: who was refused has used nothing."""
        record.entry = self._account(record)
        for model, traces in record.spent:
            self._account(replace(record, model=model, traces=traces, embedded_tokens=0, total_ms=0.0))

    def _account(self, record: Record) -> Entry | None:
        if record.tenant is None or record.model is None:
            return None
        model, hits, prompts = record.model, list[Hit](), list[Trace]()
        prompt_tokens = cached_tokens = reused_tokens = completion_tokens = 0
        reused_ms, computed, upstream_computed, by_upstream = 0.0, False, False, False
        for trace in record.traces:
            completion_tokens += trace.paid_tokens
            by_upstream |= trace.by_upstream
            if trace.hit is not None:
                hits.append(_once(trace.hit, trace))
            elif trace.first_token_ms is not None:
                computed = True
                upstream_computed |= trace.by_upstream
                completion_tokens += trace.completion_tokens
                if not trace.fork:
                    prompts.append(trace)
                    prompt_tokens += trace.prompt_tokens
                    cached_tokens += trace.reported_cached_tokens
                    reused_tokens += trace.cached_tokens
                    reused_ms += self._reused_ms(model, trace) if trace.cached_tokens else 0.0
        if not (computed or hits or completion_tokens or record.embedded_tokens):
            return None
        entry = Entry(
            tenant=record.tenant,
            model=model,
            lane=record.lane,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            writes=_writes(prompts) if record.dialect.tells_writes or by_upstream else (),
            completion_tokens=completion_tokens,
            embedded_tokens=record.embedded_tokens,
            total_ms=record.total_ms,
            reused_tokens=reused_tokens,
            reused_ms=reused_ms,
            reused_by="upstream" if upstream_computed else "prefix",
            created_tokens=sum(trace.created[1] for trace in prompts),
            storage_token_s=sum(trace.storage_token_s for trace in prompts),
            by_upstream=by_upstream,
            hits=tuple(hits),
            key=record.key,
        )
        self._add(entry)
        for trace in prompts:
            self._note(model, trace)
        return entry

    def _reused_ms(self, model: str, trace: Trace) -> float:
        """What computing its cached tokens would have taken."""
        if (rate := self._prefill_tokens_per_s(trace.engine or "")) > 0:
            return trace.cached_tokens / rate * 1e3
        return trace.cached_tokens * self._times.ms_per_token(model)

    def _note(self, model: str, trace: Trace) -> None:
        if trace.first_token_ms is not None:
            waited_ms = trace.first_token_ms - trace.queue_ms - trace.overhead_ms
            self._times.note(model, max(0, trace.prompt_tokens - trace.cached_tokens), max(0.0, waited_ms))


def audit_entry(tenant: str, model: str, trace: Trace, total_ms: float) -> Entry | None:
    """What it took to generate an answer that was only compared, under the tenant who had the hit; None for one that
    never began."""
    if trace.first_token_ms is None:
        return None
    return Entry(
        tenant=tenant,
        model=model,
        lane=AUDIT,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.reported_cached_tokens,
        writes=_writes([trace]) if trace.by_upstream else (),
        completion_tokens=trace.completion_tokens,
        total_ms=total_ms,
        by_upstream=trace.by_upstream,
    )


def _once(hit: Hit, trace: Trace) -> Hit:
    """Several answers have one prompt."""
    return replace(hit, prompt_tokens=0) if trace.fork else hit


def _writes(traces: Sequence[Trace]) -> tuple[tuple[float, int], ...]:
    """As told: by time to live where breakpoints asked for one."""
    written: list[tuple[float, int]] = []
    for trace in traces:
        written += trace.lease_writes
        if rest := trace.cache_write_tokens - sum(tokens for _, tokens in trace.lease_writes):
            written.append((0.0, max(0, rest)))
    return tuple(written)


class PrefillTimes:
    """How long a token of a prompt takes that is not cached: the slope of the time to the first token over them, of the
    latest MODELS models.

    A ratio would put the fixed part of every request, such as the way to a hosted API, on the few tokens of a well
    cached prompt.
    """

    def __init__(self) -> None:
        self._sums: OrderedDict[str, tuple[float, float, float, float, float]] = OrderedDict()

    def note(self, model: str, tokens: int, ms: float) -> None:
        """A request with so many tokens that were not cached had its first token after so long."""
        count, x, y, xx, xy = [DECAY * one for one in self._sums.pop(model, (0.0,) * 5)]
        self._sums[model] = (count + 1, x + tokens, y + ms, xx + tokens * tokens, xy + tokens * ms)
        if len(self._sums) > MODELS:
            self._sums.popitem(last=False)

    def ms_per_token(self, model: str) -> float:
        """0 while nothing can be said."""
        count, x, y, xx, xy = self._sums.get(model, (0.0,) * 5)
        spread = count * xx - x * x
        if count < LEAST or spread <= 1e-9 * xx * count:
            return 0.0
        return min(max(0.0, (count * xy - x * y) / spread), y / x)
