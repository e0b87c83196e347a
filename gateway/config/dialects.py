"""What one API, or one kind of request, is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, model_validator

from engine.config import Section
from gateway.config.stored import StoredResponseSettings
from gateway.config.units import COMMAS, Duration, duration_s


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
