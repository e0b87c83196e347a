"""A client of the Redis that the stores under contract are in: of one server, and of a cluster and the master behind
sentinels. An everyday run has a part of them over the last two."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.fakes.redis_fleet import ClusterFleet, RedisFleet, SentinelFleet, opened

FLEETS = {"cluster": ClusterFleet, "sentinels": SentinelFleet}
EVERYDAY = {
    "cluster": ("test_batch_lines", "test_limits", "test_content_store"),
    "sentinels": ("test_response_entries",),
}
"""Modules that run in every run."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "redis_place" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        slow = {place: () if module in modules else pytest.mark.slow for place, modules in EVERYDAY.items()}
        places = [pytest.param("server"), *(pytest.param(place, marks=marks) for place, marks in slow.items())]
        metafunc.parametrize("redis_place", places, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Memory is the same wherever Redis is."""
    twice = [item for item in items if _is_memory_elsewhere(item)]
    if twice:
        config.hook.pytest_deselected(items=twice)
        items[:] = [item for item in items if item not in twice]


def _is_memory_elsewhere(item: pytest.Item) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("redis_place", "server") != "server" and "memory" in params.values()


@pytest.fixture(scope="session")
def redis_place(request: pytest.FixtureRequest) -> Iterator[RedisFleet | None]:
    """None: the one server of all tests."""
    if request.param == "server":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kvasir-test-") as folder, FLEETS[request.param](Path(folder)) as fleet:
        yield fleet


@pytest.fixture
def redis_url(redis_place: RedisFleet | None, request: pytest.FixtureRequest) -> str:
    """URL of an empty Redis."""
    if redis_place is None:
        return str(request.getfixturevalue("single_redis_url"))
    redis_place.flush()
    return redis_place.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Of an empty Redis."""
    async with opened(redis_url) as client:
        yield client
