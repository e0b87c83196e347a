"""Which limits a tenant has, what a request needs of them, and what is said when it is not there."""

from __future__ import annotations

import pytest

from gateway.config import LimitSettings, TenantSettings
from gateway.errors import RateLimitError
from gateway.limits.amounts import Limits, costs, limits_of, refusal, to_set_aside, used
from gateway.limits.counters import Taken
from gateway.types import Need, Usage
from tests.fakes.tuned import tuned

KEYS = ("a-key-of-theirs",)
TOKENS = Limits({"requests": 60, "tokens": 1000, "output_tokens": 300}, 0)


def test_a_tenant_has_the_limits_of_all_but_where_it_has_its_own() -> None:
    settings = tuned(LimitSettings, requests_per_minute=60, tokens_per_minute=1000, max_in_flight=4)
    tenants = (
        TenantSettings(name="as-all", keys=KEYS),
        TenantSettings(name="own", keys=KEYS, requests_per_minute=5, tokens_per_minute=0, input_tokens_per_minute=9),
        TenantSettings(name="free", keys=KEYS, requests_per_minute=0, tokens_per_minute=0, max_in_flight=0),
    )
    assert dict(limits_of(settings, tenants)) == {
        "as-all": Limits({"requests": 60, "tokens": 1000}, 4),
        "own": Limits({"requests": 5, "input_tokens": 9}, 4),
    }


def test_an_open_server_has_the_limits_of_all_for_everybody_together() -> None:
    assert dict(limits_of(LimitSettings(), ())) == {}
    assert dict(limits_of(tuned(LimitSettings, max_in_flight=2), ())) == {"anonymous": Limits({}, 2)}


def test_a_prompt_and_all_its_answers_are_set_aside() -> None:
    need = Need(input_tokens=100, answer_tokens=50, answers=3)
    assert to_set_aside(need, TOKENS, LimitSettings()) == {"requests": 1, "tokens": 250, "output_tokens": 150}


def test_an_answer_without_a_maximum_is_taken_to_have_so_many_tokens() -> None:
    need = Need(input_tokens=100, answer_tokens=None, answers=2)
    settings = tuned(LimitSettings, assumed_completion_tokens=70)
    assert to_set_aside(need, TOKENS, settings) == {"requests": 1, "tokens": 240, "output_tokens": 140}


def test_what_is_assumed_of_an_answer_is_no_more_than_there_is() -> None:
    need = Need(input_tokens=100, answer_tokens=None, answers=1)
    assert to_set_aside(need, TOKENS, tuned(LimitSettings, assumed_completion_tokens=2000))["output_tokens"] == 300
    settings = tuned(LimitSettings, assumed_completion_tokens=2000, count_cached_tokens=True)
    assert to_set_aside(need, TOKENS, settings)["tokens"] == 1000


def test_a_request_that_only_counts_tokens_is_a_request_and_nothing_else() -> None:
    assert to_set_aside(Need(generates=False), TOKENS, LimitSettings()) == {
        "requests": 1,
        "tokens": 0,
        "output_tokens": 0,
    }


def test_an_answer_that_would_never_fit_is_refused_for_good() -> None:
    with pytest.raises(RateLimitError, match=r"Request too large for output tokens per min \(OTPM\): Limit 300,") as no:
        to_set_aside(Need(answer_tokens=301, answers=1), TOKENS, LimitSettings())
    assert (no.value.limit, no.value.type, no.value.retry_after_s) == ("output_tokens", "tokens", None)


def test_a_prompt_that_would_never_fit_is_refused_only_where_cached_tokens_count() -> None:
    """Else all of it may turn out to be cached: it needs whatever there is."""
    need = Need(input_tokens=5000, answer_tokens=10, answers=1)
    assert to_set_aside(need, TOKENS, LimitSettings())["tokens"] == 1000
    with pytest.raises(RateLimitError, match=r"tokens per min .*Limit 1000, Requested 5010"):
        to_set_aside(need, TOKENS, tuned(LimitSettings, count_cached_tokens=True))


def test_cached_tokens_were_used_only_where_they_count() -> None:
    usage = Usage(prompt_tokens=100, completion_tokens=7, cached_tokens=90)
    assert used(usage, LimitSettings())["tokens"] == 17
    assert used(usage, tuned(LimitSettings, count_cached_tokens=True))["tokens"] == 107


def test_a_refusal_names_the_limit_that_takes_longest_and_says_when() -> None:
    now = 10**15
    taken = Taken(False, now, {"requests": now + 60_000_000, "tokens": now + 54_000_000, "output_tokens": now})
    amounts = {"requests": 1, "tokens": 200, "output_tokens": 100}
    error = refusal(TOKENS, amounts, taken, "north")
    assert error.message == (
        "Rate limit reached for north on tokens per min (TPM): Limit 1000, Used 900, Requested 200. "
        "Please try again in 6s."
    )
    assert (error.limit, error.type, error.code, error.retry_after_s) == ("tokens", "tokens", "rate_limit_exceeded", 6)


def test_a_refusal_for_requests_is_of_requests() -> None:
    taken = Taken(False, 0, {"requests": 60_000_000})
    error = refusal(Limits({"requests": 7}, 0), {"requests": 1}, taken, "north")
    assert (error.limit, error.type, error.retry_after_s) == ("requests", "requests", 8.572)
    assert "on requests per min (RPM): Limit 7, Used 7, Requested 1. Please try again in 8.572s." in error.message


def test_where_everything_flows_back_in_time_it_is_the_places_that_are_taken() -> None:
    error = refusal(Limits({"requests": 7}, 3), {"requests": 1}, Taken(False, 0, {"requests": 0}), "north")
    assert (error.limit, error.type, error.retry_after_s) == ("in_flight", "requests", 1.0)
    assert "on concurrent requests: Limit 3, Used 3, Requested 1. Please try again in 1s." in error.message


def test_costs_are_rounded_up() -> None:
    assert costs({"tokens": 1}, Limits({"tokens": 7}, 0)) == {"tokens": 8_571_429}
