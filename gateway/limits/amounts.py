"""The limits of a tenant or a key, and what a request takes of them. Pure values.

A request's tokens are known when it is over. Before that its prompt's are estimated, and its answers are taken to be as
long as they may be, so that what is set aside is seldom less than what is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from gateway.config import LimitSettings, TenantSettings
from gateway.errors import RateLimitError
from gateway.limits.counters import WINDOW_US, Taken, cost_us, wait_us
from gateway.types import ANONYMOUS, LimitKind, Need, Usage

KINDS: Final[tuple[LimitKind, ...]] = get_args(LimitKind)

_FIELDS: Final = (*(f"{kind}_per_minute" for kind in KINDS), "max_in_flight")
"""Of settings."""

IN_FLIGHT: Final = "in_flight"
"""The limit of requests in flight, among those that a request is refused for."""

RETRY_IN_FLIGHT_S: Final = 1.0
"""Retry-After for the limit of requests in flight, whose ends are not known."""

_NAMES: Final[Mapping[LimitKind, str]] = {
    "requests": "requests per min (RPM)",
    "tokens": "tokens per min (TPM)",
    "input_tokens": "input tokens per min (ITPM)",
    "output_tokens": "output tokens per min (OTPM)",
}

Amounts = Mapping[LimitKind, int]


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one owner: those per minute that it has, requests in flight, 0 without a limit, and what may come at once."""

    per_minute: Amounts
    max_in_flight: int
    burst_us: int = WINDOW_US

    def __bool__(self) -> bool:
        return bool(self.per_minute or self.max_in_flight)


def limits_of(
    settings: LimitSettings, tenants: Sequence[TenantSettings], keys: Sequence[TenantSettings] = ()
) -> Iterator[tuple[str, Limits]]:
    """Every owner that has any, by name. What a tenant does not say is as in [limits]; a key has what it says alone."""
    common, burst_us = {name: getattr(settings, name) for name in _FIELDS}, round(settings.burst_s * 1e6)
    none = dict.fromkeys(_FIELDS, 0)
    every: list[tuple[str, object, Mapping[str, int]]] = [(one.name, one, common) for one in tenants]
    for name, one, rest in (*(every or [(ANONYMOUS, None, common)]), *((key.name, key, none) for key in keys)):
        theirs = {field: getattr(one, field, None) for field in _FIELDS}
        merged = {field: rest[field] if amount is None else amount for field, amount in theirs.items()}
        per_minute = {kind: merged[f"{kind}_per_minute"] for kind in KINDS if merged[f"{kind}_per_minute"]}
        if limits := Limits(per_minute, merged["max_in_flight"], burst_us):
            yield name, limits


def to_set_aside(need: Need, limits: Limits, settings: LimitSettings) -> Amounts:
    """Of each limit. Raises RateLimitError for what would never fit.

    An answer without a maximum may be short, and where cached tokens do not count, a prompt of any length may turn out
    to be one: they need no more than all there is.
    """
    each = settings.assumed_completion_tokens if need.answer_tokens is None else need.answer_tokens
    wanted = _amounts(need.input_tokens, need.answers * each)
    inputs = need.input_tokens if settings.count_cached_tokens else 0
    least = _amounts(inputs, need.answers * (need.answer_tokens or 0))
    for kind, limit in limits.per_minute.items():
        if least[kind] > limit:
            raise RateLimitError(
                f"Request too large for {_NAMES[kind]}: Limit {limit}, Requested {least[kind]}. "
                "The input or output tokens must be reduced in order to run successfully.",
                kind,
            )
    return {kind: min(wanted[kind], limit) for kind, limit in limits.per_minute.items()}


def used(usage: Usage, settings: LimitSettings) -> Amounts:
    """The amounts that a request used."""
    inputs = usage.prompt_tokens - (0 if settings.count_cached_tokens else usage.cached_tokens)
    return _amounts(max(0, inputs), usage.completion_tokens)


def costs(amounts: Amounts, limits: Limits) -> dict[LimitKind, int]:
    """Microseconds in which so much flows back, of each limit."""
    return {kind: cost_us(amounts[kind], limit) for kind, limit in limits.per_minute.items()}


def refusal(limits: Limits, amounts: Amounts, taken: Taken, owner: str) -> RateLimitError:
    """The error for a refused request: the limit that needs the longest wait."""
    waits = waits_us(limits, amounts, taken)
    kind = max(waits, key=waits.__getitem__, default=None)
    name, what, limit, requested, retry_s = IN_FLIGHT, "concurrent requests", limits.max_in_flight, 1, RETRY_IN_FLIGHT_S
    missing = limit
    if kind is not None and waits[kind]:
        name, what, limit, requested = kind, _NAMES[kind], limits.per_minute[kind], amounts[kind]
        missing = -(-(taken.full_us[kind] - taken.now_us) * limit // WINDOW_US)
        retry_s = math.ceil(waits[kind] / 1e3) / 1e3
    return RateLimitError(
        f"Rate limit reached for {owner} on {what}: Limit {limit}, Used {missing}, Requested {requested}. "
        f"Please try again in {retry_s:g}s.",
        name,
        retry_after_s=retry_s,
    )


def waits_us(limits: Limits, amounts: Amounts, taken: Taken) -> dict[LimitKind, int]:
    """Until there is enough of each limit, of those that the request takes something of."""
    return {
        kind: wait_us(taken.full_us[kind], taken.now_us, cost, limits.burst_us)
        for kind, cost in costs(amounts, limits).items()
        if cost
    }


def _amounts(input_tokens: int, output_tokens: int) -> Amounts:
    return {
        "requests": 1,
        "tokens": input_tokens + output_tokens,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
    }
