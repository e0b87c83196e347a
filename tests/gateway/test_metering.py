"""Why a request reused nothing, as far as a key that separates is the reason."""

from __future__ import annotations

import logging

import pytest

from engine.protocol import TOKEN_BYTES, Sampling
from gateway.metering import BEGINNING_TOKENS, MAX_BEGINNINGS, KeyMisses
from gateway.types import EncodedPrompt, Request, Scope, Tenant, TextPrompt


def looked(
    misses: KeyMisses, scope: Scope, *, begins: bytes = b"a", num_tokens: int = BEGINNING_TOKENS, cached: int = 0
) -> bool:
    request = Request(
        "r", Tenant("t"), "m", TextPrompt("p"), Sampling(max_tokens=1), received_s=0.0, deadline_s=1.0, scope=scope
    )
    request.trace.cached_tokens = cached
    misses.look(request, EncodedPrompt(begins.ljust(num_tokens * TOKEN_BYTES, b"."), b""))
    return request.trace.missed_by_key


def keyed(key: str, **more: str) -> Scope:
    return Scope(tenant="t", key=key, **more)


def test_a_prompt_that_began_alike_with_another_key_is_the_reason() -> None:
    misses = KeyMisses()
    assert not looked(misses, keyed("1"))
    assert looked(misses, keyed("2"))
    assert not looked(misses, keyed("2")), "evicted, perhaps: the key is the same"
    assert not looked(misses, keyed("3"), cached=16)
    assert not looked(misses, keyed("4"), begins=b"b")
    assert not looked(misses, keyed("5"), num_tokens=BEGINNING_TOKENS - 1)
    assert not looked(misses, keyed(""))


def test_other_tenants_and_salts_are_never_compared() -> None:
    misses = KeyMisses()
    looked(misses, keyed("1"))
    assert not looked(misses, keyed("2", cache_salt="s"))
    assert not looked(misses, Scope(tenant="other", key="2"))
    assert not looked(misses, Scope(namespace="t", key="2"))


def test_so_many_beginnings_are_remembered_and_one_line_is_logged_for_a_tenant(
    caplog: pytest.LogCaptureFixture,
) -> None:
    misses = KeyMisses()
    with caplog.at_level(logging.INFO):
        looked(misses, keyed("1"))
        assert looked(misses, keyed("2"))
        assert looked(misses, keyed("3"))
    (line,) = caplog.messages
    assert 'cache_key = "hint" in [prompt]' in line
    for number in range(MAX_BEGINNINGS):
        looked(misses, keyed("1"), begins=str(number).encode())
    assert not looked(misses, keyed("4")), "forgotten"
