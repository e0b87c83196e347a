"""What this gateway's requests cost and saved since its start, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.admin.sources import LedgerStatus
from gateway.ledger.base import NANO, SAVERS

_WHOSE = ("model", "tenant", "lane")


def ledger_metrics(ledger: LedgerStatus) -> Iterator[Metric]:
    """Read at every scrape."""
    cost = CounterMetricFamily("kvasir_cost", "What requests cost, by [[prices]].", labels=(*_WHOSE, "currency"))
    tokens = CounterMetricFamily("kvasir_saved_tokens", "Tokens that were not computed.", labels=("by", *_WHOSE))
    seconds = CounterMetricFamily(
        "kvasir_saved_seconds", "Seconds that computing them would have taken.", labels=("by", *_WHOSE)
    )
    money = CounterMetricFamily(
        "kvasir_saved_cost", "What the saved work would have cost.", labels=("by", *_WHOSE, "currency")
    )
    for row, figures in ledger.totals.items():
        whose = [row.model, row.tenant, row.lane]
        if row.currency:
            cost.add_metric([*whose, row.currency], figures.get("cost_nano", 0) / NANO)
        for saver in SAVERS:
            if f"{saver}_requests" not in figures:
                continue
            if saver != "batch":  # computed, and cheaper
                tokens.add_metric([saver, *whose], figures.get(f"{saver}_tokens", 0))
                seconds.add_metric([saver, *whose], figures.get(f"{saver}_micros", 0) / 1e6)
            if row.currency:
                money.add_metric([saver, *whose, row.currency], figures.get(f"{saver}_nano", 0) / NANO)
    yield from (cost, tokens, seconds, money)
    yield GaugeMetricFamily(
        "kvasir_ledger_pending_rows", "Rows of the ledger that are not written to Redis yet.", value=ledger.pending
    )
    yield CounterMetricFamily(
        "kvasir_ledger_dropped", "Requests that no ledger row was left for.", value=ledger.dropped
    )
    yield CounterMetricFamily(
        "kvasir_ledger_capped",
        "Figures of rows that were too large for 64 bits, or replaced what was no number.",
        value=ledger.capped,
    )
