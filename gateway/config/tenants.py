"""Who may ask, and who shares what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.config import Section
from gateway.config.limits import PerMinute
from gateway.config.stages import CacheKeyMode


class AuthSettings(Section):
    """[auth]: who may ask for the admin pages."""

    admin_keys: tuple[str, ...] = Field((), description="Keys that open /admin, and nothing else.")
    admin_content: bool = Field(False, description="Whether admins may read what remembered answers say.")


class TenantSettings(Section):
    """[[tenants]]: one tenant and its keys. Without any, the server is open and all requests belong to one tenant."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = Field(
        ..., description="Name in logs, metrics and the block namespace; letters, digits and `._-`."
    )
    keys: Annotated[tuple[Annotated[str, Field(min_length=8)], ...], Field(min_length=1)] = Field(
        ..., description="API keys of this tenant, 8 characters or more."
    )
    requests_per_minute: PerMinute | None = Field(
        None, description="Instead of that of `[limits]`, like the next four."
    )
    tokens_per_minute: PerMinute | None = Field(None, description="Tokens of prompts and completions; 0 is no limit.")
    input_tokens_per_minute: PerMinute | None = Field(None, description="Tokens of prompts; 0 is no limit.")
    output_tokens_per_minute: PerMinute | None = Field(None, description="Tokens of completions; 0 is no limit.")
    max_in_flight: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Requests that wait or are answered at a time; 0 is no limit."
    )
    weight: Annotated[float, Field(ge=0.01, le=100)] = Field(
        1.0,
        description="Share of engines and bounded upstreams beside other waiting tenants.",
    )
    priority: bool = Field(
        False, description="Whether its requests may ask to be served before others (`service_tier`)."
    )
    response_cache: Literal["on", "ask", "off"] | None = Field(
        None, description="Which of its requests the response cache is for; as `response_cache.mode` when not set."
    )
    cache_key: CacheKeyMode | None = Field(
        None, description="What its `prompt_cache_key`s do; as `prompt.cache_key` when not set."
    )
    semantic_cache: Literal["on", "ask", "off"] | None = Field(
        None, description="Which of its requests the semantic cache is for; as `semantic_cache.mode` when not set."
    )
    unknown_fields: Literal["ignore", "refuse"] | None = Field(
        None, description="What becomes of unknown fields of its requests; as `api.unknown_fields` when not set."
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
    semantic_cache: bool = Field(
        False,
        description="Whether the semantic cache works in it: then one tenant's question may get another's answer.",
    )
    default: bool = Field(
        False, description="Whether requests of these tenants use it that ask for no namespace; one per tenant."
    )
