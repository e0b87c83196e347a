"""What is stored for clients, and for how long: leases, responses, files, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from engine.config import Section
from gateway.config.units import COMMAS, Duration, Share


class LeaseSettings(Section):
    """[leases]: for how long clients may ask to have prefixes kept. How much is kept is the engine's to say."""

    ttls: Annotated[tuple[Duration, ...], Field(min_length=1), COMMAS] = ("5m", "30m", "1h", "12h")
    """Times to live that a breakpoint may ask for; any other is refused."""
    default_ttl: Duration = "30m"
    """Time to live of a breakpoint that asks for none."""


class StoredResponseSettings(Section):
    """[stored_responses]: what `/v1/responses` keeps, in Redis where there is one, else in the gateway."""

    ttl_s: PositiveFloat = 2592000.0
    """Seconds that a response is kept, from its end; 30 days."""
    max_responses: ClassVar = 10_000
    """Of one tenant, the latest; `max_bytes` is what counts."""
    max_bytes: NonNegativeInt = 33554432
    """Bytes of one tenant's responses, with the items that they answered, that are kept at most."""
    max_response_bytes: ClassVar = 8 << 20
    """Of one response, with the items that it answered; a larger one is not kept."""
    max_background: ClassVar = 256
    """Responses that one gateway works on in the background at a time; the next one gets 429."""


class FileSettings(Section):
    """[files]: what clients upload with `/v1/files`."""

    folder: Path | None = None
    """Folder of the files; `files` in `server.data_dir` when not set. Gateways may share one."""
    max_file_bytes: PositiveInt = 512 << 20
    """Bytes of one file; a larger one is refused with 413."""
    max_batch_bytes: PositiveInt = 200 << 20
    """Bytes of one file with the purpose `batch`; a larger one is refused with 413."""
    max_files: PositiveInt = 10_000
    """Files of one tenant; the next one gets 429."""
    max_bytes: PositiveInt = 10 << 30
    """Bytes of all files of one tenant; a file that would be more gets 429."""
    batch_ttl_s: PositiveFloat = 2592000.0
    """Seconds that a file with the purpose `batch` is kept that does not say; 30 days."""
    min_free_bytes: ClassVar = 256 << 20
    """That files leave free on their disk; an upload that would take them gets 507."""
    max_uploads: ClassVar = 64
    """At the same time, over all tenants; the next one gets 429. Each takes 1 MiB of memory."""
    max_uploads_per_tenant: ClassVar = 16
    """The same of one tenant."""
    upload_timeout_s: PositiveFloat = 600.0
    """Seconds that an upload may take to arrive."""
    sweep_s: ClassVar = 60.0
    """From one look for files that are over their time to the next."""


class BatchSettings(Section):
    """[batches]: jobs that are answered when there is room."""

    folder: Path | None = None
    """Folder of inputs and results, shared by gateways on one Redis; `batches` in `server.data_dir` when not set."""
    price: Share = 0.5
    """Factor on the price of tokens that the batch lane computed."""
    window_s: PositiveFloat = 86400.0
    """Seconds that a job may take; lines that have not begun by then expire."""
    max_lines: PositiveInt = 50_000
    """Lines of one job of the OpenAI API."""
    max_embedding_inputs: ClassVar = 50_000
    """Texts to embed of all lines of one job of the OpenAI API, as upstream."""
    max_requests: PositiveInt = 100_000
    """Requests of one message batch of the Anthropic API."""
    max_request_bytes: Annotated[int, Field(ge=1024)] = 256 << 20
    """Bytes of one message batch of the Anthropic API; a larger one is refused with 413."""
    max_jobs: PositiveInt = 200
    """Jobs of one tenant that have not ended; the next one gets 429."""
    max_waiting_lines: PositiveInt = 200_000
    """Lines of all jobs of one tenant that have not ended; a job with more of them fails."""
    max_bytes: PositiveInt = 50 << 30
    """Bytes of one tenant's jobs on disk; the next one gets 429. 50 GiB."""
    max_in_flight: Annotated[int, Field(ge=1, le=4096)] = 32
    """Lines that one gateway works on at a time, those that wait for a slot included."""
    line_timeout_s: PositiveFloat = 3600.0
    """Seconds that one line may take altogether, from when it is begun."""
    max_answer_bytes: ClassVar = 32 << 20
    """Of the answer of an upstream to one line, which is read whole."""
    max_attempts: PositiveInt = 5
    """Times that a failed or abandoned line is tried; twice at most if its engine died."""
    lease_s: PositiveFloat = 60.0
    """Seconds after which other gateways take over the lines of one that stopped."""
    poll_s: ClassVar = 1.0
    """From one look for something to do to the next."""
    redis_timeout_s: ClassVar = 5.0
    """For one call about jobs and lines, whose scripts do more than other calls."""
    keep_s: PositiveFloat = 2592000.0
    """Seconds that a job and its results can be read once it has ended; 30 days."""
    max_kept: ClassVar = 10_000
    """Jobs of one tenant, the latest; any that has not ended is kept."""
    min_free_bytes: ClassVar = 256 << 20
    """That jobs leave free on their disk; lines wait while there are fewer."""
