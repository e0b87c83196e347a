"""All sections together, and what has to hold between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.config import SHORT_FLAGS, EngineSettings
from gateway.config.apis import (
    AnthropicSettings,
    ApiSettings,
    BatchSettings,
    EmbeddingSettings,
    FileSettings,
    GeminiSettings,
    LeaseSettings,
    StoredResponseSettings,
)
from gateway.config.replicas import KubernetesSettings, ReplicaSettings
from gateway.config.serving import (
    EnginesSettings,
    LogSettings,
    OtelSettings,
    RedisSettings,
    ServerSettings,
    SloSettings,
    TlsSettings,
)
from gateway.config.stages import PromptSettings, QueueSettings, ResponseCacheSettings, SemanticCacheSettings
from gateway.config.tenants import (
    ALL_TENANTS,
    PRIVATE,
    AuthSettings,
    LedgerSettings,
    LimitSettings,
    NamespaceSettings,
    PriceSettings,
    TenantSettings,
    price_of,
    several_currencies,
)
from gateway.config.units import duration_s
from gateway.config.upstreams import AliasSettings, UpstreamSettings
from gateway.config.warm import MAX_ENTRIES, WarmSettings
from gateway.types import ANONYMOUS

SHORT_FLAGS.update(
    {
        "server.host": "--host",
        "server.port": "--port",
        "server.workers": "--workers",
        "server.data_dir": "--data-dir",
        "server.log_level": "--log-level",
        "redis.url": "--redis-url",
        "engines.kind": "--engine",
        "engines.count": "--engines",
        "engines.urls": "--engine-urls",
        "engine.model": "--model",
        "engine.revision": "--revision",
        "engine.draft_model": "--draft-model",
        "engine.served_name": "--served-name",
        "engine.dtype": "--dtype",
        "engine.quantize": "--quantize",
        "engine.lora": "--lora",
        "engine.device": "--device",
        "engine.listen": "--listen",
        "engine.block_size": "--block-size",
        "engine.kv_cache_bytes": "--kv-cache",
        "engine.max_context_tokens": "--max-context-tokens",
        "engine.threads": "--threads",
        "logs.format": "--log-format",
    }
)


class Settings(BaseModel):
    """All settings of `kvasir serve`, `kvasir gateway` and `kvasir engine`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server: ServerSettings = ServerSettings()
    tls: TlsSettings = TlsSettings()
    logs: LogSettings = LogSettings()
    slo: SloSettings = SloSettings()
    otel: OtelSettings = OtelSettings()
    auth: AuthSettings = AuthSettings()
    tenants: tuple[TenantSettings, ...] = ()
    namespaces: tuple[NamespaceSettings, ...] = ()
    upstreams: tuple[UpstreamSettings, ...] = ()
    aliases: tuple[AliasSettings, ...] = ()
    replicas: tuple[ReplicaSettings, ...] = ()
    kubernetes: KubernetesSettings = KubernetesSettings()
    warm: Annotated[tuple[WarmSettings, ...], Field(max_length=MAX_ENTRIES)] = ()
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
    def _names_and_keys_are_unique(self) -> Settings:
        names = {upstream.name for upstream in self.upstreams}  # logs and headers name either
        reserved = {"namespaces": {PRIVATE}, "replicas": names}
        for section in ("tenants", "namespaces", "upstreams", "replicas", "prices"):
            seen = reserved.get(section, set())
            for table in getattr(self, section):
                name = table.model if section == "prices" else table.name
                if name in seen:
                    raise ValueError(f"{section}: the name {name!r} is there twice, or reserved")
                seen.add(name)
        owners = dict.fromkeys(self.auth.admin_keys, "auth.admin_keys")
        for tenant in self.tenants:
            for key in tenant.keys:
                if (other := owners.setdefault(key, f"tenant {tenant.name!r}")) != f"tenant {tenant.name!r}":
                    raise ValueError(f"tenants: a key of {tenant.name!r} is also in {other}")
        return self

    @model_validator(mode="after")
    def _engines_keep_leases_that_long(self) -> Settings:
        most_s = self.engine.lease_max_s
        ttls = [("leases.ttls", ttl) for ttl in self.leases.ttls]
        ttls += [("leases.default_ttl", self.leases.default_ttl), ("gemini.max_ttl", self.gemini.max_ttl)]
        ttls += [(f"warm[{number}].ttl", one.ttl) for number, one in enumerate(self.warm)]
        for name, ttl in ttls:
            if duration_s(ttl) > most_s:
                raise ValueError(f"{name}: {ttl} is more than engine.lease_max_s, {most_s:g} s")
        return self

    @model_validator(mode="after")
    def _tenants_exist(self) -> Settings:
        known = {tenant.name for tenant in self.tenants} or {ANONYMOUS}
        used = [("namespaces", one.name, one.tenants) for one in self.namespaces]
        used += [("aliases", one.name, one.tenants) for one in self.aliases]
        used += [("warm", one.model, one.tenants) for one in self.warm]
        used += [("upstreams", one.name, (*one.tenants, *one.hints, *one.meter)) for one in self.upstreams]
        for section, name, tenants in used:
            if missing := set(tenants) - known - {ALL_TENANTS}:
                raise ValueError(f"{section}: {name!r} is for {min(missing)!r}, which is no tenant")
        return self

    @model_validator(mode="after")
    def _costs_can_be_compared(self) -> Settings:
        for alias in self.aliases:
            if alias.policy == "cheapest":
                prices = [price_of(self.prices, target.model) for target in alias.targets]
                if len(currencies := {price.currency for price in prices if price is not None}) > 1:
                    several = ", ".join(sorted(currencies))
                    raise ValueError(f"aliases: the targets of {alias.name!r} have prices in {several}")
        for tenant in self.tenants:
            if tenant.budget is not None and (several := several_currencies(self.prices)):
                raise ValueError(f"tenants: the budget of {tenant.name!r} cannot add up prices in {several}")
        return self

    @model_validator(mode="after")
    def _a_tenant_has_one_default_namespace(self) -> Settings:
        known = {tenant.name for tenant in self.tenants} or {ANONYMOUS}
        defaults: dict[str, str] = {}  # by tenant
        for namespace in self.namespaces:
            members = known if ALL_TENANTS in namespace.tenants else set(namespace.tenants)
            for tenant in sorted(members) if namespace.default else ():
                if (other := defaults.setdefault(tenant, namespace.name)) != namespace.name:
                    raise ValueError(f"namespaces: {other!r} and {namespace.name!r} are both the default of {tenant!r}")
        return self
