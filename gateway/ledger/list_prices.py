"""The bundled list prices of hosted models (list_prices.toml), for upstreams that are the provider's own host."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from gateway.config import PriceSettings

CURRENCY = "USD"


@cache
def list_prices() -> Mapping[str, Mapping[str, PriceSettings]]:
    """Host of a provider -> model, as the provider calls it -> price."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"), parse_float=Decimal)
    return {
        provider["host"]: {
            model: PriceSettings(model=model, currency=CURRENCY, **{key: row[key] for key in row if key != "models"})
            for row in provider["prices"]
            for model in row["models"]
        }
        for provider in table.values()
    }


def find_list_price(url: str, model: str) -> PriceSettings | None:
    """Of a model at the upstream with this URL."""
    return list_prices().get(urlsplit(url).hostname or "", {}).get(model)
