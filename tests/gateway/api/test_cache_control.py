"""What requests say of the response cache: whatever is odd restricts, and nothing widens."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.api.cache_control import check_cache, from_body, from_headers, stricter
from gateway.errors import BadRequestError
from gateway.types import PLAIN_REUSE, Reuse


def headers(*pairs: tuple[str, str]) -> Reuse:
    return from_headers(CIMultiDictProxy(CIMultiDict(pairs)))


def control(value: str) -> Reuse:
    return headers(("cache-control", value))


def own(value: str) -> Reuse:
    return headers(("X-Kvasir-Cache", value))


@pytest.mark.parametrize(
    ("value", "reuse"),
    [
        ("no-cache", Reuse(read=False)),
        ("NO-CACHE", Reuse(read=False)),
        ("no-store", Reuse(write=False)),
        ("only-if-cached", Reuse(only_cached=True)),
        ("max-age=60", Reuse(max_age_s=60)),
        ('max-age="60"', Reuse(max_age_s=60)),
        (" max-age = 60 , no-store ", Reuse(max_age_s=60, write=False)),
        ("max-age=0", Reuse(read=False)),
        ("max-age=60, max-age=5", Reuse(max_age_s=5)),
        ("max-age=99999999999999999999", Reuse(max_age_s=2**31)),
        ("max-age", Reuse(read=False)),
        ("max-age=", Reuse(read=False)),
        ("max-age=-5", Reuse(read=False)),
        ("max-age=1e9", Reuse(read=False)),
        ("max-age=\u0665", Reuse(read=False)),
        ("max-stale=5, min-fresh=1, no-transform, x-y=z", PLAIN_REUSE),
        ("", PLAIN_REUSE),
        (",,,", PLAIN_REUSE),
        ('x="no-cache"', PLAIN_REUSE),
        ('x="a, no-store"', PLAIN_REUSE),
        ('x="\\", no-store', Reuse(read=False, write=False)),
        ("@@", Reuse(read=False, write=False)),
        ("no-cache=foo", Reuse(read=False)),
        ("no-cache\tno-store", Reuse(read=False, write=False)),
    ],
)
def test_cache_control_is_read_as_the_standard_says(value: str, reuse: Reuse) -> None:
    assert control(value) == reuse


def test_several_lines_are_one_and_the_strictest_of_them_counts() -> None:
    lines = [("Cache-Control", "max-age=60"), ("cache-control", "max-age=5"), ("CACHE-CONTROL", "no-store")]
    assert headers(*lines) == Reuse(max_age_s=5, write=False)


def test_pragma_counts_where_there_is_no_cache_control() -> None:
    assert headers(("Pragma", "no-cache")) == Reuse(read=False)
    assert headers(("Pragma", "no-cache"), ("Cache-Control", "max-age=5")) == Reuse(max_age_s=5)


@given(st.text(st.characters(codec="latin-1", exclude_characters="\r\n\0"), max_size=60))
def test_cache_control_never_fails_and_never_asks_for_more(value: str) -> None:
    reuse = control(value)
    assert reuse.asked is None
    assert not reuse.partition
    assert reuse.semantic is None
    assert reuse.ttl_s is None


@given(st.text('max-age=,no che;0159" \\st', max_size=40))
def test_what_is_added_to_a_restriction_does_not_lift_it(value: str) -> None:
    assert not control(f"no-store, {value}").write
    assert not control(f"no-cache, {value}").read


@pytest.mark.parametrize(
    ("value", "reuse"),
    [
        ("on", Reuse(asked=True)),
        ("OFF", Reuse(asked=False)),
        ("on; ttl=60", Reuse(asked=True, ttl_s=60)),
        ("semantic; similarity=0.95", Reuse(asked=True, semantic=True, similarity=0.95)),
        ("exact", Reuse(semantic=False)),
        ("no-cache, no-store", Reuse(read=False, write=False)),
        ("only-if-cached, max-age=1.5", Reuse(only_cached=True, max_age_s=1.5)),
        ("ttl=0", Reuse(write=False)),
        ("max-age=0", Reuse(read=False)),
        ("", PLAIN_REUSE),
    ],
)
def test_our_own_header(value: str, reuse: Reuse) -> None:
    assert own(value) == reuse


@pytest.mark.parametrize(
    "value",
    [
        "yes",
        "on=1",
        "ttl",
        "ttl=x",
        "ttl=-1",
        "ttl=1e3",
        "similarity=1.1",
        "on, off",
        "semantic; exact",
        "=",
        "ttl=\u0665",
    ],
)
def test_our_own_header_says_what_is_wrong_with_it(value: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        own(value)
    assert caught.value.param == "x-kvasir-cache"


@pytest.mark.parametrize(
    ("cache", "reuse"),
    [
        ({}, PLAIN_REUSE),
        ({"ttl": 300}, Reuse(ttl_s=300)),
        ({"s-maxage": 600}, Reuse(max_age_s=600)),
        ({"s-maxage": 600, "max-age": 6}, Reuse(max_age_s=6)),
        ({"no-cache": True, "no-store": False}, Reuse(read=False)),
        ({"use-cache": True, "namespace": "n"}, Reuse(asked=True, partition="n")),
        ({"use-cache": None, "only-if-cached": True}, Reuse(only_cached=True)),
        ({"semantic": True, "similarity": 0.9}, Reuse(semantic=True, similarity=0.9)),
    ],
)
def test_the_body_says_it_as_in_other_gateways(cache: dict[str, Any], reuse: Reuse) -> None:
    assert from_body(check_cache(cache, "cache")) == reuse


@pytest.mark.parametrize(
    ("cache", "path"),
    [
        (True, "cache"),
        ({"ttl": "5"}, "cache.ttl"),
        ({"ttl": -1}, "cache.ttl"),
        ({"no-cache": 1}, "cache.no-cache"),
        ({"namespace": "n" * 257}, "cache.namespace"),
        ({"tenant": "other"}, "cache.tenant"),
        ({"similarity": 2}, "cache.similarity"),
    ],
)
def test_what_is_wrong_in_the_body_is_said_with_its_path(cache: Any, path: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_cache(cache, "cache")
    assert caught.value.param == path


def test_of_two_the_stricter_one_counts() -> None:
    one = Reuse(asked=True, max_age_s=60, ttl_s=5, semantic=True, similarity=0.9, partition="p")
    other = Reuse(asked=False, read=False, max_age_s=6, ttl_s=50, semantic=False, similarity=0.95)
    both = Reuse(asked=False, read=False, max_age_s=6, ttl_s=5, semantic=False, similarity=0.95, partition="p")
    assert stricter(one, other) == stricter(other, one) == both
    assert stricter(one, PLAIN_REUSE) == stricter(PLAIN_REUSE, one) == one


@pytest.mark.parametrize("value", ["a" + " " * 8000 + "b", '"\\' * 4000, 'a=",' * 2000, "a=" + " " * 8000 + '"'])
def test_a_header_is_read_in_linear_time(value: str) -> None:
    started_s = time.perf_counter()
    headers(("Cache-Control", value))
    assert time.perf_counter() - started_s < 0.5
