"""The order in which the targets of an alias are tried for a request. Pure: no clock, no I/O, no chance of its own.

    1. targets that a request does not fit are left out; where it fits none, the last one gets it
    2. the policy puts the others in order
    3. those that are down come behind those that are up

router.py knows the state of the targets and tries them; facts.py reads what is known of a request out of its body.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import xxhash

from gateway.config import AliasSettings, TargetSettings

EXPLORED_SHARE: Final = 0.05
"""Of the requests of `fastest`, those that go to a target without a recent time."""


class Facts(NamedTuple):
    """What a choice goes by. Tokens are estimates; `key` is that of the conversation, empty for none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    has_tools: bool = False
    has_images: bool = False
    key: bytes = b""


class State(NamedTuple):
    """Of a target, for one request. `first_token_ms` and `cost` are None where they are not known."""

    up: bool = True
    first_token_ms: float | None = None
    cost: int | None = None


class Order(NamedTuple):
    """Names of models, the first to be tried first, and in a word why it is that one."""

    models: tuple[str, ...]
    reason: str


def choose_order(
    alias: AliasSettings, facts: Facts, states: Mapping[str, State], *, sticky: str = "", draw: float = 1.0
) -> Order:
    """At least one target.

    sticky  the target that the conversation went to before, where that is not the one of its key
    draw    a number from 0 to 1, by chance
    """
    targets = alias.models
    fitting = [target for target in targets if fits(target, facts)]
    by_policy = _POLICIES[alias.policy](fitting or targets[-1:], facts, states, draw)
    models, reason = by_policy.models, by_policy.reason if fitting else "none_fits"
    if sticky in models and states[sticky].up:
        models, reason = (sticky, *(model for model in models if model != sticky)), "sticky"
    order = sorted(models, key=lambda model: not states[model].up)  # stable
    return Order(tuple(order), reason if order[0] == models[0] else "down")


def fits(target: TargetSettings, facts: Facts) -> bool:
    """Whether it takes such a request."""
    most = target.max_prompt_tokens
    too_long = most is not None and facts.prompt_tokens > most
    return not (too_long or (facts.has_tools and not target.tools) or (facts.has_images and not target.images))


def ranked(targets: Sequence[TargetSettings], key: bytes) -> tuple[str, ...]:
    """Rendezvous hashing with weights (Schindelhauer and Schomaker, 2005): every gateway finds the same order, each
    target is first for its share of all keys, and without one only its own keys go elsewhere."""

    def score(target: TargetSettings) -> float:
        drawn = xxhash.xxh3_64_intdigest(key + b"\0" + target.model.encode("utf-8", "surrogatepass"))
        return target.weight / -math.log((drawn + 1) / (2**64 + 2))

    return tuple(target.model for target in sorted(targets, key=score, reverse=True))


_Targets = Sequence[TargetSettings]
_States = Mapping[str, State]


def _as_written(reason: str) -> Callable[[_Targets, Facts, _States, float], Order]:
    return lambda targets, facts, states, draw: Order(tuple(target.model for target in targets), reason)


def _cheapest(targets: _Targets, facts: Facts, states: _States, draw: float) -> Order:
    costs = {target.model: states[target.model].cost for target in targets}
    order = sorted(costs, key=lambda model: (costs[model] is None, costs[model] or 0))
    return Order(tuple(order), "unpriced" if costs[order[0]] is None else "cheapest")


def _fastest(targets: _Targets, facts: Facts, states: _States, draw: float) -> Order:
    """A target without a time comes last, and first for a small share of the requests, so that it gets one."""
    times = {target.model: states[target.model].first_token_ms for target in targets}
    order = sorted(times, key=lambda model: (times[model] is None, times[model] or 0.0))
    unknown = [model for model in order if times[model] is None and states[model].up]
    if len(unknown) == len(order):
        return Order(tuple(order), "unmeasured")
    if unknown and draw < EXPLORED_SHARE:
        explored = unknown[int(draw / EXPLORED_SHARE * len(unknown))]
        return Order((explored, *(model for model in order if model != explored)), "explored")
    return Order(tuple(order), "fastest")


def _hashed(reason: str) -> Callable[[_Targets, Facts, _States, float], Order]:
    return lambda targets, facts, states, draw: Order(ranked(targets, facts.key or repr(draw).encode()), reason)


_POLICIES: Final[Mapping[str, Callable[[_Targets, Facts, _States, float], Order]]] = {
    "first": _as_written("first"),
    "cheapest": _cheapest,
    "fastest": _fastest,
    "weighted": _hashed("weight"),
    "affinity": _hashed("affinity"),
    "size": _as_written("fits"),
    "cascade": _as_written("small"),
}
