"""The stages of the pipeline that every request passes: prompt, routing, queue."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat

from engine.config import Section

CacheKeyMode = Literal["separate", "hint"]


class PromptSettings(Section):
    """[prompt]: rendering and tokenising."""

    memo_bytes: NonNegativeInt = 576 << 20
    """Bytes that remember the segments, chains and prompts of one model; 0 remembers none."""
    thread_chars: ClassVar = 20_000
    """Of new text from which on tokenising leaves the event loop for a thread: some milliseconds."""
    cache_key: CacheKeyMode = "separate"
    """`separate`: a `prompt_cache_key` separates prefixes; `hint`: it only steers equal keys to one engine."""

    @property
    def prompt_memo_bytes(self) -> int:
        """Of whole prompts; segments and chains, which most requests share, have four times as much each."""
        return self.memo_bytes // 9

    @property
    def segment_memo_bytes(self) -> int:
        return 4 * self.memo_bytes // 9

    @property
    def chain_memo_bytes(self) -> int:
        return 4 * self.memo_bytes // 9


class QueueSettings(Section):
    """[queue]: slots at the engines, for the online lane and for the batch lane in what that leaves."""

    max_waiting: NonNegativeInt = 1024
    """Requests that wait for a slot, of all tenants; the next one gets 429."""
    max_waiting_per_tenant: NonNegativeInt = 512
    """Requests of one tenant that wait for a slot; the next one gets 429."""
    max_wait_s: PositiveFloat = 60.0
    """Seconds that a request waits for a slot before it gets 503."""
    slots_per_engine: NonNegativeInt = 0
    """Requests that one engine works on; 0 takes twice what the engine runs at a time."""
    batch_slots_per_engine: NonNegativeInt = 0
    """Requests of the batch lane that one engine works on; 0 takes what the engine runs at a time."""
    tier_s: ClassVar = 1.0
    """Of engine time by which `flex` requests are put back and `priority` ones ahead."""
    aging: ClassVar = 0.05
    """Seconds of prefill that one second of waiting makes up for: short prompts go first, long ones go."""
    overload_share: ClassVar = 0.4
    """Of engine time spent on recomputing evicted prefixes that counts as overload."""
    overload_aging: ClassVar = 0.015
    """`aging` while overloaded."""
