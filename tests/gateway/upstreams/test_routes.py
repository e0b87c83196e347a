"""Which upstreams a model is asked of."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import UpstreamSettings
from gateway.upstreams.routes import Routes


def upstream(name: str, *models: str, **options: Any) -> UpstreamSettings:
    return UpstreamSettings(name=name, url="http://upstream.test", models=models, **options)


def found(model: str, *upstreams: UpstreamSettings, tenant: str = "t") -> list[tuple[str, str]]:
    return [(route.upstream, route.model) for route in Routes(upstreams).find(model, tenant)]


def test_upstreams_are_tried_by_priority_and_then_in_the_order_of_the_file() -> None:
    one, two, three = upstream("one", "m", priority=1), upstream("two", "m"), upstream("three", "m")
    assert found("m", one, two, three) == [("two", "m"), ("three", "m"), ("one", "m")]
    assert found("other", one, two) == []


def test_a_pattern_is_no_fallback_for_an_exact_name() -> None:
    private, everything = upstream("private", "llama"), upstream("everything", "*", priority=-1)
    assert found("llama", everything, private) == [("private", "llama")]
    assert found("gpt", everything, private) == [("everything", "gpt")]


def test_an_exact_name_of_one_upstream_wins_over_its_own_pattern() -> None:
    assert found("gpt-5", upstream("a", "gpt-*", "gpt-5 = gpt-5-2026")) == [("a", "gpt-5-2026")]


@pytest.mark.parametrize(
    ("written", "asked", "upstreams_name"),
    [
        ("fast = gpt-5-mini", "fast", "gpt-5-mini"),
        ("openai/* = *", "openai/gpt-5", "gpt-5"),
        ("* = openai/*", "gpt-5", "openai/gpt-5"),
        ("gpt-?", "gpt-5", "gpt-5"),
        ("a.c", "a.c", "a.c"),
    ],
)
def test_models_are_renamed_as_the_settings_say(written: str, asked: str, upstreams_name: str) -> None:
    assert found(asked, upstream("a", written)) == [("a", upstreams_name)]


@pytest.mark.parametrize(("written", "asked"), [("a.c", "abc"), ("gpt-?", "gpt-55"), ("Gpt", "gpt"), ("a/*", "b/c")])
def test_a_name_that_only_looks_alike_is_another_model(written: str, asked: str) -> None:
    assert found(asked, upstream("a", written)) == []


def test_a_tenant_finds_the_upstreams_that_are_for_it_alone() -> None:
    theirs, everybodys = upstream("theirs", "m", tenants=("t",)), upstream("everybodys", "m")
    assert found("m", theirs, everybodys, tenant="t") == [("theirs", "m"), ("everybodys", "m")]
    assert found("m", theirs, everybodys, tenant="u") == [("everybodys", "m")]


def test_exact_names_are_listed_and_those_that_upstreams_told_which_lead_to_them() -> None:
    routes = Routes(
        [
            upstream("a", "m", "fast = slow", "gpt-*", "openai/* = *"),
            upstream("b", "claude", dialect="anthropic"),
            upstream("c", "secret", tenants=("u",)),
        ]
    )
    told = {"a": ["gpt-5", "tts-1"], "b": ["claude", "claude-2"]}
    assert routes.listed("t", told) == ["m", "fast", "gpt-5", "openai/gpt-5", "openai/tts-1", "claude"]
    assert routes.listed("u", {}) == ["m", "fast", "claude", "secret"]


@pytest.mark.parametrize("odd", ["\n", "\r", "\x1b[1m", "\0", "\x7f", "\x9b", "\u2028", "\u202e", "\ud800", "\u00a0"])
def test_a_pattern_matches_no_name_that_cannot_be_printed(odd: str) -> None:
    everything, renamed = upstream("a", "*"), upstream("b", "our/* = *")
    for name in (f"gpt{odd}", f"{odd}gpt", f"our/a{odd}b"):
        assert found(name, everything, renamed) == []
        assert Routes([everything, renamed]).listed("t", {"a": [name], "b": [name]}) == []
    assert found("gpt 5 é", everything) == [("a", "gpt 5 é")]
