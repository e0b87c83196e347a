"""Hosted and self-hosted APIs that the gateway stands in front of."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from engine.config import Section
from gateway.config.tenants import ALL_TENANTS
from gateway.config.units import Name, VariableName, check_key, http_url

WILD = frozenset("*?[")
"""What makes a name a pattern."""

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_OURS = frozenset(("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding"))


class ServedModel(NamedTuple):
    """One item of `models`: what clients ask for, and what the upstream calls it (a `*` stands for the client's)."""

    served: str
    upstream: str | None

    @property
    def is_pattern(self) -> bool:
        return not WILD.isdisjoint(self.served)


def served_model(written: str) -> ServedModel:
    """`name`, `pattern` or `served = name at the upstream`. Raises ValueError."""
    served, equals, upstream = (part.strip() for part in written.partition("="))
    if not served or (equals and not upstream):
        raise ValueError(f"{written!r} names no model; write `name`, `gpt-*` or `served = name at the upstream`")
    stars = upstream.count("*")
    if equals and (not WILD.isdisjoint(served) or stars) and not (served.count("*") == stars == 1):
        raise ValueError(f"{written!r}: a pattern is renamed with one `*` on both sides, as in `openai/* = *`")
    if equals and stars and not {"?", "["}.isdisjoint(served):
        raise ValueError(f"{written!r}: `?` and `[` have no place in a pattern that is renamed")
    return ServedModel(served, upstream or None)


class TargetSettings(Section):
    """One of the `targets` of an alias. A request that it does not take goes to one that does."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    """The model that answers."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the conversations, under `weighted` and `affinity`."""
    max_prompt_tokens: PositiveInt | None = None
    """Tokens of a prompt, as estimated from its bytes; no limit when not set."""
    tools: bool = True
    """Whether it gets requests with tools."""
    images: bool = True
    """Whether it gets requests with images."""

    @property
    def is_limited(self) -> bool:
        return self.max_prompt_tokens is not None or not self.tools or not self.images


Policy = Literal["first", "cheapest", "fastest", "weighted", "affinity", "size", "cascade"]
CheckName = Literal["schema", "refusal", "logprob"]


class AliasSettings(Section):
    """[[aliases]]: another name of a model or of several, for clients that cannot be told which one to ask for."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """What clients ask for, or a pattern with `*` and `?`: `claude-*`."""
    target: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model that answers, of an engine, a replica or an upstream of any API."""
    targets: tuple[TargetSettings, ...] = ()
    """Several in its place: names, or tables (`model`, `weight`, `max_prompt_tokens`, `tools`, `images`)."""
    policy: Policy = "first"
    """Which of the targets is tried first; see [other names](translation.md#other-names)."""
    checks: tuple[CheckName, ...] = ()
    """What an answer has to pass under `cascade`: `schema`, `refusal`, `logprob`."""
    min_mean_logprob: Annotated[float, Field(le=0)] | None = None
    """Mean log probability of its tokens that passes `logprob`."""
    sticky_s: PositiveFloat = 300.0
    """Seconds that a conversation of `affinity` stays where it went while its target was down."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_TENANTS,)
    """Names of the tenants that it is for, or `*` for every tenant."""

    @field_validator("targets", mode="before")
    @classmethod
    def _names_are_tables(cls, targets: object) -> object:
        if not isinstance(targets, list | tuple):
            return targets
        return tuple({"model": one} if isinstance(one, str) else one for one in targets)

    @model_validator(mode="after")
    def _has_targets(self) -> Self:
        if (self.target is None) == (not self.targets):
            both = "`target` and `targets` exclude each other" if self.targets else "it needs a `target`, or `targets`"
            raise ValueError(f"alias {self.name!r}: {both}")
        models = [one.model for one in self.models]
        if self.name in models:
            raise ValueError(f"alias {self.name!r} names itself as a target")
        if twice := {model for model in models if models.count(model) > 1}:
            raise ValueError(f"alias {self.name!r}: the target {min(twice)!r} is there twice")
        if self.target is not None and self.policy != "first":
            raise ValueError(f"alias {self.name!r}: `policy` is for `targets`")
        return self

    @model_validator(mode="after")
    def _fits_its_policy(self) -> Self:
        weighted = any("weight" in one.model_fields_set for one in self.targets)
        wrong = {
            "`checks` are for the policy `cascade`": self.checks and self.policy != "cascade",
            "the policy `cascade` needs `checks`": self.policy == "cascade" and not self.checks,
            "the policy `cascade` needs two `targets`": self.policy == "cascade" and len(self.targets) < 2,
            "`min_mean_logprob` and the check `logprob` need each other": (self.min_mean_logprob is None)
            == ("logprob" in self.checks),
            "`weight` is for the policies `weighted` and `affinity`": weighted
            and self.policy not in ("weighted", "affinity"),
            "the policy `size` needs a target with `max_prompt_tokens`, `tools` or `images`": self.policy == "size"
            and not any(one.is_limited for one in self.targets),
            "`sticky_s` is for the policy `affinity`": "sticky_s" in self.model_fields_set
            and self.policy != "affinity",
        }
        if why := next((why for why, is_wrong in wrong.items() if is_wrong), None):
            raise ValueError(f"alias {self.name!r}: {why}")
        return self

    @property
    def is_pattern(self) -> bool:
        return not WILD.isdisjoint(self.name)

    @property
    def models(self) -> tuple[TargetSettings, ...]:
        """Its targets, one or several."""
        return self.targets if self.target is None else (TargetSettings(model=self.target),)


class UpstreamSettings(Section):
    """[[upstreams]]: one hosted or self-hosted API, and the models that it is asked for."""

    name: Name
    """Name in logs, metrics and headers; letters, digits and `._-`."""
    dialect: Literal["openai", "anthropic", "gemini"] = "openai"
    """The API that it speaks: `openai`, `anthropic` or `gemini`."""
    api: Literal["chat", "responses"] = "chat"
    """Of `openai`: which of its APIs requests of other dialects are translated into."""
    api_only: bool = False
    """Whether it lacks OpenAI's other API, so that chats are translated into responses, or these into chats."""
    lossy: Literal["refuse", "drop"] = "refuse"
    """Parameters of translated requests that its API lacks: a 400, or left out and named in `x-kvasir-dropped`."""
    url: str
    """As its SDK's base URL: `https://api.openai.com/v1`, `https://api.anthropic.com`."""
    key: SecretStr | None = None
    """Its API key. Never shown, and never sent anywhere else."""
    key_env: VariableName | None = None
    """Environment variable that has the key, in place of `key`; not one of `KVASIR_`."""
    models: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names, patterns with `*` and `?`, and renamed ones: `served = name at the upstream`."""
    priority: int = 0
    """Of several upstreams for one model the lowest is tried first; then the order of the file."""
    over_engines: bool = False
    """Whether it is also asked for models of own engines or of the own embedder."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = (ALL_TENANTS,)
    """Names of the tenants that may use it, or `*` for every tenant."""
    hints: tuple[str, ...] = ()
    """Tenants whose requests get caching hints where they have none, or `*` for every tenant."""
    max_hints: ClassVar = 100_000
    """Prefixes (hashes of 16 bytes) that are remembered as sent."""
    cached_contents: NonNegativeInt = 100
    """Prefixes of a tenant, or namespace, that a `gemini` upstream keeps as cachedContents; 0 is none."""
    hint_ttl_s: PositiveFloat = 300.0
    """Seconds that a prefix counts as seen: about as long as the upstream caches one."""
    meter: tuple[str, ...] = ()
    """Tenants whose streams are asked for their usage, which is taken out again, or `*`."""
    foreign_ids: tuple[str, ...] = ()
    """Tenants that may name any id kept under a shared key, or `*`; others only what was made for them here."""
    headers: dict[str, SecretStr] = Field({})
    """Headers that every request to it gets; values are secrets."""
    connect_timeout_s: PositiveFloat = 5.0
    """Seconds to get a connection, waiting for a free one included."""
    first_byte_timeout_s: PositiveFloat = 300.0
    """Seconds to the first byte of an answer; one that does not stream comes whole."""
    idle_timeout_s: PositiveFloat = 120.0
    """Seconds from one chunk of an answer to the next."""
    timeout_s: PositiveFloat = 600.0
    """Seconds that one answer may take; `server.request_timeout_s` holds, too."""
    max_connections: PositiveInt = 256
    """Connections for online requests, one request each; lines of batches have `batch_slots`."""
    max_waiting: NonNegativeInt = 256
    """Requests that wait for a connection; for the next one it counts as busy."""
    max_in_flight: NonNegativeInt = 0
    """Requests sent to it at a time by one gateway, lines included; more wait as in `[queue]`. 0 is no limit."""
    overflow_s: NonNegativeFloat | None = None
    """Seconds to wait for a slot while another upstream has the model; `queue.max_wait_s` when not set."""
    batch_slots: PositiveInt = 16
    """Requests in flight, online ones included, up to which lines of batches are sent."""
    retries: Annotated[int, Field(ge=0, le=10)] = 2
    """Further tries at this upstream, before the first byte, until the next one is asked."""
    retry_max_s: NonNegativeFloat = 10.0
    """Seconds that are waited before a try; an upstream that asks for more is not tried again."""
    breaker_failures: PositiveInt = 5
    """Failures in a row that open its circuit breaker."""
    breaker_open_s: PositiveFloat = 15.0
    """Seconds that its circuit breaker stays open, until one request probes it."""
    list_models: bool = False
    """Whether it is asked for its list, so that `/v1/models` has what the patterns stand for."""
    list_every_s: ClassVar = 300.0
    """From one question for its list of models to the next."""
    max_listed: ClassVar = 1000
    """Models of its list that are looked at."""
    max_error_bytes: ClassVar = 1 << 20
    """Of an error that are kept while others are tried; a larger one is cut."""
    max_metered_bytes: ClassVar = 4 << 20
    """Of a whole answer, or an event, that are kept to read its usage."""

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str) -> str:
        return http_url(url, "an upstream", "key_env")

    @field_validator("models")
    @classmethod
    def _are_models(cls, models: tuple[str, ...]) -> tuple[str, ...]:
        for written in models:
            served_model(written)
        return models

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, value in headers.items():
            if not _HEADER.fullmatch(name) or name.lower() in _OURS:
                raise ValueError(f"{name!r} is no header that can be set")
            if not value.get_secret_value().isprintable():
                raise ValueError(f"the value of {name!r} has characters that no header has")
        return headers

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        check_key(self.key, self.key_env, "key_env")
        return self

    @model_validator(mode="after")
    def _has_a_connection_for_each(self) -> Self:
        if self.max_in_flight > self.max_connections:
            raise ValueError(
                f"max_in_flight: {self.max_in_flight} requests at a time need as many max_connections, "
                f"which are {self.max_connections}"
            )
        return self

    @property
    def form(self) -> str:
        """What requests of other dialects are translated into."""
        return f"openai-{self.api}" if self.dialect == "openai" and self.api != "chat" else self.dialect

    @property
    def served(self) -> tuple[ServedModel, ...]:
        return tuple(map(served_model, self.models))
