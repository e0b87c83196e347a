"""What a tenant may ask for."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from engine.config import Section

MOST = 10**9
"""Of any limit per minute; times are kept in microseconds, in which what is more could not be told apart."""

PerMinute = Annotated[int, Field(ge=0, le=MOST)]


class LimitSettings(Section):
    """[limits]: what each tenant may ask for in the online lane, over all gateways that share a Redis."""

    requests_per_minute: PerMinute = Field(0, description="Requests of one tenant per minute; 0 is no limit.")
    tokens_per_minute: PerMinute = Field(
        0, description="Tokens of one tenant's prompts and completions per minute; 0 is no limit."
    )
    input_tokens_per_minute: PerMinute = Field(
        0, description="Tokens of one tenant's prompts per minute; 0 is no limit."
    )
    output_tokens_per_minute: PerMinute = Field(
        0, description="Tokens of one tenant's completions per minute; 0 is no limit."
    )
    max_in_flight: Annotated[int, Field(ge=0)] = Field(
        0, description="Requests of one tenant that wait or are answered at a time, streamed or not; 0 is no limit."
    )
    burst_s: Annotated[float, Field(gt=0, le=60)] = Field(
        60.0,
        description="Seconds' worth of a limit that may be used at once: no minute has more than 1 + burst_s / 60 of "
        "it.",
    )
    count_cached_tokens: bool = Field(
        False, description="Whether tokens of prompts that were reused count against the limits of tokens."
    )
    assumed_completion_tokens: ClassVar = 256
    """That are set aside for an answer whose request names no maximum; most answers are shorter."""
    lease_s: ClassVar = 60.0
    """After which the requests of a gateway that was killed are no longer in flight."""
