"""Where two prompts stop being equal, and why the later one missed. Pure.

same            nothing was missed: what is equal was read from a cache
volatile        a part differs in nothing but dates, times, ids or numbers, and static text comes behind it
tools_order     the same tools stand in another order
tools_changed   a tool was added, removed or edited: tools come before everything else
moved           both have the part, at another place
marked_changes  the part that is marked for caching changes from request to request
changed         a part was edited
new_question    what differs is the last message: nothing could have been saved
too_short       the prompt is shorter than what is cached at all
bypass          its client wanted nothing to be reused
other_model, other_tenant, other_scope    caches are not shared between these
other_engine    another engine answered, which did not have it
evicted         the same engine had it and lost it before this request came
never_seen      no prompt before it began like it
unknown         too little is known of one of them, or what is kept of both is equal and does not go on to their ends
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple

from gateway.explain.parts import Part, ends_of

Cause = Literal[
    "same",
    "volatile",
    "tools_order",
    "tools_changed",
    "moved",
    "marked_changes",
    "changed",
    "new_question",
    "too_short",
    "bypass",
    "other_model",
    "other_tenant",
    "other_scope",
    "other_engine",
    "evicted",
    "never_seen",
    "unknown",
]

ADVICE: Final[dict[Cause, str]] = {
    "volatile": "Put dates, times and ids behind the text that stays the same: into the last message, for example.",
    "tools_order": "Send tools in one fixed order: sort them by name.",
    "tools_changed": "Send the same tools with every request; forbid some with tool_choice, and leave none out.",
    "moved": "Keep parts in one order: tools, system prompt, documents, then the conversation, which only grows.",
    "marked_changes": "Mark the last part that stays the same, not one that changes with every request.",
    "changed": "Text that is edited belongs behind text that is not; a conversation that only grows stays cached.",
    "too_short": "Nothing to do: so short a prompt is computed at once.",
    "bypass": "Leave out what asks for that (prompt_cache_options, logprobs of the prompt) where reuse is wanted.",
    "other_model": "Each model has a cache of its own: send requests that begin alike to one model.",
    "other_tenant": "Tenants share nothing unless a namespace is configured for them ([[namespaces]]).",
    "other_scope": "Send the same prompt_cache_key, cache_salt and namespace, or none: each has a cache of its own.",
    "other_engine": "Look at the scores of the route: the engine that had it was busier, or was not to be reached.",
    "evicted": "Give engines more cache (engine.kv_cache_bytes, lower tiers), or mark the prefix: a lease keeps it.",
    "never_seen": "The first request of its kind is always computed; [[warm]] computes a prefix before it comes.",
}

SLACK_BLOCKS: Final = 2
"""That a hit may be shorter than what is equal: the last block is seldom full, and the last token is computed."""


_LOST: Final = ("evicted", "other_engine")
_APART: Final = ("other_model", "other_tenant", "other_scope")
_NOTHING_AGAIN: Final = ("same", "new_question", "never_seen", "unknown", "bypass")

HOSTED_LEAST: Final = 1024
HOSTED_STEP: Final = 128
"""Tokens of the shortest prefix that hosted APIs cache as a rule, and in which longer ones grow."""

LEAST_CHARS: Final = 200
"""With which two first parts begin alike before one is called an edit of the other."""


class Eviction(NamedTuple):
    """When an engine lost the first block that was missing, and to whose request; empty where that is not known."""

    at_s: float  # since 1970
    tenant: str
    request_id: str


class View(NamedTuple):
    """What is known of a request.

    parts          empty where nothing is known
    num_tokens     of its prompt, 0 where that is not known
    cached_tokens  that it read from a cache; None: it was not sent
    block_size     tokens in which what is cached grows
    hosted         an upstream answered: which of its machines did, and what their caches keep, is not known
    uncached       its client wanted nothing to be reused, and nothing of it can be
    began_s        since 1970, 0 where that is not known
    evicted        of what it might have read
    """

    model: str
    tenant: str
    scope: str
    parts: Sequence[Part]
    num_tokens: int = 0
    cached_tokens: int | None = None
    engine: str = ""
    block_size: int = 16
    hosted: bool = False
    uncached: bool = False
    began_s: float = 0.0
    evicted: Eviction | None = None


class Verdict(NamedTuple):
    """`part` is the number of the first part that differs, in both, and `char` the first character of it; None where
    none does, or texts are not known."""

    cause: Cause
    text: str
    part: int | None = None
    char: int | None = None

    @property
    def advice(self) -> str | None:
        return ADVICE.get(self.cause)


def view_of(row: Mapping[str, Any]) -> View:
    """Of a request that was answered, by the row that is kept of it (admin/requests.py)."""
    parts = [
        Part(one["part"], one["role"], one["message"], one["chars"], one["hash"], one["shape"], one["marked"])
        for one in row.get("segments", ())
    ]
    hosted = bool(row.get("hosted"))
    return View(
        model=row.get("model") or "",
        tenant=row.get("tenant") or "",
        scope=row.get("scope") or "",
        parts=parts,
        num_tokens=row.get("prompt_tokens", 0),
        cached_tokens=row.get("cached_tokens") if row.get("hit") in ("prefix", "miss", "bypass") else None,
        engine=row.get("engine") or "",
        block_size=HOSTED_STEP if hosted else 16,
        hosted=hosted,
        uncached=bool(row.get("uncached")),
        began_s=row.get("at_s", 0.0) - row.get("total_ms", 0.0) / 1e3,
        evicted=Eviction(lost["at_s"], lost["tenant"], lost["id"]) if (lost := row.get("evicted")) else None,
    )


def likeness(before: View, now: View) -> tuple[int, int, int, int]:
    """The most alike of earlier requests has the most of it: what begins like it, dates and ids aside; then what could
    have shared its cache; then what is the same in both."""
    close = sum(one == other for one, other in zip(before[:3], now[:3], strict=True))
    common = {part.digest for part in before.parts} & {part.digest for part in now.parts}
    equal = equal_parts(before.parts, now.parts)
    return equal_parts(before.parts, now.parts, shapes=True), close, equal, len(common)


def equal_by_parts(before: View, now: View) -> int:
    """Tokens that both begin with, as far as parts tell."""
    count = equal_parts(before.parts, now.parts)
    if count == len(now.parts):
        return now.num_tokens
    if count == len(before.parts) and before.num_tokens:  # it is known, and shares of characters are not
        return min(before.num_tokens, now.num_tokens)
    return ends_of(now.parts, now.num_tokens)[count - 1] if count else 0


def computed_again(cause: Cause, before: View, now: View, equal_tokens: int) -> int | None:
    """Tokens that it would not have had to compute. None where that is not the question."""
    if cause in _NOTHING_AGAIN:
        return None
    whole = min(now.num_tokens, before.num_tokens) if before.num_tokens else now.num_tokens
    reused = equal_tokens if now.cached_tokens is None else now.cached_tokens
    return max(0, (equal_tokens if cause in _LOST else whole) - (0 if cause in _APART else reused))


def equal_parts(before: Sequence[Part], now: Sequence[Part], *, shapes: bool = False) -> int:
    """How many they have in common at the beginning; with `shapes`, dates and ids aside."""
    count = 0
    for one, other in zip(before, now, strict=False):
        alike = one.digest == other.digest or (shapes and one.shape == other.shape)
        if one.role != other.role or not alike:
            break
        count += 1
    return count


def explain(before: View, now: View, equal_tokens: int) -> Verdict:
    """Why `now` did not read from a cache what `before` had put there. `equal_tokens` are those that they begin with in
    common, as far as it is known."""
    if not before.parts or not now.parts:
        return Verdict("unknown", "Too little is known of one of the requests to compare them.")
    if now.uncached:
        return Verdict("bypass", "It asked that nothing be read from a cache, and nothing be kept in one.")
    at = equal_parts(before.parts, now.parts)
    differs = at < len(before.parts) and at < len(now.parts)
    if (apart := _apart(before, now, at)) is not None:
        return apart
    least = HOSTED_LEAST if now.hosted else now.block_size
    if now.num_tokens and min(now.num_tokens, before.num_tokens or now.num_tokens) < least:
        what = f"the {least} that hosted APIs cache as a rule" if now.hosted else f"a block of {least}"
        return Verdict("too_short", f"A prompt of {now.num_tokens} tokens is less than {what}.")
    if differs and now.parts[at].section == "rest":
        return _rest(before, now, at)
    if not differs:
        return _all_equal(before, now, equal_tokens)
    cause, text = _difference(before.parts, now.parts, at)
    one, other = before.parts[at].text, now.parts[at].text
    char = None if one is None or other is None else common(one, other)
    return Verdict(cause, text, at, char)


def _apart(before: View, now: View, at: int) -> Verdict | None:
    """They may begin alike, and share no cache."""
    if not at:
        return None
    if before.model != now.model:
        return Verdict("other_model", f"The same beginning was sent to the model {before.model} before.")
    if before.tenant != now.tenant:
        return Verdict("other_tenant", "Another tenant sent the same beginning before.")
    if before.scope != now.scope:
        return Verdict("other_scope", "The same beginning was sent with another cache key, salt or namespace before.")
    return None


def _rest(before: View, now: View, at: int) -> Verdict:
    """What differs is behind the parts that are kept."""
    kept = before.num_tokens - SLACK_BLOCKS * now.block_size
    if now.cached_tokens is not None and 0 < kept <= now.cached_tokens:
        return Verdict("same", "It read all of the other from a cache: nothing was missed.", at)
    return Verdict("unknown", f"They are equal as far as is known: of each the first {at} parts are kept.", at)


def _all_equal(before: View, now: View, equal_tokens: int) -> Verdict:
    missing = 0 if now.cached_tokens is None else equal_tokens - now.cached_tokens
    if missing <= SLACK_BLOCKS * now.block_size:
        return Verdict("same", "The one begins with all of the other: nothing was missed.")
    if before.engine != now.engine:
        return Verdict("other_engine", f"Engine {before.engine} had it, and {now.engine} answered.")
    if now.hosted:
        read = f"{now.cached_tokens} of {equal_tokens} tokens"
        return Verdict("unknown", f"{now.engine} read {read} from a cache: which ones an upstream keeps is not known.")
    return Verdict("evicted", f"Engine {now.engine} had {equal_tokens} tokens of it, and {_lost(before, now)}.")


def _lost(before: View, now: View) -> str:
    lost = now.evicted
    if lost is None or lost.at_s < before.began_s:
        return "lost them before it came; when, and for whom, is not known"
    at = time.strftime("%H:%M:%S UTC on %Y-%m-%d", time.gmtime(lost.at_s))
    if not lost.request_id:
        return f"lost them at {at}; for whom is not known"
    return f"lost them at {at} to the request {lost.request_id} of {lost.tenant or 'no tenant'}"


def _difference(before: Sequence[Part], now: Sequence[Part], at: int) -> tuple[Cause, str]:
    one, other = before[at], now[at]
    place = _place(other)
    if at == len(now) - 1 and at > 0 and other.section == "messages":
        return "new_question", f"All is equal up to the last message (number {other.message})."
    if (one.role, one.shape) == (other.role, other.shape):
        return "volatile", f"{place} differs in dates, times, ids or numbers alone."
    if "tools" in (one.section, other.section):
        tools = [sorted(part.digest for part in parts if part.section == "tools") for parts in (before, now)]
        if tools[0] == tools[1]:
            return "tools_order", f"Both have the same {len(tools[0])} tools, in another order."
        return "tools_changed", f"Tools differ from the tool {other.role if other.section == 'tools' else one.role} on."
    if other.digest in {part.digest for part in before[at:]} or one.digest in {part.digest for part in now[at:]}:
        return "moved", f"{place} of one of them stands at another place in the other."
    if other.marked and not any(part.marked for part in now[:at]):
        return "marked_changes", f"{place} is marked for caching, and is another one in each request."
    if at == 0 and not _edited(before, now):
        return "never_seen", "The two have no beginning in common."
    return "changed", f"{place} was edited; the {at} parts before it are equal."


def _edited(before: Sequence[Part], now: Sequence[Part]) -> bool:
    """Whether two first parts are one that was edited: they begin alike, or what follows is the same."""
    one, other = before[0].text, now[0].text
    if one is not None and other is not None and common(one, other) >= min(LEAST_CHARS, len(one) // 2, len(other) // 2):
        return True
    return bool({part.digest for part in before[1:]} & {part.digest for part in now[1:]})


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many characters, or tokens, both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _place(part: Part) -> str:
    words = {"tools": f"The tool {part.role}", "prompt": "The prompt"}.get(part.section)
    return words or f"The {part.role} message (number {part.message})"
