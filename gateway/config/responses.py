"""Answers that are given again: the response cache."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from engine.config import Section


class ResponseCacheSettings(Section):
    """[response_cache]: answers that are given again to the same request, of the same tenant."""

    mode: Literal["on", "ask", "off"] = Field(
        "on", description="`on`: every request that may be; `ask`: those that ask for it; `off`: none."
    )
    upstreams: Literal["on", "ask", "off"] = Field(
        "ask",
        description="The same for requests to upstreams, where `mode` or a tenant allows no less. Embeddings follow "
        "`mode` alone.",
    )
    requests: Literal["deterministic", "all"] = Field(
        "deterministic",
        description="`deterministic`: with temperature 0 or a seed, and those that ask for the cache; `all`: all.",
    )
    tool_calls: bool = Field(False, description="Whether answers that may call tools are kept and shared, too.")
    truncated: bool = Field(False, description="Whether answers that `max_tokens` cut are kept, too.")
    ttl_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="Seconds that an answer is kept, from its end, when its request does not say."
    )
    max_ttl_s: Annotated[float, Field(gt=0)] = Field(
        604800.0, description="Seconds that a request may ask for, at most; 7 days."
    )
    max_entry_bytes: ClassVar = 1 << 20
    """Of one answer; a larger one is not kept."""
    max_memory_bytes: Annotated[int, Field(ge=0)] = Field(
        128 << 20,
        description="Bytes of answers in a gateway's memory; 0 keeps none. The tenant with most loses its least "
        "recently used.",
    )
    memory_s: ClassVar = 60.0
    """That an answer is given from memory before Redis is asked whether it still exists."""
    removals_s: ClassVar = 1.0
    """Between looks in Redis for answers that other gateways removed."""
    max_rendered_bytes: Annotated[int, Field(ge=0)] = Field(
        32 << 20,
        description="Bytes of requests and rendered answers in memory, to answer equal bytes without parsing; 0 "
        "keeps none.",
    )
    max_redis_bytes: Annotated[int, Field(ge=0)] = Field(
        64 << 20, description="Bytes of answers in Redis, of all tenants, those used last; 0 keeps none there."
    )
    max_redis_bytes_per_tenant: Annotated[int, Field(ge=0)] = Field(
        32 << 20, description="Bytes of answers in Redis of one tenant or namespace."
    )
    max_flight_bytes: ClassVar = 8 << 20
    """Of a shared answer that wait for its slowest reader before that reader is dropped."""

    @model_validator(mode="after")
    def _in_order(self) -> ResponseCacheSettings:
        if self.ttl_s > self.max_ttl_s:
            raise ValueError("ttl_s is more than max_ttl_s")
        return self
