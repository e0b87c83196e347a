"""What one API, or one kind of request, is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from engine.config import Section
from gateway.config.kept import StoredResponseSettings
from gateway.config.units import Duration, duration_s, split


class ApiSettings(Section):
    """[api]: what all APIs have in common."""

    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="`ignore` names unknown fields in a header, `refuse` is a 400. Typos of known fields are always "
        "refused.",
    )


class GeminiSettings(Section):
    """[gemini]: the cached contents of the Gemini API. How much of their prefixes is kept is the engine's to say."""

    default_ttl: Duration = Field("1h", description="Time to live of a cached content that asks for none.")
    min_ttl: Duration = Field("1s", description="Shortest time to live that a cached content may ask for.")
    max_ttl: Duration = Field("12h", description="Longest time to live that a cached content may ask for.")
    min_tokens: Annotated[int, Field(ge=0)] = Field(0, description="Tokens that a cached content has at least.")
    max_contents: Annotated[int, Field(ge=1)] = Field(
        1000, description="Cached contents that one tenant keeps at most; the next one gets 429."
    )
    max_content_bytes: Annotated[int, Field(ge=1024)] = Field(
        8 << 20, description="Bytes of JSON that one cached content has at most; a larger one is refused."
    )
    max_bytes: Annotated[int, Field(ge=1024)] = Field(
        64 << 20, description="Bytes of JSON that the cached contents of one tenant have at most."
    )

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

    lookback_blocks: Annotated[int, Field(ge=1, le=64)] = Field(
        20, description="Blocks, from a marked one backwards, at whose end a cached prefix counts as read."
    )
    min_cache_tokens: Annotated[int, Field(ge=0)] = Field(
        0, description="Tokens that a prefix needs to be cached; a marker after fewer is ignored, as upstream."
    )
    min_cache_tokens_of: tuple[Annotated[str, Field(pattern=r"^.+=[0-9]{1,9}$")], ...] = Field(
        (), description="The same for single models, as `MODEL=TOKENS`; several separated by commas."
    )

    diagnostics_ttl_s: Annotated[float, Field(gt=0)] = Field(
        3600.0, description="Seconds that the hashes of a prompt are remembered whose request asks for diagnostics."
    )
    diagnostics_max_prompts: Annotated[int, Field(ge=0)] = Field(
        1000, description="Prompts of one tenant whose hashes are remembered at most, the latest; 0 remembers none."
    )
    diagnostics_max_bytes: Annotated[int, Field(ge=0)] = Field(
        8 << 20, description="Bytes of hashes of one tenant's prompts that are remembered at most."
    )

    @property
    def fingerprints(self) -> StoredResponseSettings:
        """The limits of what is remembered."""
        return StoredResponseSettings(
            ttl_s=self.diagnostics_ttl_s,
            max_responses=self.diagnostics_max_prompts,
            max_bytes=self.diagnostics_max_bytes,
        )

    @model_validator(mode="before")
    @classmethod
    def _split_models(cls, data: object) -> object:
        return split(data, "min_cache_tokens_of")

    def min_tokens_of(self, model: str) -> int:
        """Tokens that a prefix of this model needs to be cached."""
        for item in self.min_cache_tokens_of:
            name, _, tokens = item.rpartition("=")
            if name == model:
                return int(tokens)
        return self.min_cache_tokens


class EmbeddingSettings(Section):
    """[embeddings]: texts as vectors, computed by the gateway itself."""

    names: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        description="Names that clients ask for the model with.",
    )
    folder: Path | None = Field(
        None,
        description="Folder of a BERT encoder that sentence-transformers saved; that of the extra when not set.",
    )
    threads: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Threads that compute vectors, each on one core, a batch at a time."
    )
    batch_tokens: Annotated[int, Field(ge=1)] = Field(
        512, description="Tokens that are computed together, of any requests; a longer text is a batch of its own."
    )
    thread_chars: Annotated[int, Field(ge=0)] = Field(
        2000, description="Characters of one request from which on tokenising leaves the event loop for a thread."
    )
    max_inputs: Annotated[int, Field(ge=1)] = Field(2048, description="Texts of one request.")
    max_input_chars: Annotated[int, Field(ge=1)] = Field(
        100_000, description="Characters of one text; a longer one is refused before it is tokenised."
    )
    max_request_tokens: Annotated[int, Field(ge=1)] = Field(300_000, description="Tokens of one request.")
    max_waiting_tokens: Annotated[int, Field(ge=1)] = Field(
        1_000_000, description="Tokens that wait to be embedded, over all tenants; a request with more gets 429."
    )
    max_waiting_tokens_per_tenant: Annotated[int, Field(ge=1)] = Field(
        500_000, description="Tokens of one tenant that wait to be embedded; a request with more gets 429."
    )

    @model_validator(mode="before")
    @classmethod
    def _split_names(cls, data: object) -> object:
        return split(data, "names")

    @model_validator(mode="after")
    def _a_request_fits_the_queue(self) -> EmbeddingSettings:
        for name in ("max_waiting_tokens", "max_waiting_tokens_per_tenant"):
            if getattr(self, name) < self.max_request_tokens:
                raise ValueError(f"{name} is less than max_request_tokens, {self.max_request_tokens}")
        return self
