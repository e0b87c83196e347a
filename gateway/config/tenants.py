"""Tenants: keys, limits, shared namespaces, the ledger and prices."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from engine.config import Secret, Section
from gateway.config.stages import CacheKeyMode
from gateway.config.units import COMMAS, Duration, Name

MOST = 10**9
"""Of any limit per minute; times are kept in microseconds, in which what is more could not be told apart."""

PerMinute = Annotated[int, Field(ge=0, le=MOST)]


class LimitSettings(Section):
    """[limits]: what each tenant may ask for in the online lane, over all gateways that share a Redis."""

    requests_per_minute: PerMinute = 0
    """Requests of one tenant per minute; 0 is no limit."""
    tokens_per_minute: PerMinute = 0
    """Tokens of one tenant's prompts and completions per minute; 0 is no limit."""
    input_tokens_per_minute: PerMinute = 0
    """Tokens of one tenant's prompts per minute; 0 is no limit."""
    output_tokens_per_minute: PerMinute = 0
    """Tokens of one tenant's completions per minute; 0 is no limit."""
    max_in_flight: NonNegativeInt = 0
    """Requests of one tenant that wait or are answered at a time, streamed or not; 0 is no limit."""
    burst_s: Annotated[float, Field(gt=0, le=60)] = 60.0
    """Seconds' worth of a limit that may be used at once: no minute has more than 1 + burst_s / 60 of it."""
    count_cached_tokens: bool = False
    """Whether tokens of prompts that were reused count against the limits of tokens."""
    assumed_completion_tokens: ClassVar = 256
    """That are set aside for an answer whose request names no maximum; most answers are shorter."""
    lease_s: ClassVar = 60.0
    """After which the requests of a gateway that was killed are no longer in flight."""


class AuthSettings(Section):
    """[auth]: keys of the admin pages."""

    admin_keys: Annotated[tuple[str, ...], COMMAS, Secret()] = ()
    """Keys that open /admin, and nothing else; in a variable with commas between."""
    admin_content: bool = False
    """Whether admins may read what remembered answers say."""


class TenantSettings(Section):
    """[[tenants]]: one tenant and its keys. Without any, the server is open and all requests belong to one tenant."""

    name: Name
    """Name in logs, metrics and the block namespace; letters, digits and `._-`."""
    keys: Annotated[tuple[Annotated[str, Field(min_length=8)], ...], Field(min_length=1)]
    """API keys of this tenant, 8 characters or more."""
    requests_per_minute: PerMinute | None = None
    """Instead of that of `[limits]`, like the next four."""
    tokens_per_minute: PerMinute | None = None
    """Tokens of prompts and completions; 0 is no limit."""
    input_tokens_per_minute: PerMinute | None = None
    """Tokens of prompts; 0 is no limit."""
    output_tokens_per_minute: PerMinute | None = None
    """Tokens of completions; 0 is no limit."""
    max_in_flight: NonNegativeInt | None = None
    """Requests that wait or are answered at a time; 0 is no limit."""
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Share of engines and bounded upstreams beside other waiting tenants."""
    priority: bool = False
    """Whether its requests may ask to be served before others (`service_tier`)."""
    response_cache: Literal["on", "ask", "off"] | None = None
    """Which of its requests the response cache is for; as `response_cache.mode` when not set."""
    cache_key: CacheKeyMode | None = None
    """What its `prompt_cache_key`s do; as `prompt.cache_key` when not set."""
    semantic_cache: Literal["on", "ask", "off"] | None = None
    """Which of its requests the semantic cache is for; as `semantic_cache.mode` when not set."""
    budget: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Money that it may spend in a period, in the currency of the prices; none by default."""
    budget_period: Literal["day", "month"] = "month"
    """The period (UTC) of `budget`."""
    budget_hard: bool = True
    """Whether requests beyond `budget` get 429; else their answers only say so (`x-kvasir-budget`)."""
    unknown_fields: Literal["ignore", "refuse"] | None = None
    """What becomes of unknown fields of its requests; as `api.unknown_fields` when not set."""


ALL_TENANTS = "*"
"""In the tenants of a namespace: every tenant, those to come too."""

PRIVATE = "private"
"""What a request asks for that wants its tenant's own blocks and none of a namespace."""


class NamespaceSettings(Section):
    """[[namespaces]]: blocks that several tenants share on purpose."""

    name: Name
    """Name that requests ask for with `x-kvasir-namespace`; letters, digits and `._-`."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the tenants that may use it, or `*` for every tenant."""
    semantic_cache: bool = False
    """Whether the semantic cache works in it: then one tenant's question may get another's answer."""
    default: bool = False
    """Whether requests of these tenants use it that ask for no namespace; one per tenant."""


class LedgerSettings(Section):
    """[ledger]: what was used and what was saved, by day."""

    retention_days: Annotated[int, Field(ge=1, le=10_000)] = 400
    """Days (UTC) that the ledger keeps, today among them."""
    flush_s: PositiveFloat = 5.0
    """Seconds from one write to Redis to the next; a gateway that is killed loses no more than that."""
    list_prices: bool = True
    """Whether models of OpenAI, Anthropic and Google at their own hosts have bundled list prices, in USD; none are used
    beside `[[prices]]` in another currency."""
    max_rows: ClassVar = 10_000
    """Of one day (tenant, model, lane, currency); further models are summed as `other`."""


Money = Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=9)]
"""For a million tokens."""


class PriceSettings(Section):
    """[[prices]]: what a million tokens of a model cost, in place of its list price (`ledger.list_prices`). Without
    either, tokens and time are counted and no money."""

    model: Annotated[str, Field(min_length=1)]
    """Name of the model, or a pattern such as `gpt-*`; the name itself goes before any pattern."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = "USD"
    """Three letters, as in ISO 4217."""
    input: Money
    """A million tokens of prompts, and of texts that are embedded."""
    output: Money = Decimal(0)
    """A million tokens of answers."""
    cached_read: Money | None = None
    """A million tokens of prompts that were read from a cache; as `input` when not set."""
    cache_write: Money | None = None
    """A million tokens of prompts that were written to a cache; as `input` when not set."""
    cache_write_of: dict[Duration, Money] = Field({})
    """The same for single times to live, as in `{ 1h = 6.0 }`."""
    storage: Money = Decimal(0)
    """A million tokens kept in a cache of an upstream for an hour."""


def price_of(prices: Sequence[PriceSettings], model: str) -> PriceSettings | None:
    """Of [[prices]] that of a model: its own name first, then the patterns in their order."""
    matching = [price for price in prices if fnmatchcase(model, price.model)]
    own = (price for price in prices if price.model == model)
    return next(own, matching[0] if matching else None)


def several_currencies(prices: Sequence[PriceSettings]) -> str:
    """Of [[prices]], where there is more than one: no budget could add them up."""
    currencies = sorted({price.currency for price in prices})
    return ", ".join(currencies) if len(currencies) > 1 else ""
