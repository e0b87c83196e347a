"""Vectors of questions: the encoder is loaded early, and one that fails or is slow costs no request its answer."""

from __future__ import annotations

import asyncio
import logging

import pytest

from gateway.config import SemanticCacheSettings
from tests.fakes.meanings import BROKEN, Kitchen, Meanings
from tests.fakes.waiting import until

FIRST, SECOND = "How do I reset my password?", "how can i reset my password"


async def test_an_embedder_that_fails_leaves_the_exact_cache(caplog: pytest.LogCaptureFixture) -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}))
    one.meanings.error = BROKEN
    with caplog.at_level(logging.WARNING):
        first = await one.ask(FIRST)
        assert (await one.ask(SECOND))[1] == "miss"
    assert await one.ask(FIRST) == (first[0], "exact")
    assert len(caplog.records) == 1
    assert one.semantic.events["embedder_failures"] == 2
    one.meanings.error = None
    await one.ask("how shall i reset my password")
    assert (await one.ask("how might i reset my password"))[1] == "semantic"


async def test_the_encoder_is_loaded_before_the_first_question_and_nobody_waits_for_it() -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}))
    one.meanings.loading = asyncio.Event()
    one.semantic.start()
    await until(lambda: one.meanings.loads == 1)
    one.meanings.loading.set()
    assert (await one.ask(FIRST))[1] == "miss"
    assert (await one.ask(SECOND))[1] == "semantic"


async def test_an_encoder_that_cannot_be_loaded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}))
    one.meanings.error = BROKEN
    with caplog.at_level(logging.WARNING):
        one.semantic.start()
        await until(lambda: one.meanings.loads == 1)
        assert (await one.ask(FIRST))[1] == "miss"
    assert len(caplog.records) == 1


async def test_an_embedder_that_is_too_slow_is_not_waited_for() -> None:
    one = Kitchen(meanings=Meanings({"reset": 0.0}), settings=SemanticCacheSettings(mode="on", lookup_timeout_s=0.01))
    one.meanings.gate = asyncio.Event()
    assert (await one.ask(FIRST))[1] == "miss"
    assert one.semantic.events["embedder_failures"] == 1
