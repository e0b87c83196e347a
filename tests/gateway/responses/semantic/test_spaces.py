"""Spaces of owners and models, and how many there may be."""

from __future__ import annotations

from gateway.config import SemanticCacheSettings
from tests.fakes.meanings import Kitchen, Meanings

FIRST, SECOND = "How do I reset my password?", "how can i reset my password"


async def test_only_so_many_models_of_an_owner_have_questions() -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}), settings=SemanticCacheSettings(mode="on", max_models=2))
    for model in ("one", "two"):
        await one.ask(FIRST, model=model)
    await one.ask(FIRST, tenant="b", model="one")
    assert (await one.ask(SECOND, model="one"))[1] == "semantic"
    await one.ask(FIRST, model="three")
    assert (await one.ask("how should i reset my password", model="one"))[1] == "semantic"
    assert (await one.ask("how might i reset my password", tenant="b", model="one"))[1] == "semantic"
    assert (await one.ask(SECOND, model="two"))[1] == "miss"
