"""The semantic cache behind the exact one: what is answered, what is compared, and what happens when parts fail."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol import Grammar, Sampling
from gateway.config import SemanticCacheSettings
from gateway.responses.entries import Chosen
from gateway.responses.entry_stores import Removal
from gateway.responses.semantic.budget import Budget
from gateway.types import ChatPrompt, Constraint, Request, Reuse, Scope, Tool, ToolUse
from tests.fakes.meanings import BROKEN, Kitchen, Meanings
from tests.fakes.tuned import tuned
from tests.fakes.waiting import until

FIRST, SECOND = "How do I reset my password?", "how can i reset my password"
ANGLES = {"reset": 0.0, "boil": 80.0}


def kitchen(**changes: Any) -> Kitchen:
    values: dict[str, Any] = {"meanings": Meanings(dict(ANGLES))}
    return Kitchen(**{**values, **changes})


def events(one: Kitchen) -> dict[str, int]:
    return dict(one.semantic.events)


def budget(one: Kitchen) -> Budget:
    (space,) = one.semantic._spaces
    return space.budget


async def test_a_question_in_other_words_gets_the_answer_that_was_given() -> None:
    one = kitchen()
    first = await one.ask(FIRST)
    assert await one.ask(SECOND) == (first[0], "semantic")
    assert len(one.runs) == 1
    assert one.semantic.outcomes == {"miss": 1, "hit": 1}
    (space,) = one.semantic.stats()["spaces"]
    assert (space["owner"], space["model"], space["entries"], space["hits"]) == ("tenant:a", "demo", 1, 1)


@pytest.mark.parametrize(("namespaces", "outcome"), [((), "miss"), (("n",), "semantic")])
async def test_tenants_of_a_namespace_share_answers_by_meaning_only_where_it_says_so(
    namespaces: tuple[str, ...], outcome: str
) -> None:
    one = kitchen(namespaces=namespaces)
    await one.ask(FIRST, scope=Scope(namespace="n"))
    assert (await one.ask(SECOND, tenant="b", scope=Scope(namespace="n")))[1] == outcome


async def test_what_asks_for_something_else_is_answered_afresh() -> None:
    one = kitchen()
    await one.ask("How do I reset 2 passwords?")
    for other in ("How do I reset 3 passwords?", "How do I not reset 2 passwords?", "How do I boil 2 eggs?"):
        assert (await one.ask(other))[1] == "miss"


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "b"},
        {"model": "other"},
        {"before": [{"role": "system", "content": "Be brief."}]},
        {"before": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]},
        {"sampling": Sampling(max_tokens=9, temperature=0.0)},
        {"stop": ("END",)},
        {"reuse": Reuse(partition="p")},
    ],
)
async def test_only_requests_that_differ_in_nothing_else_are_compared(changes: dict[str, Any]) -> None:
    one = kitchen()
    await one.ask(FIRST)
    assert (await one.ask(SECOND, **changes))[1] == "miss"


def _with_tools() -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": SECOND}], tools=(Tool("look"),))


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"prompt": _with_tools()}, "tools"),
        ({"tool_use": ToolUse((Tool("look"),)), "reuse": Reuse(asked=True)}, "tools"),
        ({"sampling": Sampling(max_tokens=8, temperature=0.5, seed=1)}, "sampling"),
        ({"sampling": Sampling(max_tokens=8, temperature=0.0, logprobs=2)}, "form"),
        ({"constraint": Constraint(Grammar("json_schema", "{}"), "response_format")}, "form"),
        ({"reuse": Reuse(semantic=False)}, "off"),
        ({"prompt": ChatPrompt([{"role": "assistant", "content": SECOND}], continues=True)}, "chat"),
    ],
)
async def test_requests_that_are_not_safe_to_answer_by_meaning_stay_exact(
    changes: dict[str, Any], outcome: str
) -> None:
    one = kitchen()
    await one.ask(SECOND, **changes)
    assert one.semantic.outcomes == {outcome: 1}
    assert one.semantic.stats()["spaces"] == []


async def test_words_of_time_and_long_texts_stay_exact() -> None:
    one = kitchen(settings=tuned(SemanticCacheSettings, mode="on", max_text_tokens=50))
    await one.ask("How do I reset it today?")
    await one.ask("How do I reset it, and why? " * 5)
    assert one.semantic.outcomes == {"moment": 1, "not-embedded": 1}


async def test_tenants_and_requests_opt_in() -> None:
    one = kitchen(settings=tuned(SemanticCacheSettings, mode="off"), modes={"a": "on", "b": "ask"})
    for tenant, reuse, outcome in (
        ("a", Reuse(), "semantic"),
        ("b", Reuse(), "miss"),
        ("c", Reuse(semantic=True), "miss"),
    ):
        await one.ask(FIRST, tenant=tenant, reuse=reuse)
        assert (await one.ask(SECOND, tenant=tenant, reuse=reuse))[1] == outcome
    assert one.semantic.outcomes["not-asked"] == 2
    await one.ask(FIRST, tenant="b", reuse=Reuse(semantic=True, partition="p"))
    assert (await one.ask(SECOND, tenant="b", reuse=Reuse(semantic=True, partition="p")))[1] == "semantic"


async def test_what_the_exact_cache_answers_counts_where_it_would_have_been_looked_up() -> None:
    one = kitchen()
    for text in (FIRST, "boil an egg", "fry an egg", "poach an egg", "boil an egg today"):
        await one.ask(text)
    looked_up = budget(one).figures().requests
    assert (await one.ask("boil an egg today"))[1] == "exact"
    assert (await one.ask(FIRST, reuse=Reuse(semantic=False)))[1] == "exact"
    assert budget(one).figures().requests == looked_up
    assert (await one.ask(FIRST))[1] == "exact"
    assert (budget(one).figures().requests, budget(one).figures().exact) == (looked_up + 1, 1)


async def test_a_request_may_only_raise_the_similarity() -> None:
    one = kitchen(meanings=Meanings({"password?": 0.0, "reset": 20.0}))
    await one.ask(FIRST)
    assert (await one.ask(SECOND, reuse=Reuse(similarity=0.95)))[1] == "miss"
    strict = kitchen(settings=tuned(SemanticCacheSettings, mode="on", min_similarity=0.99), meanings=one.meanings)
    await strict.ask(FIRST)
    assert (await strict.ask(SECOND, reuse=Reuse(similarity=0.1)))[1] == "miss"


async def test_every_miss_with_a_near_neighbour_teaches_something() -> None:
    settings = tuned(SemanticCacheSettings, mode="on", min_similarity=1.0)
    one = kitchen(settings=settings, meanings=Meanings({"password?": 0.0, "should": 18.0, "reset": 9.0}))
    one.answers = {FIRST: "Click on it.", SECOND: "click on it"}
    await one.ask(FIRST)
    await one.ask(SECOND)
    await until(lambda: budget(one).figures().labels == 1)
    await one.ask("how should i reset my password")
    await until(lambda: budget(one).figures().labels == 2)


async def test_an_audit_does_not_hold_up_the_answer_and_runs_in_what_others_leave() -> None:
    one = kitchen(chance=0.0)
    one.answers = {FIRST: "Click on it.", SECOND: "click on it"}
    await one.ask(FIRST)
    assert await one.ask(SECOND) == ("Click on it.", "semantic")
    await until(lambda: events(one).get("audited") == 1)
    assert [request.lane for request in one.runs] == ["online", "batch"]
    assert budget(one).figures().wrong_share == 0.0
    assert (await one.ask(SECOND))[1] == "semantic"


async def test_an_answer_that_an_audit_finds_wrong_is_not_given_again() -> None:
    one = kitchen(chance=0.0)
    one.answers = {FIRST: "Yes.", SECOND: "No."}
    await one.ask(FIRST)
    assert await one.ask(SECOND) == ("Yes.", "semantic")
    await until(lambda: events(one).get("audited") == 1)
    assert await one.ask(SECOND) == ("No.", "miss")
    (space,) = one.semantic.stats()["spaces"]
    assert (space["quarantined"], space["wrong_share"]) == (1, 1.0)
    (wrong,) = one.semantic.stats()["last_wrong"]
    assert (wrong["at_s"], wrong["owner"], wrong["question"], wrong["answered_as"]) == (
        1000.0,
        "tenant:a",
        None,
        None,
    )
    assert wrong["similarity"] > 0.9
    assert 0 < wrong["probability"] <= 1


async def test_questions_that_were_answered_wrongly_are_shown_where_operators_may_read_them_until_a_removal() -> None:
    one = kitchen(chance=0.0, shows_texts=True)
    one.answers = {FIRST: "Yes.", SECOND: "No."}
    await one.ask(FIRST)
    await one.ask(SECOND)
    await until(lambda: events(one).get("audited") == 1)
    (wrong,) = one.semantic.stats()["last_wrong"]
    assert (wrong["question"], wrong["answered_as"]) == (SECOND, FIRST)
    one.semantic.forget(Removal(Chosen(), 0.0))
    (wrong,) = one.semantic.stats()["last_wrong"]
    assert (wrong["question"], wrong["answered_as"]) == (None, None)


async def test_what_cannot_be_audited_is_answered_afresh() -> None:
    one = kitchen(chance=0.0, settings=tuned(SemanticCacheSettings, mode="on", max_audits=0))
    await one.ask(FIRST)
    assert (await one.ask(SECOND))[1] == "miss"
    assert one.semantic.outcomes["unaudited"] == 1


async def test_an_audit_that_fails_is_counted_and_blames_nobody() -> None:
    one = kitchen(chance=0.0)
    await one.ask(FIRST)

    def fail(request: Request) -> None:
        raise BROKEN

    one.before = fail
    assert (await one.ask(SECOND))[1] == "semantic"
    await until(lambda: events(one).get("audits_lost") == 1)
    assert budget(one).figures().audits == 0


async def test_answers_whose_bytes_are_gone_are_asked_for_again() -> None:
    one = kitchen()
    await one.ask(FIRST)
    one.now += 3599.0
    assert one.exact is not None
    memory = one.exact.memory
    (entry,) = memory
    assert memory.delete(entry.owner, entry.id)
    assert (await one.ask(SECOND))[1] == "miss"
    assert events(one)["gone"] == 1
    assert (await one.ask(FIRST))[1] == "semantic"


async def test_who_wants_nothing_generated_gets_what_means_the_same_and_no_audit() -> None:
    one = kitchen(chance=0.0)
    await one.ask(FIRST)
    looked_up = budget(one).figures().requests
    assert (await one.ask(SECOND, reuse=Reuse(only_cached=True)))[1] == "semantic"
    assert (len(one.runs), events(one).get("audited")) == (1, None)
    assert (budget(one).figures().requests, budget(one).figures().hits) == (looked_up, 0)
