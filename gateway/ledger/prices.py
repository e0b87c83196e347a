"""What tokens cost: the price of a model, and what an entry comes to. In whole numbers: no error adds up.

Each token of a prompt is paid at exactly one rate: input, cached read, or cache write; what an upstream was told to
cache first is read by the request as well. What is reported as saved is the
difference to a request of the online lane whose tokens are all input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from gateway.config import PriceSettings, duration_s, several_currencies
from gateway.ledger.base import AUDIT, Entry, Figures, add_up
from gateway.ledger.list_prices import CURRENCY, find_list_price
from gateway.types import Hit

MEMO: Final = 1024
"""Models whose price is remembered."""

_RATE: Final = 10**9
"""Rates are whole numbers of 1e-15 of a currency for one token: prices of a million tokens have nine decimals."""
_NANO: Final = 10**6
_HOUR_S: Final = 3600
_WHOLE: Final = 10**6
"""A factor of one."""


@dataclass(frozen=True, slots=True)
class Tariff:
    """The rates of one model. `batch` is the factor of the batch lane, in millionths."""

    currency: str
    input: int
    output: int
    cached_read: int
    cache_write: int
    cache_write_of: Mapping[float, int]
    storage: int
    batch: int

    @classmethod
    def of(cls, price: PriceSettings, batch: float) -> Tariff:
        """What is not set costs as much as input. `batch` is the factor of that lane."""
        return cls(
            currency=price.currency,
            input=_rate(price.input),
            output=_rate(price.output),
            cached_read=_rate(price.input if price.cached_read is None else price.cached_read),
            cache_write=_rate(price.input if price.cache_write is None else price.cache_write),
            cache_write_of={duration_s(ttl): _rate(rate) for ttl, rate in price.cache_write_of.items()},
            storage=_rate(price.storage),
            batch=round(batch * _WHOLE),
        )

    def full(self, entry: Entry) -> int:
        """What the entry costs in the online lane, in rates."""
        written = sum(tokens for _, tokens in entry.writes)
        plain = max(0, entry.prompt_tokens - entry.cached_tokens - written)
        return (
            (plain + entry.embedded_tokens) * self.input
            + entry.cached_tokens * self.cached_read
            + self.written(entry)
            + self.stored(entry)
            + entry.completion_tokens * self.output
        )

    def written(self, entry: Entry) -> int:
        """What its writes to caches cost."""
        writes = sum(self.cache_write_of.get(ttl_s, self.cache_write) * tokens for ttl_s, tokens in entry.writes)
        return writes + entry.created_tokens * self.cached_read

    def stored(self, entry: Entry) -> int:
        """What is kept for it costs; of an hour, to the second."""
        return self.storage * entry.storage_token_s // _HOUR_S

    def hinted(self, entry: Entry) -> int:
        """What hosted caches saved it, or cost it where that is less than nothing."""
        plain = sum(tokens for _, tokens in entry.writes) * self.input
        saved = entry.cached_tokens * (self.input - self.cached_read)
        return saved - (self.written(entry) - plain) - self.stored(entry)


class Prices:
    """[[prices]]: a model's own name first, then the patterns in their order; then the bundled list prices."""

    def __init__(
        self,
        prices: Sequence[PriceSettings],
        batch: float,
        hosts: Callable[[str], Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        """batch  the factor on all of them in the batch lane
        hosts  of a model: URL and own name of it, at each upstream that may answer; None: there are no list prices
        """
        self.of = lru_cache(MEMO)(self._find)
        self.replace(prices, batch, hosts)

    def replace(
        self,
        prices: Sequence[PriceSettings],
        batch: float,
        hosts: Callable[[str], Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        """From now on these prices hold; see __init__. Also to be called when `hosts` would say something else."""
        self._batch = batch
        self._tariffs = {price.model: Tariff.of(price, batch) for price in prices}
        self.currency = prices[0].currency if prices else CURRENCY
        """Of budgets; a budget beside prices in several currencies is refused where it is set."""
        self.several_currencies = several_currencies(prices)
        one_currency = all(price.currency == CURRENCY for price in prices)
        self._hosts = hosts if one_currency else None  # costs in two currencies could not be compared
        self.of.cache_clear()

    def estimate(self, model: str, prompt_tokens: int, completion_tokens: int) -> int | None:
        """What so many tokens cost, in rates, to be compared with those of others; None without a price."""
        if (tariff := self.of(model)) is None:
            return None
        return prompt_tokens * tariff.input + completion_tokens * tariff.output

    def expected(self, model: str, prompt_tokens: int, completion_tokens: int, *, at_batch_price: bool) -> int | None:
        """What so many tokens cost a budget, in NANO units of `currency`, rounded up; None without a price in it."""
        tariff, rates = self.of(model), self.estimate(model, prompt_tokens, completion_tokens)
        if tariff is None or rates is None or tariff.currency != self.currency:
            return None
        return -(-rates * (tariff.batch if at_batch_price else _WHOLE) // (_NANO * _WHOLE))

    def _find(self, model: str, by_upstream: bool = True) -> Tariff | None:
        """`by_upstream`: a hosted API answers; what engines compute has no list price."""
        if (own := self._tariffs.get(model)) is not None:
            return own
        matching = (tariff for pattern, tariff in self._tariffs.items() if fnmatchcase(model, pattern))
        if (found := next(matching, None)) is not None or not by_upstream or self._hosts is None:
            return found
        listed = [find_list_price(url, name) for url, name in self._hosts(model)]
        # Any of its upstreams may have answered: no price where one has none, or another.
        price = listed[0] if listed and all(one == listed[0] for one in listed) else None
        return None if price is None else Tariff.of(price, self._batch)


def count(entry: Entry, tariff: Tariff | None, total: Figures) -> None:
    """Adds what the entry comes to to its row. Without a tariff no money. An audit is no request, and saved nothing."""
    used = {
        "prompt_tokens": entry.prompt_tokens,
        "cached_tokens": entry.cached_tokens,
        "cache_write_tokens": sum(tokens for _, tokens in entry.writes),
        "completion_tokens": entry.completion_tokens,
        "micros": round(entry.total_ms * 1e3),
        "storage_token_s": entry.storage_token_s,
    }
    if entry.lane == AUDIT:
        if tariff is not None:
            used["cost_nano"] = _nano(tariff.full(entry) * (tariff.batch if entry.at_batch_price else _WHOLE))
    else:
        used |= {"requests": 1, "embedded_tokens": entry.embedded_tokens, "unpriced_requests": int(tariff is None)}
        if entry.reused_tokens:
            used |= {
                f"{entry.reused_by}_requests": 1,
                f"{entry.reused_by}_tokens": entry.reused_tokens,
                f"{entry.reused_by}_micros": round(entry.reused_ms * 1e3),
            }
        if tariff is not None:
            _add_money(used, entry, tariff)
    add_up(total, {column: value for column, value in used.items() if value})
    for hit in entry.hits:
        add_up(total, _saved(entry, hit, tariff))


def _saved(entry: Entry, hit: Hit, tariff: Tariff | None) -> Figures:
    """By an answer that was not generated."""
    full = 0
    if tariff is not None:
        full = hit.prompt_tokens * tariff.input + hit.completion_tokens * tariff.output
        full *= tariff.batch if entry.at_batch_price else _WHOLE
    saved = {
        "requests": 1,
        "tokens": hit.prompt_tokens + hit.completion_tokens,
        "micros": max(0, round((hit.generation_ms - entry.total_ms) * 1e3)),
        "nano": _nano(full),
    }
    return {f"{hit.kind}_{what}": value for what, value in saved.items() if value}


def _add_money(used: Figures, entry: Entry, tariff: Tariff) -> None:
    full = tariff.full(entry)
    used["cost_nano"] = whole = _nano(full * _WHOLE)
    used[f"{entry.reused_by}_nano"] = _nano(entry.cached_tokens * (tariff.input - tariff.cached_read) * _WHOLE)
    if entry.by_upstream:
        used["storage_nano"] = _nano(tariff.stored(entry) * _WHOLE)
        used["hints_nano"] = _nano(tariff.hinted(entry) * _WHOLE)
    if entry.at_batch_price and full:
        used["cost_nano"] = _nano(full * tariff.batch)
        used |= {
            "batch_requests": 1,
            "batch_tokens": entry.prompt_tokens + entry.completion_tokens + entry.embedded_tokens,
            "batch_nano": whole - used["cost_nano"],
        }


def _rate(price: Decimal) -> int:
    return int(price * _RATE)


def _nano(parts: int) -> int:
    """Rates times a factor, rounded to the nearest; halves up."""
    unit = _NANO * _WHOLE
    return (parts + unit // 2) // unit
