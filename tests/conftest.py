"""Fixtures for all tests: a real Redis. Which slow tests run alone. Settings of Hypothesis: how long an example takes
proves nothing here, and the examples are the same in every run; `--hypothesis-profile wander` looks for new ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings

from tests.fakes.redis_process import RedisProcess

TESTS = Path(__file__).parent
ALONE = ("vllm", "tests/chaos/", "test_tenant_timing.py", "test_tenants.py")
"""Parts of the ids of slow tests that compare times, or start servers that need all cores."""

settings.register_profile("wander", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("kvasir", settings.get_profile("wander"), derandomize=True)
settings.load_profile("kvasir")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") and any(part in item.nodeid for part in ALONE):
        item.add_marker("alone")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers that tests of tests/e2e share run until the last test of a process, and take time while they wait: those
    tests come late. Behind them are many short files, so that all processes have something to do until the end."""
    late = {TESTS / "e2e": 1, TESTS / "gateway/upstreams": 2}
    items.sort(key=lambda item: next((late[folder] for folder in item.path.parents if folder in late), 0))


@pytest.fixture(scope="session")
def _session_redis() -> Iterator[RedisProcess]:
    with tempfile.TemporaryDirectory(prefix="kvasir-test-") as folder, RedisProcess(Path(folder)) as process:
        yield process


@pytest.fixture
def redis_url(single_redis_url: str) -> str:
    """URL of an empty Redis."""
    return single_redis_url


@pytest.fixture
def single_redis_url(_session_redis: RedisProcess) -> str:
    """URL of the one server that all tests share, one after the other; empty."""
    with redis.Redis(unix_socket_path=str(_session_redis.socket)) as client:
        client.flushall()
    return _session_redis.url


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A Redis for this test alone, to be killed and started again."""
    with tempfile.TemporaryDirectory(prefix="kvasir-test-") as folder, RedisProcess(Path(folder)) as process:
        yield process
