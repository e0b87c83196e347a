"""Settings of the batch lane."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from engine.config import Section


class BatchSettings(Section):
    """[batches]: jobs that are answered when there is room."""

    folder: Path | None = Field(
        None,
        description="Folder of inputs and results, shared by gateways on one Redis; `batches` in `server.data_dir` "
        "when not set.",
    )
    price: Annotated[float, Field(ge=0, le=1)] = Field(
        0.5, description="Factor on the price of tokens that the batch lane computed."
    )
    window_s: Annotated[float, Field(gt=0)] = Field(
        86400.0, description="Seconds that a job may take; lines that have not begun by then expire."
    )
    max_lines: Annotated[int, Field(ge=1)] = Field(50_000, description="Lines of one job of the OpenAI API.")
    max_embedding_inputs: ClassVar = 50_000
    """Texts to embed of all lines of one job of the OpenAI API, as upstream."""
    max_requests: Annotated[int, Field(ge=1)] = Field(
        100_000, description="Requests of one message batch of the Anthropic API."
    )
    max_request_bytes: Annotated[int, Field(ge=1024)] = Field(
        256 << 20, description="Bytes of one message batch of the Anthropic API; a larger one is refused with 413."
    )
    max_jobs: Annotated[int, Field(ge=1)] = Field(
        200, description="Jobs of one tenant that have not ended; the next one gets 429."
    )
    max_waiting_lines: Annotated[int, Field(ge=1)] = Field(
        200_000, description="Lines of all jobs of one tenant that have not ended; a job with more of them fails."
    )
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        50 << 30,
        description="Bytes of one tenant's jobs on disk; the next one gets 429. 50 GiB.",
    )
    max_in_flight: Annotated[int, Field(ge=1, le=4096)] = Field(
        32, description="Lines that one gateway works on at a time, those that wait for a slot included."
    )
    line_timeout_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="Seconds that one line may take altogether, from when it is begun."
    )
    max_answer_bytes: ClassVar = 32 << 20
    """Of the answer of an upstream to one line, which is read whole."""
    max_attempts: Annotated[int, Field(ge=1)] = Field(
        5,
        description="Times that a failed or abandoned line is tried; twice at most if its engine died.",
    )
    lease_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds after which other gateways take over the lines of one that stopped."
    )
    poll_s: ClassVar = 1.0
    """From one look for something to do to the next."""
    redis_timeout_s: ClassVar = 5.0
    """For one call about jobs and lines, whose scripts do more than other calls."""
    keep_s: Annotated[float, Field(gt=0)] = Field(
        2592000.0,
        description="Seconds that a job and its results can be read once it has ended; 30 days.",
    )
    max_kept: ClassVar = 10_000
    """Jobs of one tenant, the latest; any that has not ended is kept."""
    min_free_bytes: ClassVar = 256 << 20
    """That jobs leave free on their disk; lines wait while there are fewer."""
