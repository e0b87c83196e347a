"""All sections together, and what has to hold between them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator

from engine.config import REMOVED, SHORT_FLAGS, EngineSettings
from gateway.config.dialects import AnthropicSettings, ApiSettings, EmbeddingSettings, GeminiSettings
from gateway.config.removed import REMOVED_SETTINGS
from gateway.config.responses import ResponseCacheSettings, SemanticCacheSettings
from gateway.config.serving import EnginesSettings, LogSettings, RedisSettings, ServerSettings
from gateway.config.stages import PromptSettings, QueueSettings
from gateway.config.stored import BatchSettings, FileSettings, LeaseSettings, StoredResponseSettings
from gateway.config.tenants import (
    EVERYBODY,
    PRIVATE,
    AuthSettings,
    LedgerSettings,
    LimitSettings,
    NamespaceSettings,
    PriceSettings,
    TenantSettings,
)
from gateway.config.units import duration_s
from gateway.config.upstreams import UpstreamSettings
from gateway.types import ANONYMOUS

SHORT_FLAGS.update(
    {
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
        "logs.format": "--log-format",
    }
)
REMOVED.update(REMOVED_SETTINGS)


class Settings(BaseModel):
    """Everything that `kvasir serve`, `kvasir gateway` and `kvasir engine` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = ServerSettings()
    logs: LogSettings = LogSettings()
    auth: AuthSettings = AuthSettings()
    tenants: tuple[TenantSettings, ...] = ()
    namespaces: tuple[NamespaceSettings, ...] = ()
    upstreams: tuple[UpstreamSettings, ...] = ()
    redis: RedisSettings = RedisSettings()
    engines: EnginesSettings = EnginesSettings()
    engine: EngineSettings = EngineSettings()
    prompt: PromptSettings = PromptSettings()
    leases: LeaseSettings = LeaseSettings()
    api: ApiSettings = ApiSettings()
    anthropic: AnthropicSettings = AnthropicSettings()
    stored_responses: StoredResponseSettings = StoredResponseSettings()
    files: FileSettings = FileSettings()
    batches: BatchSettings = BatchSettings()
    gemini: GeminiSettings = GeminiSettings()
    queue: QueueSettings = QueueSettings()
    limits: LimitSettings = LimitSettings()
    embeddings: EmbeddingSettings = EmbeddingSettings()
    ledger: LedgerSettings = LedgerSettings()
    prices: tuple[PriceSettings, ...] = ()
    response_cache: ResponseCacheSettings = ResponseCacheSettings()
    semantic_cache: SemanticCacheSettings = SemanticCacheSettings()

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
    def _a_model_has_one_price(self) -> Settings:
        seen: set[str] = set()
        for price in self.prices:
            if price.model in seen:
                raise ValueError(f"prices: {price.model!r} is there twice")
            seen.add(price.model)
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

    @model_validator(mode="after")
    def _upstreams_are_for_tenants(self) -> Settings:
        known = {tenant.name for tenant in self.tenants} | {EVERYBODY}
        known |= set() if self.tenants else {ANONYMOUS}
        seen: set[str] = set()
        for upstream in self.upstreams:
            if upstream.name in seen:
                raise ValueError(f"upstreams: the name {upstream.name!r} is there twice")
            seen.add(upstream.name)
            if missing := {*upstream.tenants, *upstream.hints, *upstream.meter} - known:
                raise ValueError(f"upstreams: {upstream.name!r} is for {min(missing)!r}, which is no tenant")
        return self
