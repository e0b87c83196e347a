"""The APIs, and what is stored for their clients: leases, cached contents, responses, files, batches."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from engine.config import Section
from gateway.config.units import COMMAS, Duration, Share, duration_s


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


class ApiSettings(Section):
    """[api]: what all APIs have in common."""

    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """`ignore` names unknown fields in a header, `refuse` is a 400. Typos of known fields are always refused."""


class GeminiSettings(Section):
    """[gemini]: the cached contents of the Gemini API. How much of their prefixes is kept is the engine's to say."""

    default_ttl: Duration = "1h"
    """Time to live of a cached content that asks for none."""
    min_ttl: ClassVar = "1s"
    max_ttl: Duration = "12h"
    """Longest time to live that a cached content may ask for."""
    min_tokens: NonNegativeInt = 0
    """Tokens that a cached content has at least."""
    max_contents: ClassVar = 1000
    """Of one tenant; `max_bytes` is what counts, this bounds the list."""
    max_content_bytes: ClassVar = 8 << 20
    """Of JSON; a larger content is refused."""
    max_bytes: Annotated[int, Field(ge=1024)] = 64 << 20
    """Bytes of JSON that the cached contents of one tenant have at most."""

    @property
    def longest_s(self) -> float:
        return duration_s(self.max_ttl)

    @model_validator(mode="after")
    def _in_order(self) -> GeminiSettings:
        if not duration_s(self.min_ttl) <= duration_s(self.default_ttl) <= duration_s(self.max_ttl):
            raise ValueError("default_ttl has to be between min_ttl and max_ttl")
        return self


class AnthropicSettings(Section):
    """[anthropic]: what the Anthropic API leaves to the model or to the server."""

    lookback_blocks: ClassVar = 20
    """From a marked block backwards, at whose end a cached prefix counts as read; as upstream."""
    min_cache_tokens: NonNegativeInt = 0
    """Tokens that a prefix needs to be cached; a marker after fewer is ignored, as upstream."""

    diagnostics_ttl_s: ClassVar = 3600.0
    """That the hashes of a prompt are remembered: a session asks about its last turns."""
    diagnostics_max_bytes: ClassVar = 8 << 20
    """Of hashes of one tenant's prompts."""

    @property
    def fingerprints(self) -> StoredResponseSettings:
        """The limits of what is remembered."""
        return StoredResponseSettings(ttl_s=self.diagnostics_ttl_s, max_bytes=self.diagnostics_max_bytes)


class EmbeddingSettings(Section):
    """[embeddings]: texts as vectors, computed by the gateway itself."""

    names: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1), COMMAS] = (
        "all-MiniLM-L6-v2",
        "sentence-transformers/all-MiniLM-L6-v2",
    )
    """Names that clients ask for the model with."""
    folder: Path | None = None
    """Folder of a BERT encoder that sentence-transformers saved; that of the extra when not set."""
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads that compute vectors, each on one core, a batch at a time."""
    batch_tokens: ClassVar = 512
    """That are computed together, of any requests: more are no faster, and others wait for them longer."""
    thread_chars: ClassVar = 2000
    """Of one request from which on tokenising leaves the event loop: about a millisecond."""
    max_inputs: ClassVar = 2048
    """Texts of one request, as upstream."""
    max_input_chars: ClassVar = 100_000
    """Of one text; a longer one is refused before it is tokenised."""
    max_request_tokens: ClassVar = 300_000
    """As upstream."""
    max_waiting_tokens: ClassVar = 1_000_000
    """Over all tenants; a request with more gets 429. Minutes of work for a CPU."""
    max_waiting_tokens_per_tenant: ClassVar = 500_000
    """The same of one tenant."""
