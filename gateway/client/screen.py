"""GET /admin/overview as lines of text, as wide and high as a terminal is. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

BARS: Final = " ▁▂▃▄▅▆▇█"
MAX_WRONG: Final = 5
"""Sentences about what is wrong that are shown; the others are counted."""

BOLD, DIM, RED, RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"
_LABEL_CHARS: Final = 16
_SPANS: Final = {"hour": "the last hour", "day": "the last day", "month": "the last month"}
_UNITS: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def screen(
    overview: Mapping[str, Any], url: str, *, width: int, height: int | None = None, styled: bool = True, note: str = ""
) -> list[str]:
    """`height`: None is without end. `styled`: with colours. `note`: what is to be said besides."""
    lines = [(style, clean(line)[:width]) for style, line in _lines(overview, url, width, note)][:height]
    return [f"{style}{line}{RESET}" if style and styled else line for style, line in lines]


def _lines(overview: Mapping[str, Any], url: str, width: int, note: str) -> Iterator[tuple[str, str]]:
    """Each with its style."""
    totals, series = overview["totals"], overview["series"]
    gateways = overview.get("gateways") or 1
    several = f", {gateways} gateways" if gateways > 1 else ""
    yield BOLD, f"Kvasir {url}: {_SPANS.get(overview['span'], overview['span'])}{several}"
    if overview["stale"]:
        as_of_s = overview.get("as_of_s")
        known = (
            "nothing is known yet" if as_of_s is None else f"last known {time.strftime('%X', time.localtime(as_of_s))}"
        )
        yield RED, f"Redis cannot be read: {known}"
    if note:
        yield RED, note
    wrong = overview["wrong"]
    for one in wrong[:MAX_WRONG]:
        yield RED, f"! {one['text']}"
    if len(wrong) > MAX_WRONG:
        yield RED, f"! and {len(wrong) - MAX_WRONG} more"
    yield "", ""
    yield from _traffic(totals)
    yield "", ""
    yield from _saved(totals["saved"])
    yield "", ""
    yield from _times(totals)
    yield "", ""
    room = max(0, width - _LABEL_CHARS)
    for label, values in (
        ("requests", series["requests"]),
        ("errors", series["errors"]),
        ("prompt tokens", series["prompt_tokens"]),
        ("  cached", series["cached_tokens"]),
        ("first token", series["first_token_p50_ms"]),
    ):
        yield "", f"{label:<{_LABEL_CHARS}}{sparkline(values, room)}"


def _traffic(totals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    requests, errors, prompt = totals["requests"], totals["errors"], totals["prompt_tokens"]
    ended = totals.get("ended", requests + errors)
    yield "", _row("requests", f"{requests:,}", f"{errors:,} errors ({_percent(errors, ended)})")
    cached = totals["cached_tokens"]
    yield "", _row("prompt tokens", short(prompt), f"{short(cached)} of them cached ({_percent(cached, prompt)})")
    yield "", _row("completions", short(totals["completion_tokens"]), "tokens")
    yield "", _row("cost", money(totals["cost"]))
    hits = totals["hits"]
    whole = sum(hits.values())
    yield "", _row("answered by", ", ".join(f"{name} {_percent(count, whole)}" for name, count in hits.items()))


def _saved(saved: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    yield DIM, f"{'saved by':<{_LABEL_CHARS}}{'requests':>10}{'tokens':>10}{'time':>10}  money"
    for name, one in saved.items():
        counts = f"{short(one['requests']):>10}{short(one['tokens']):>10}{duration(one['ms']):>10}"
        yield "", f"{name:<{_LABEL_CHARS}}{counts}  {money(one['money'])}"


def _times(totals: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield DIM, f"{'':<{_LABEL_CHARS}}{'p50':>10}{'p90':>10}{'p99':>10}"
    for label, name in (("first token", "first_token_ms"), ("between tokens", "inter_token_ms")):
        shares = "".join(f"{duration(totals[name][share]):>10}" for share in ("p50", "p90", "p99"))
        yield "", f"{label:<{_LABEL_CHARS}}{shares}"


def _row(label: str, *values: str) -> str:
    return f"{label:<{_LABEL_CHARS}}{'  '.join(values)}"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The latest values, a character each. A gap where there is none; what is more than nothing is never blank."""
    shown = list(values)[-width:] if width else []
    most = max((value for value in shown if value), default=0)
    return "".join(BARS[max(1, round(value / most * (len(BARS) - 1)))] if value else BARS[0] for value in shown)


def short(number: float) -> str:
    """12,345,678 as 12.3M."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"


def duration(ms: float | None) -> str:
    if ms is None:
        return "-"
    for size, unit in ((3_600_000, "h"), (60_000, "min"), (1000, "s")):
        if ms >= size:
            return f"{ms / size:.1f} {unit}"
    return f"{ms:.0f} ms" if ms >= 10 or not ms else f"{ms:.1f} ms"


def money(amounts: Mapping[str, str] | None) -> str:
    """By currency; what no price is known for has none."""
    return ", ".join(f"{currency} {_amount(Decimal(text))}" for currency, text in (amounts or {}).items()) or "no price"


def _amount(amount: Decimal) -> str:
    return f"{amount:,.2f}" if abs(amount) >= 1 or not amount else f"{amount:.2g}"


def clean(text: str) -> str:
    """Names come from clients: what a terminal would act upon is escaped."""
    return "".join([one if one.isprintable() else ascii(one)[1:-1] for one in text])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
