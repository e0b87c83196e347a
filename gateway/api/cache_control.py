"""A request's wishes for the response cache, as a Reuse: Cache-Control (RFC 9111), the header x-kvasir-cache, and the
body's `cache`, as other gateways know it. Where they differ, the stricter one counts.

Cache-Control comes from libraries and proxies, too: what is odd there is read in the strict sense and never refused.
The other two are ours, and what is wrong with them is a 400.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from multidict import CIMultiDictProxy

from gateway.api.fields import boolean, closed_record, invalid, number, shown, text
from gateway.errors import BadRequestError
from gateway.types import PLAIN_REUSE, Reuse

HEADER: Final = "x-kvasir-cache"
RETRY_HEADER: Final = "x-stainless-retry-count"
"""Of SDKs made by Stainless (OpenAI, Anthropic): how often this request was sent before."""
MAX_SECONDS: Final = 2**31
MAX_PARTITION: Final = 256

_ITEM: Final = re.compile(r'(?:[^,"]|"(?:[^"\\]|\\.)*"?)+')  # between commas outside of quoted strings
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^"]*')
_WORDS: Final = ("on", "off", "exact", "semantic", "no-cache", "no-store", "only-if-cached")
_NUMBERS: Final = {"max-age": "max_age_s", "ttl": "ttl_s", "similarity": "similarity"}

_seconds = number(0, MAX_SECONDS)
_share = number(0, 1)

check_cache: Final = closed_record(
    **{
        "ttl": _seconds,
        "s-maxage": _seconds,
        "s-max-age": _seconds,
        "max-age": _seconds,
        "no-cache": boolean,
        "no-store": boolean,
        "use-cache": boolean,
        "only-if-cached": boolean,
        "namespace": text(MAX_PARTITION),
        "semantic": boolean,
        "similarity": _share,
    }
)
"""The body's `cache`."""


def from_headers(headers: CIMultiDictProxy[str]) -> Reuse:
    """Raises BadRequestError for what `x-kvasir-cache` may not say."""
    reuse = PLAIN_REUSE
    if "Cache-Control" in headers:
        reuse = _standard(",".join(headers.getall("Cache-Control")))
    elif "no-cache" in headers.get("Pragma", "").lower():  # RFC 9111, section 5.4
        reuse = replace(PLAIN_REUSE, read=False)
    if HEADER in headers:
        reuse = stricter(reuse, _own(",".join(headers.getall(HEADER))))
    if headers.get(RETRY_HEADER, "0").strip() != "0":  # the answer that was given before would not do
        reuse = replace(reuse, read=False)
    return reuse


def from_body(cache: Mapping[str, Any]) -> Reuse:
    """Of what `check_cache` has checked."""
    if not cache:
        return PLAIN_REUSE
    ages = [cache[name] for name in ("s-maxage", "s-max-age", "max-age") if name in cache]
    return _settled(
        Reuse(
            asked=cache.get("use-cache"),
            read=not cache.get("no-cache"),
            write=not cache.get("no-store"),
            only_cached=cache.get("only-if-cached", False),
            max_age_s=min(ages, default=None),
            ttl_s=cache.get("ttl"),
            partition=cache.get("namespace", ""),
            semantic=cache.get("semantic"),
            similarity=cache.get("similarity"),
        )
    )


def stricter(one: Reuse, other: Reuse) -> Reuse:
    """What both allow. Asking for the cache counts where the other one does not refuse it."""
    if other is PLAIN_REUSE:
        return one
    if one is PLAIN_REUSE:
        return other
    return Reuse(
        asked=_both(one.asked, other.asked),
        read=one.read and other.read,
        write=one.write and other.write,
        only_cached=one.only_cached or other.only_cached,
        max_age_s=_least(one.max_age_s, other.max_age_s),
        ttl_s=_least(one.ttl_s, other.ttl_s),
        partition=one.partition or other.partition,
        semantic=_both(one.semantic, other.semantic),
        similarity=max((value for value in (one.similarity, other.similarity) if value is not None), default=None),
    )


def _standard(written: str) -> Reuse:
    """Unknown directives are ignored, as the standard wants it; what cannot be read may have been a restriction."""
    items = [item.partition("=") for item in _ITEM.findall(written) if item.strip()]
    found = [(name.strip().lower(), value.strip()) for name, _, value in items]
    names = {name for name, _ in found}
    readable = all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in found)
    return _settled(
        Reuse(
            read="no-cache" not in names and readable,
            write="no-store" not in names and readable,
            only_cached="only-if-cached" in names,
            max_age_s=min([_age(value.strip('"')) for name, value in found if name == "max-age"], default=None),
        )
    )


def _age(value: str) -> float:
    """An age that is no number is over already (RFC 9111, section 4.2.1)."""
    return float(min(int(value[:10]), MAX_SECONDS)) if value.isascii() and value.isdigit() else 0.0


def _own(written: str) -> Reuse:
    words: set[str] = set()
    numbers: dict[str, float] = {}
    for item in re.split(r"[,;]", written):
        name, given, value = (part.strip() for part in item.partition("="))
        name = name.lower()
        if given and name in _NUMBERS:
            numbers[_NUMBERS[name]] = _number(name, value)
        elif not given and name in _WORDS:
            words.add(name)
        elif name or given:
            known = ", ".join((*_WORDS, *(f"{one}=NUMBER" for one in _NUMBERS)))
            raise invalid(HEADER, f"`{shown(item.strip())}` is none of {known}")
    if {"on", "off"} <= words or {"exact", "semantic"} <= words:
        raise invalid(HEADER, "it says both, one and its opposite")
    return _settled(
        Reuse(
            asked=True if words & {"on", "semantic"} else False if "off" in words else None,
            read="no-cache" not in words,
            write="no-store" not in words,
            only_cached="only-if-cached" in words,
            semantic=True if "semantic" in words else False if "exact" in words else None,
            max_age_s=numbers.get("max_age_s"),
            ttl_s=numbers.get("ttl_s"),
            similarity=numbers.get("similarity"),
        )
    )


def _number(name: str, value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", value, re.ASCII):
        raise invalid(HEADER, f"{name}={shown(value)} is no number")
    check = _share if name == "similarity" else _seconds
    try:
        return check(float(value), name)
    except BadRequestError as error:
        raise invalid(HEADER, f"{name}: {error.reason}") from None


def _settled(reuse: Reuse) -> Reuse:
    """A maximum age of 0 is no reading, a TTL of 0 no writing."""
    if reuse.max_age_s == 0:
        reuse = replace(reuse, read=False, max_age_s=None)
    if reuse.ttl_s == 0:
        reuse = replace(reuse, write=False, ttl_s=None)
    return PLAIN_REUSE if reuse == PLAIN_REUSE else reuse


def _both(one: bool | None, other: bool | None) -> bool | None:
    if one is None or other is None:
        return other if one is None else one
    return one and other


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)
