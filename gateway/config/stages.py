"""The stages of the pipeline that every request passes: prompt, routing, queue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config import Section

CacheKeyMode = Literal["separate", "hint"]


class PromptSettings(Section):
    """[prompt]: rendering and tokenising."""

    segment_memo_bytes: Annotated[int, Field(ge=0)] = Field(
        256 << 20, description="Bytes of text and tokens that the segment memo of one model holds; 0 switches it off."
    )
    chain_memo_bytes: Annotated[int, Field(ge=0)] = Field(
        256 << 20,
        description="Bytes of text, tokens and block hashes that the chain memo of one model holds; 0 switches it off.",
    )
    prompt_memo_bytes: Annotated[int, Field(ge=0)] = Field(
        64 << 20, description="Bytes that the memo of whole prompts of one model holds; 0 switches it off."
    )
    thread_chars: Annotated[int, Field(ge=0)] = Field(
        20_000, description="Characters of new text from which on tokenising leaves the event loop for a thread."
    )
    cache_key: CacheKeyMode = Field(
        "separate",
        description="`separate`: a `prompt_cache_key` separates prefixes; `hint`: it only steers equal keys to one "
        "engine.",
    )


class RoutingSettings(Section):
    """[routing]: which engine gets a prompt."""

    prefill_weight: Annotated[float, Field(ge=0)] = Field(
        4.0, description="Factor on a request's own prefill time against the time it waits for others."
    )
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = Field(
        1000.0, description="Tokens per second assumed of an engine that has not measured its own prefill yet."
    )
    max_backlog_s: Annotated[float, Field(gt=0)] = Field(
        0.5, description="Seconds of prefill in front of an engine beyond which requests wait in the gateway instead."
    )


class QueueSettings(Section):
    """[queue]: slots at the engines, for the online lane and for the batch lane in what that leaves."""

    max_waiting: Annotated[int, Field(ge=0)] = Field(
        1024, description="Requests that wait for a slot, of all tenants; the next one gets 429."
    )
    max_waiting_per_tenant: Annotated[int, Field(ge=0)] = Field(
        512, description="Requests of one tenant that wait for a slot; the next one gets 429."
    )
    max_wait_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds that a request waits for a slot before it gets 503."
    )
    slots_per_engine: Annotated[int, Field(ge=0)] = Field(
        0, description="Requests that one engine works on; 0 takes twice what the engine runs at a time."
    )
    batch_slots_per_engine: Annotated[int, Field(ge=0)] = Field(
        0, description="Requests of the batch lane that one engine works on; 0 takes what the engine runs at a time."
    )
    tier_s: Annotated[float, Field(ge=0)] = Field(
        1.0,
        description="Seconds of engine time by which `flex` requests are put back and `priority` ones ahead.",
    )
    aging: Annotated[float, Field(gt=0, le=10)] = Field(
        0.05, description="Seconds of prefill that one second of waiting makes up for."
    )
    overload_share: Annotated[float, Field(gt=0, le=1)] = Field(
        0.4, description="Share of engine time spent on recomputing evicted prefixes that counts as overload."
    )
    overload_aging: Annotated[float, Field(gt=0, le=10)] = Field(0.015, description="`aging` while overloaded.")
