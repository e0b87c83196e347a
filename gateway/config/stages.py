"""The stages of the pipeline: prompt, queue, and the caches of answers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from engine.config import Section
from gateway.config.units import Share

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


class ResponseCacheSettings(Section):
    """[response_cache]: answers that are given again to the same request, of the same tenant."""

    mode: Literal["on", "ask", "off"] = "on"
    """`on`: every request that may be; `ask`: those that ask for it; `off`: none."""
    upstreams: Literal["on", "ask", "off"] = "ask"
    """The same for requests to upstreams, where `mode` or a tenant allows no less. Embeddings follow `mode` alone."""
    requests: Literal["deterministic", "all"] = "deterministic"
    """`deterministic`: with temperature 0 or a seed, and those that ask for the cache; `all`: all."""
    tool_calls: bool = False
    """Whether answers that may call tools are kept and shared, too."""
    truncated: bool = False
    """Whether answers that `max_tokens` cut are kept, too."""
    ttl_s: PositiveFloat = 3600.0
    """Seconds that an answer is kept, from its end, when its request does not say."""
    max_ttl_s: PositiveFloat = 604800.0
    """Seconds that a request may ask for, at most; 7 days."""
    max_entry_bytes: ClassVar = 1 << 20
    """Of one answer; a larger one is not kept."""
    max_memory_bytes: NonNegativeInt = 128 << 20
    """Bytes of answers in a gateway's memory; 0 keeps none. The tenant with most loses its least recently used."""
    memory_s: ClassVar = 60.0
    """That an answer is given from memory before Redis is asked whether it still exists."""
    removals_s: ClassVar = 1.0
    """Between looks in Redis for answers that other gateways removed."""
    max_rendered_bytes: NonNegativeInt = 32 << 20
    """Bytes of requests and rendered answers in memory, to answer equal bytes without parsing; 0 keeps none."""
    max_redis_bytes: NonNegativeInt = 64 << 20
    """Bytes of answers in Redis, of all tenants, those used last; 0 keeps none there."""
    max_redis_bytes_per_tenant: NonNegativeInt = 32 << 20
    """Bytes of answers in Redis of one tenant or namespace."""
    max_flight_bytes: ClassVar = 8 << 20
    """Of a shared answer that wait for its slowest reader before that reader is dropped."""

    @model_validator(mode="after")
    def _in_order(self) -> ResponseCacheSettings:
        if self.ttl_s > self.max_ttl_s:
            raise ValueError("ttl_s is more than max_ttl_s")
        return self


class SemanticCacheSettings(Section):
    """[semantic_cache]: answers to questions that mean the same. Needs the extra `semantic`, and the response cache."""

    mode: Literal["on", "ask", "off"] = "off"
    """Which requests it is for: `on` for all that fit, `ask` for those that ask, `off` for none."""
    bound: Annotated[float, Field(gt=0, le=0.2)] = 0.01
    """Accepted wrong hits, as a share of requests that are looked up (and of a fifth of literal repeats)."""
    judged: bool = True
    """Whether answers are compared to learn which hits are right; else `unjudged_similarity` decides."""
    unjudged_similarity: Share = 0.915
    """Cosine that a hit needs where no answers are compared."""
    min_similarity: Share = 0.8
    """Cosine that every hit needs at least; requests may only raise it."""
    strict: bool = False
    """Whether the same words in another order are another question."""
    audit_share: Annotated[float, Field(gt=0, le=1)] = 0.03
    """Requests whose hit is compared with a fresh answer, as a share of all, about."""
    max_audits: ClassVar = 4
    """Audits at the same time; beyond, a hit that is due for one is answered afresh."""
    max_judging: ClassVar = 64
    """Answers that wait to be compared: a burst; beyond, what they would have taught is not learned."""
    max_temperature: NonNegativeFloat = 0.3
    """Requests with a higher temperature are not looked up."""
    max_text_tokens: ClassVar = 256
    """Wordpieces of a question; longer texts say more than one vector holds, and are not looked up."""
    max_text_chars: ClassVar = 4000
    """The same in characters, before anything is tokenised."""
    ttl_s: PositiveFloat = 3600.0
    """Seconds from its answer after which a question is forgotten; being used adds nothing."""
    max_models: ClassVar = 64
    """Models of one tenant whose questions are kept: clients may make up names where a pattern serves them."""
    max_entries: ClassVar = 100_000
    """Questions of one tenant to one model in Redis."""
    max_scope_entries: ClassVar = 20_000
    """Questions that differ in the last message alone, so that one situation leaves room for others."""
    max_memory_bytes: NonNegativeInt = 1 << 30
    """Bytes of all questions in a gateway's memory, about. The tenant with most loses its least recently used."""
    max_redis_bytes: NonNegativeInt = 32 << 20
    """Bytes of questions in Redis of one tenant and model; 0 keeps none there."""
    lookup_timeout_s: PositiveFloat = 0.25
    """Seconds that a look-up may take; then the request is answered afresh."""
    sync_s: ClassVar = 1.0
    """From one look at what other gateways keep in Redis to the next."""
