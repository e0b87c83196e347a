"""Lists of models that upstreams tell."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.upstreams.upstream import model_names
from tests.fakes.gateway import Gateway, running
from tests.fakes.upstream import Told, error, nowhere, said, upstream
from tests.fakes.waiting import until


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"object": "list", "data": [{"id": "gpt-5"}, {"id": 1}, 2, {"id": "x" * 257}]}, ["gpt-5"]),
        ({"data": [{"type": "model", "id": "claude-9"}], "has_more": False}, ["claude-9"]),
        ({"models": [{"name": "models/gemini-9"}]}, ["gemini-9"]),
    ],
)
def test_lists_of_all_apis_are_read(body: Any, expected: list[str]) -> None:
    assert model_names(orjson.dumps(body)) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": 1}', b"{}"])
def test_what_is_no_list_is_none(body: bytes) -> None:
    with pytest.raises(ValueError):
        model_names(body)


async def listed(gateway: Gateway) -> list[str]:
    return [model.id async for model in gateway.sdk().models.list()]


@pytest.mark.parametrize(
    ("dialect", "path"),
    [("openai", "/v1/models"), ("anthropic", "/v1/models?limit=1000"), ("gemini", "/v1beta/models?pageSize=1000")],
)
async def test_the_upstream_is_asked_with_its_key(dialect: str, path: str) -> None:
    told = said({"data": [{"id": "gpt-5"}]})
    async with upstream(told) as stub, running(upstreams=[stub.settings(dialect=dialect, list_models=True)]):
        await until(lambda: stub.got)
        assert stub.got[0].path == path
        assert "sk-upstream" in repr(stub.got[0].headers)


async def test_what_a_pattern_matches_is_listed_under_the_name_that_clients_use() -> None:
    told = said({"data": [{"id": "gpt-5"}, {"id": "tts-1"}]})
    async with upstream(told) as stub:
        settings = stub.settings("gpt-*", "own/* = tts*", list_models=True, list_every_s=0.01)
        async with running(upstreams=[settings]) as gateway:
            await until(lambda: len(stub.got) > 1)
            assert {"gpt-5", "own/-1"} <= set(await listed(gateway))
            assert "tts-1" not in await listed(gateway)


async def test_an_upstream_that_fails_keeps_its_last_list_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    answers = (said({"data": [{"id": "gpt-5"}]}), error(500), Told([b"no JSON"]))
    async with upstream(*answers) as stub:
        settings = stub.settings("gpt-*", list_models=True, list_every_s=0.01)
        async with running(upstreams=[settings, nowhere("gpt-*", list_models=True)]) as gateway:
            await until(lambda: len(stub.got) > 4)
            assert "gpt-5" in await listed(gateway)
    lines = [record.message for record in caplog.records if "does not list" in record.message]
    assert len(lines) == 2
