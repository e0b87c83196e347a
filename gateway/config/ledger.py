"""What the ledger keeps, and what tokens cost."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, ClassVar

from pydantic import Field

from engine.config import Section
from gateway.config.units import Duration


class LedgerSettings(Section):
    """[ledger]: what was used and what was saved, by day."""

    retention_days: Annotated[int, Field(ge=1, le=10_000)] = Field(
        400, description="Days (UTC) that the ledger keeps, today among them."
    )
    flush_s: Annotated[float, Field(gt=0)] = Field(
        5.0,
        description="Seconds from one write to Redis to the next; a gateway that is killed loses no more than that.",
    )
    max_rows: ClassVar = 10_000
    """Of one day (tenant, model, lane, currency); further models are summed as `other`."""


Money = Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=9)]
"""For a million tokens."""


class PriceSettings(Section):
    """[[prices]]: what a million tokens of a model cost. Without one, tokens and time are counted and no money."""

    model: Annotated[str, Field(min_length=1)] = Field(
        ..., description="Name of the model, or a pattern such as `gpt-*`; the name itself goes before any pattern."
    )
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = Field("USD", description="Three letters, as in ISO 4217.")
    input: Money = Field(..., description="A million tokens of prompts, and of texts that are embedded.")
    output: Money = Field(Decimal(0), description="A million tokens of answers.")
    cached_read: Money | None = Field(
        None, description="A million tokens of prompts that were read from a cache; as `input` when not set."
    )
    cache_write: Money | None = Field(
        None, description="A million tokens of prompts that were written to a cache; as `input` when not set."
    )
    cache_write_of: dict[Duration, Money] = Field(
        {}, description="The same for single times to live, as in `{ 1h = 6.0 }`."
    )
