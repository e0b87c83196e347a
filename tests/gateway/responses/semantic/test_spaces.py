"""Spaces of owners and models, and how many there may be."""

from __future__ import annotations

from gateway.config import SemanticCacheSettings
from gateway.responses.semantic.spaces import Spaces
from tests.fakes.meanings import Kitchen, Meanings
from tests.fakes.tuned import tuned

FIRST, SECOND = "How do I reset my password?", "how can i reset my password"


async def test_only_so_many_models_of_an_owner_have_questions() -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}), settings=tuned(SemanticCacheSettings, mode="on", max_models=2))
    for model in ("one", "two"):
        await one.ask(FIRST, model=model)
    await one.ask(FIRST, tenant="b", model="one")
    assert (await one.ask(SECOND, model="one"))[1] == "semantic"
    await one.ask(FIRST, model="three")
    assert (await one.ask("how should i reset my password", model="one"))[1] == "semantic"
    assert (await one.ask("how might i reset my password", tenant="b", model="one"))[1] == "semantic"
    assert (await one.ask(SECOND, model="two"))[1] == "miss"


async def test_all_owners_and_models_together_keep_within_their_bytes_and_who_has_most_gives() -> None:
    settings = tuned(SemanticCacheSettings, mode="on", max_memory_bytes=100_000, max_models=3)
    one = Kitchen(meanings=Meanings({"reset": 0.0}), settings=settings)
    spaces: Spaces = one.semantic._spaces
    await one.ask(FIRST, tenant="small")
    for number in range(40):
        await one.ask(f"How do I reset device {number}?", tenant="large", model=f"m{number % 3}")
        assert sum(space.bytes for space in spaces) <= settings.max_memory_bytes
    assert sum(space.evicted for space in spaces) > 0
    assert (await one.ask(SECOND, tenant="small"))[1] == "semantic"
