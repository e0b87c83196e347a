"""Settings of the gateway and of `kvasir serve`: one frozen section per stage. Read with engine.config.load.

A section goes to the stage it is named after and to nobody else; app.py hands them out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from engine.config import SHORT_FLAGS, EngineSettings, Section
from gateway.types import ANONYMOUS

SHORT_FLAGS.update(
    {
        "server.host": "--host",
        "server.port": "--port",
        "server.data_dir": "--data-dir",
        "server.log_level": "--log-level",
        "redis.url": "--redis-url",
        "engines.count": "--engines",
        "engines.urls": "--engine-urls",
        "engine.model": "--model",
        "engine.revision": "--revision",
        "engine.served_name": "--served-name",
        "engine.dtype": "--dtype",
        "engine.device": "--device",
        "engine.listen": "--listen",
        "engine.block_size": "--block-size",
        "engine.kv_cache_bytes": "--kv-cache-bytes",
        "engine.max_context_tokens": "--max-context-tokens",
        "engine.threads": "--threads",
    }
)


class ServerSettings(Section):
    """[server]: the HTTP side of the gateway."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for every interface.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="TCP port; 0 takes a free one.")
    data_dir: Path = Field(
        Path(".kvasir"),
        description="Folder for what must survive a restart (the embedded Redis, blocks); made when missing.",
    )
    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        32 << 20, description="Bytes; a larger request body is refused with 413."
    )
    max_json_depth: Annotated[int, Field(ge=8, le=900)] = Field(
        128, description="Levels; a request body nested deeper is refused with 400."
    )
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that one request may take altogether."
    )
    body_timeout_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds that a request's body may take to arrive."
    )
    keep_alive_s: Annotated[float, Field(gt=0)] = Field(
        75.0, description="Seconds that an idle client connection is kept open."
    )
    shutdown_s: Annotated[float, Field(ge=0)] = Field(
        30.0, description="Seconds that requests in flight get to end after SIGTERM."
    )
    max_attempts: Annotated[int, Field(ge=1, le=10)] = Field(
        3, description="Engines that are tried before the first byte is sent."
    )
    max_prompts: Annotated[int, Field(ge=1)] = Field(
        256, description="Prompts, and answers to them, of one request, at most."
    )
    prompts_at_once: Annotated[int, Field(ge=1)] = Field(
        16, description="Prompts of one completion request that are worked on at the same time."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged.")


class RedisSettings(Section):
    """[redis]: where the index lives."""

    url: str | None = Field(
        None, description="`redis://`, `rediss://` or `unix://` URL; without one, an own Redis is started."
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        0.25, description="Seconds that one Redis command may take before the memory index answers instead."
    )
    retry_s: Annotated[float, Field(gt=0)] = Field(
        1.0, description="Seconds without Redis after a failure, before it is asked again."
    )
    max_memory_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        256 << 20, description="Bytes that the embedded Redis may use."
    )


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


_SECONDS = {"s": 1, "m": 60, "h": 3600}


def duration_s(written: str) -> float:
    """`90s`, `30m` or `12h` in seconds. Raises ValueError."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smh])", written, re.ASCII)
    if found is None:
        raise ValueError(f"{written!r} is no duration; one is written like 90s, 30m or 12h")
    return float(int(found[1]) * _SECONDS[found[2]])


def _duration(written: str) -> str:
    duration_s(written)
    return written


Duration = Annotated[str, AfterValidator(_duration)]


class LeaseSettings(Section):
    """[leases]: for how long clients may ask to have prefixes kept. How much is kept is the engine's to say."""

    ttls: Annotated[tuple[Duration, ...], Field(min_length=1)] = Field(
        ("5m", "30m", "1h", "12h"), description="Times to live that a breakpoint may ask for; any other is refused."
    )
    default_ttl: Duration = Field("30m", description="Time to live of a breakpoint that asks for none.")

    @model_validator(mode="before")
    @classmethod
    def _split_ttls(cls, data: object) -> object:
        return _split(data, "ttls")


class StoredResponseSettings(Section):
    """[stored_responses]: what `/v1/responses` keeps, in Redis where there is one, else in the gateway."""

    ttl_s: Annotated[float, Field(gt=0)] = Field(
        2592000.0, description="Seconds that a response is kept, from its end; 30 days."
    )
    max_responses: Annotated[int, Field(ge=0)] = Field(
        10000, description="Responses of one tenant that are kept at most, the latest; 0 keeps none."
    )
    max_bytes: Annotated[int, Field(ge=0)] = Field(
        33554432,
        description="Bytes of one tenant's responses, with the items that they answered, that are kept at most.",
    )
    max_response_bytes: Annotated[int, Field(ge=0)] = Field(
        8388608, description="Bytes of one response, with the items that it answered; a larger one is not kept."
    )
    max_background: Annotated[int, Field(ge=0)] = Field(
        256, description="Responses that one gateway works on in the background at a time; the next one gets 429."
    )

    @property
    def largest_bytes(self) -> int:
        """Of what is kept."""
        return min(self.max_response_bytes, self.max_bytes)


class FileSettings(Section):
    """[files]: what clients upload with `/v1/files`."""

    folder: Path | None = Field(
        None, description="Folder of the files; `files` in `server.data_dir` when not set. Gateways may share one."
    )
    max_file_bytes: Annotated[int, Field(ge=1)] = Field(
        512 << 20, description="Bytes of one file; a larger one is refused with 413."
    )
    max_batch_bytes: Annotated[int, Field(ge=1)] = Field(
        200 << 20, description="Bytes of one file with the purpose `batch`; a larger one is refused with 413."
    )
    max_files: Annotated[int, Field(ge=1)] = Field(10_000, description="Files of one tenant; the next one gets 429.")
    max_bytes: Annotated[int, Field(ge=1)] = Field(
        10 << 30, description="Bytes of all files of one tenant; a file that would be more gets 429."
    )
    batch_ttl_s: Annotated[float, Field(gt=0)] = Field(
        2592000.0, description="Seconds that a file with the purpose `batch` is kept that does not say; 30 days."
    )
    min_free_bytes: Annotated[int, Field(ge=0)] = Field(
        256 << 20, description="Bytes that files leave free on their disk; an upload that would take them gets 507."
    )
    max_uploads: Annotated[int, Field(ge=1)] = Field(
        64, description="Uploads at the same time, over all tenants; the next one gets 429. Each takes 1 MiB of memory."
    )
    max_uploads_per_tenant: Annotated[int, Field(ge=1)] = Field(
        16, description="Uploads of one tenant at the same time; the next one gets 429."
    )
    upload_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that an upload may take to arrive."
    )
    sweep_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds from one look for files that are over their time to the next."
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
        return _split(data, "min_cache_tokens_of")

    def min_tokens_of(self, model: str) -> int:
        """Tokens that a prefix of this model needs to be cached."""
        for item in self.min_cache_tokens_of:
            name, _, tokens = item.rpartition("=")
            if name == model:
                return int(tokens)
        return self.min_cache_tokens


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
    """[queue]: the online lane."""

    max_waiting: Annotated[int, Field(ge=0)] = Field(
        1024, description="Requests that wait for a place, over all tenants; the next one gets 429."
    )
    max_waiting_per_tenant: Annotated[int, Field(ge=0)] = Field(
        512, description="Requests of one tenant that wait for a place; the next one gets 429."
    )
    max_wait_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Seconds that a request waits for a place before it gets 503."
    )
    places_per_engine: Annotated[int, Field(ge=0)] = Field(
        0, description="Requests that one engine works on; 0 takes twice what the engine runs at a time."
    )
    aging: Annotated[float, Field(gt=0, le=10)] = Field(
        0.02, description="Seconds of prefill that a second of waiting makes up for, where shorter prefills go first."
    )


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
        return _split(data, "names")

    @model_validator(mode="after")
    def _a_request_fits_the_queue(self) -> EmbeddingSettings:
        for name in ("max_waiting_tokens", "max_waiting_tokens_per_tenant"):
            if getattr(self, name) < self.max_request_tokens:
                raise ValueError(f"{name} is less than max_request_tokens, {self.max_request_tokens}")
        return self


class EnginesSettings(Section):
    """[engines]: the bundled engines behind this gateway."""

    count: Annotated[int, Field(ge=0, le=64)] = Field(
        1, description="Engines that `kvasir serve` starts on this machine and starts again when they end."
    )
    urls: tuple[str, ...] = Field(
        (), description="Engines that run already: `http://host:port` or `unix:PATH`; several separated by commas."
    )
    discover: bool = Field(True, description="Also use the engines that announce themselves in the same Redis.")
    connect_timeout_s: Annotated[float, Field(gt=0)] = Field(5.0, description="Seconds to reach an engine.")
    reconnect_max_s: Annotated[float, Field(gt=0)] = Field(
        5.0, description="Seconds between tries to reach a lost engine, at most."
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="Seconds that a started engine may take to load its model."
    )
    stats_timeout_s: Annotated[float, Field(gt=0)] = Field(
        0.5, description="Seconds that an engine may take to tell its counters; then it is shown without."
    )
    buffer_updates: Annotated[int, Field(ge=16)] = Field(
        65536, description="Updates of one sequence that wait for a slow client before it is given up."
    )

    @model_validator(mode="before")
    @classmethod
    def _split_urls(cls, data: object) -> object:
        return _split(data, "urls")


def _split(data: object, name: str) -> object:
    """A list that came as one text, from a flag or a variable: cut at commas."""
    if isinstance(data, dict) and isinstance(data.get(name), str):
        return {**data, name: tuple(item for item in data[name].split(",") if item)}
    return data


class AuthSettings(Section):
    """[auth]: who may ask for the admin pages."""

    admin_keys: tuple[str, ...] = Field((), description="Keys for /admin, besides no tenant's requests.")


class TenantSettings(Section):
    """[[tenants]]: one tenant and its keys. Without any, the server is open and everybody is one tenant."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        ..., description="Name in logs, metrics and the block namespace; letters, digits and `._-`."
    )
    keys: Annotated[tuple[Annotated[str, Field(min_length=8)], ...], Field(min_length=1)] = Field(
        ..., description="API keys of this tenant, 8 characters or more."
    )


EVERYBODY = "*"
"""In the tenants of a namespace: every tenant, those to come too."""

PRIVATE = "private"
"""What a request asks for that wants its tenant's own blocks and none of a namespace."""


class NamespaceSettings(Section):
    """[[namespaces]]: blocks that several tenants share on purpose."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        ..., description="Name that requests ask for with `x-kvasir-namespace`; letters, digits and `._-`."
    )
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        ..., description="Names of the tenants that may use it, or `*` for every tenant."
    )
    default: bool = Field(
        False, description="Whether requests of these tenants use it that ask for no namespace; one per tenant."
    )


class Settings(BaseModel):
    """Everything that `kvasir serve`, `kvasir gateway` and `kvasir engine` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    tenants: tuple[TenantSettings, ...] = ()
    namespaces: tuple[NamespaceSettings, ...] = ()
    redis: RedisSettings = RedisSettings()
    engines: EnginesSettings = EnginesSettings()
    engine: EngineSettings = EngineSettings()
    prompt: PromptSettings = PromptSettings()
    leases: LeaseSettings = LeaseSettings()
    anthropic: AnthropicSettings = AnthropicSettings()
    stored_responses: StoredResponseSettings = StoredResponseSettings()
    files: FileSettings = FileSettings()
    gemini: GeminiSettings = GeminiSettings()
    routing: RoutingSettings = RoutingSettings()
    queue: QueueSettings = QueueSettings()
    embeddings: EmbeddingSettings = EmbeddingSettings()

    @model_validator(mode="after")
    def _keys_belong_to_one(self) -> Settings:
        seen: dict[str, str] = dict.fromkeys(self.auth.admin_keys, "auth.admin_keys")
        names: set[str] = set()
        for tenant in self.tenants:
            if tenant.name in names:
                raise ValueError(f"tenants: the name {tenant.name!r} is there twice")
            names.add(tenant.name)
            for key in tenant.keys:
                if key in seen:
                    raise ValueError(f"tenants: a key of {tenant.name!r} is also in {seen[key]}")
                seen[key] = f"tenant {tenant.name!r}"
        return self

    @model_validator(mode="after")
    def _engines_lease_for_so_long(self) -> Settings:
        most_s = self.engine.lease_max_s
        for name, ttl in (*(("ttls", ttl) for ttl in self.leases.ttls), ("default_ttl", self.leases.default_ttl)):
            if duration_s(ttl) > most_s:
                raise ValueError(f"leases.{name}: {ttl} is more than engine.lease_max_s, {most_s:g} s")
        if self.gemini.longest_s > most_s:
            raise ValueError(f"gemini.max_ttl: {self.gemini.max_ttl} is more than engine.lease_max_s, {most_s:g} s")
        return self

    @model_validator(mode="after")
    def _namespaces_are_for_tenants(self) -> Settings:
        known = {tenant.name for tenant in self.tenants} or {ANONYMOUS}
        seen: set[str] = {PRIVATE}
        at_home: dict[str, str] = {}  # tenant -> the namespace that it uses without asking
        for namespace in self.namespaces:
            if namespace.name in seen:
                raise ValueError(f"namespaces: the name {namespace.name!r} is there twice, or reserved")
            seen.add(namespace.name)
            if missing := set(namespace.tenants) - known - {EVERYBODY}:
                raise ValueError(f"namespaces: {namespace.name!r} is for {min(missing)!r}, which is no tenant")
            members = known if EVERYBODY in namespace.tenants else set(namespace.tenants)
            for tenant in sorted(members) if namespace.default else ():
                if (other := at_home.setdefault(tenant, namespace.name)) != namespace.name:
                    raise ValueError(f"namespaces: {other!r} and {namespace.name!r} are both the default of {tenant!r}")
        return self
