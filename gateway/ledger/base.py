"""What the ledger is made of: entries, and the rows that they add up in. Values only; books.py has the rows.

    entry     what one finished request used and saved, in tokens and milliseconds
    row       a day, a tenant, a model, a lane, a currency and a key; no entry is in two
    figures   whole numbers by column, added up in a row: sums by any grouping are equal to the last digit

Money is counted in units of `types.NANO`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from engine.protocol import Lane
from gateway.types import Hit

OTHER: Final = "other"
"""The model of rows past ledger.max_rows."""

AUDIT: Final = "audit"
RowLane = Lane | Literal["audit"]
"""The lane of a request; or what was generated to find out whether a semantic hit was right, which is no request."""

Saver = Literal["prefix", "upstream", "exact", "semantic", "batch"]
SAVERS: Final[tuple[Saver, ...]] = ("prefix", "upstream", "exact", "semantic", "batch")
"""What saved it: blocks of our engines, the cache of a hosted API, an answer that was remembered (to this request or to
one that means the same), the price of the batch lane."""

USED: Final = (
    "requests",
    "prompt_tokens",  # those of the two below among them
    "cached_tokens",
    "cache_write_tokens",
    "completion_tokens",
    "embedded_tokens",
    "micros",  # from arrival to the last byte
    "cost_nano",
    "unpriced_requests",  # of models without a price
    "storage_token_s",  # tokens times seconds in caches of hosted APIs
    "storage_nano",  # which is a part of the cost
    "hints_nano",  # saved by hosted caches, less what writes cost above input and what storage cost: may be below 0
)
SAVED: Final = ("requests", "tokens", "micros", "nano")
COLUMNS: Final = (*USED, *(f"{saver}_{what}" for saver in SAVERS for what in SAVED))

Figures = dict[str, int]
"""By column; what is missing is 0."""


class Row(NamedTuple):
    """`day` is written 2026-11-22, in UTC. `currency` is empty where the model has no price. `key` is the id of a key
    that an admin made, else empty."""

    day: str
    tenant: str
    model: str
    lane: str
    currency: str
    key: str = ""


class Entry(NamedTuple):
    """What one finished request used and saved, or one audit of the semantic cache.

    prompt_tokens   of its prompts, with `cached_tokens` and `writes` among them: each token is of one kind
    cached_tokens   as reported to the client, which is what is paid
    writes          time to live in seconds (0: none requested), tokens written to the cache, as reported
    reused_tokens   of the prompts, those that were not computed again; they may be more than what is reported
    reused_ms       that computing those would have taken
    reused_by       the cache of our engines, or of a hosted API
    created_tokens  of `writes`, those that a hosted API computed for its cache and then read for the request
    storage_token_s tokens times seconds that a hosted API keeps for it
    by_upstream     a hosted API answered, or had answered what was remembered; it knows nothing of our batch lane
    hits            answers that were not generated; they are in no other field
    key             as in Row
    """

    tenant: str
    model: str
    lane: RowLane = "online"
    prompt_tokens: int = 0
    cached_tokens: int = 0
    writes: tuple[tuple[float, int], ...] = ()
    completion_tokens: int = 0
    embedded_tokens: int = 0
    total_ms: float = 0.0
    reused_tokens: int = 0
    reused_ms: float = 0.0
    reused_by: Literal["prefix", "upstream"] = "prefix"
    created_tokens: int = 0
    storage_token_s: int = 0
    by_upstream: bool = False
    hits: tuple[Hit, ...] = ()
    key: str = ""

    @property
    def at_batch_price(self) -> bool:
        """Audits of our own engines are computed in the batch lane, too."""
        return self.lane != "online" and not self.by_upstream


def add_up(total: Figures, more: Mapping[str, int]) -> None:
    """Adds `more` to `total`."""
    for column, value in more.items():
        total[column] = total.get(column, 0) + value
