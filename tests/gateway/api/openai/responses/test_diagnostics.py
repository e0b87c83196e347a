"""What is said of a request that reused less than it might have."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.api.openai.responses.items import parse_input, with_ids
from gateway.api.openai.responses.store import StoredResponse, diagnose
from gateway.types import Usage
from tests.fakes.down_store import DownStore
from tests.fakes.gateway import running
from tests.fakes.pipeline import FakePipeline

SETTINGS: dict[str, Any] = {"model": "demo", "prompt_cache_key": None, "tools": [], "instructions": None, "text": {}}
ITEMS = with_ids(parse_input([{"role": "user", "content": text} for text in "abc"], "input"), "t")
SAME = with_ids(parse_input([{"role": "user", "content": text} for text in "abc"], "input"), "u")
HIT, NOTHING = Usage(40, 0, cached_tokens=32), Usage(40, 0)


@pytest.mark.parametrize(
    ("changes", "items", "usage", "kind"),
    [
        ({}, SAME, HIT, "cache_hit"),
        ({}, [*SAME, *SAME], HIT, "cache_hit"),
        ({"text": {"verbosity": "low"}}, SAME, HIT, "cache_hit"),
        ({}, SAME, NOTHING, "unavailable"),
        ({}, SAME[:2], HIT, "input_changed"),
        ({}, [SAME[1], *SAME], HIT, "input_changed"),
        ({"instructions": "x"}, SAME, HIT, "input_changed"),
        ({"tools": [{}], "instructions": "x"}, SAME, NOTHING, "tools_changed"),
        ({"prompt_cache_key": "k", "tools": [{}]}, SAME, NOTHING, "prompt_cache_key_changed"),
        ({"model": "other", "prompt_cache_key": "k"}, SAME, NOTHING, "model_changed"),
    ],
)
def test_the_first_change_is_named(changes: dict[str, Any], items: Any, usage: Usage, kind: str) -> None:
    told = diagnose(SETTINGS | changes, items, StoredResponse(SETTINGS, ITEMS), usage)
    if kind.endswith("_changed"):
        missed = usage.prompt_tokens - usage.cached_tokens
        assert told == {"type": "cache_miss", "reason": kind, "cache_missed_tokens": missed}
    else:
        assert told == {"type": kind}


def test_a_key_that_is_a_hint_is_no_reason() -> None:
    changed = SETTINGS | {"prompt_cache_key": "k"}
    assert diagnose(changed, SAME, StoredResponse(SETTINGS, ITEMS), HIT, keyed=False) == {"type": "cache_hit"}


async def test_a_response_is_compared_with_one_that_is_kept() -> None:
    async with running() as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="hi")
        assert first.prompt_cache_diagnostics is None
        told: list[Any] = []
        for said, compared in (("hi", first.id), ("ho", first.id), ("hi", "resp_x")):
            options: Any = {"comparison_response_id": compared}
            answer = await client.responses.create(model="demo", input=said, prompt_cache_options=options)
            assert answer.prompt_cache_options is not None
            assert answer.prompt_cache_options.comparison_response_id == compared
            told.append(answer.prompt_cache_diagnostics)
        assert [one.type for one in told] == ["cache_hit", "cache_miss", "comparison_response_not_found"]
        assert (told[1].reason, told[1].cache_missed_tokens) == ("input_changed", 8)


async def test_a_stream_tells_at_its_end_what_was_compared() -> None:
    async with running(FakePipeline(cached_tokens=0)) as gateway, gateway.sdk() as client:
        first = await client.responses.create(model="demo", input="hi")
        options: Any = {"comparison_response_id": first.id}
        stream = await client.responses.create(model="demo", input="hi", prompt_cache_options=options, stream=True)
        last: Any = [event async for event in stream][-1]
        assert last.response.prompt_cache_diagnostics.type == "unavailable"


async def test_a_comparison_costs_no_answer() -> None:
    async with running(response_store=DownStore()) as gateway, gateway.sdk() as client:
        options: Any = {"comparison_response_id": f"resp_{'0a' * 16}"}
        answer = await client.responses.create(model="demo", input="hi", prompt_cache_options=options)
        assert answer.prompt_cache_diagnostics is not None
        assert answer.prompt_cache_diagnostics.type == "unavailable"
