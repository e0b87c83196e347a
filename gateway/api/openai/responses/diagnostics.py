"""Why a request reused less than it might have: what it changed, compared with a response that is kept. Pure.

Only what belongs to a prefix here is compared. Formats, effort, verbosity and service tier do not, and are never a
reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gateway.api.openai.responses.items import Item
from gateway.api.openai.responses.store import Kept
from gateway.types import Usage

_REASONS: Final = (
    ("model_changed", "model"),
    ("prompt_cache_key_changed", "prompt_cache_key"),
    ("tools_changed", "tools"),
    ("input_changed", "instructions"),
)
"""Looked at in this order, as they come in a namespace and a prompt; the items come last."""

_UNSEEN: Final = ("id", "status")  # of an item, which are no part of a prompt


def diagnose(
    response: Mapping[str, Any], items: Sequence[Item], compared: Kept | None, usage: Usage, *, keyed: bool = True
) -> dict[str, Any]:
    """`prompt_cache_diagnostics` of a response to these items. `compared` is None when there is no such response;
    `keyed` says whether `prompt_cache_key` separates prefixes.

    A miss names the first change. Where nothing was changed and nothing reused, it is `unavailable`: what was there has
    been evicted, or was never kept.
    """
    if compared is None:
        return {"type": "comparison_response_not_found"}
    if (reason := _changed(response, items, compared, keyed)) is not None:
        missed = usage.prompt_tokens - usage.cached_tokens
        return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": missed}
    return {"type": "cache_hit" if usage.cached_tokens else "unavailable"}


def _changed(response: Mapping[str, Any], items: Sequence[Item], compared: Kept, keyed: bool) -> str | None:
    for reason, name in _REASONS:
        if response[name] != compared.response[name] and (keyed or name != "prompt_cache_key"):
            return reason
    before = [_seen(item) for item in compared.items]
    return None if before == [_seen(item) for item in items[: len(before)]] else "input_changed"


def _seen(item: Item) -> Item:
    return {key: value for key, value in item.items() if key not in _UNSEEN}
