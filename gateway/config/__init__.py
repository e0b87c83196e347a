"""Settings of the gateway and of `kvasir serve`: one frozen section per stage. Read with engine.config.load.

A section goes to the stage it is named after and to nobody else; app.py hands them out.
"""

from gateway.config.dialects import AnthropicSettings, ApiSettings, EmbeddingSettings, GeminiSettings
from gateway.config.responses import ResponseCacheSettings, SemanticCacheSettings
from gateway.config.serving import EnginesSettings, LogSettings, RedisSettings, ServerSettings
from gateway.config.settings import Settings
from gateway.config.stages import CacheKeyMode, PromptSettings, QueueSettings
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
from gateway.config.units import Duration, duration_s
from gateway.config.upstreams import ServedModel, UpstreamSettings

__all__ = [
    "EVERYBODY",
    "PRIVATE",
    "AnthropicSettings",
    "ApiSettings",
    "AuthSettings",
    "BatchSettings",
    "CacheKeyMode",
    "Duration",
    "EmbeddingSettings",
    "EnginesSettings",
    "FileSettings",
    "GeminiSettings",
    "LeaseSettings",
    "LedgerSettings",
    "LimitSettings",
    "LogSettings",
    "NamespaceSettings",
    "PriceSettings",
    "PromptSettings",
    "QueueSettings",
    "RedisSettings",
    "ResponseCacheSettings",
    "SemanticCacheSettings",
    "ServedModel",
    "ServerSettings",
    "Settings",
    "StoredResponseSettings",
    "TenantSettings",
    "UpstreamSettings",
    "duration_s",
]
