"""Servers that tests share. Who asks one of these asks for what no other test does, and compares figures with those
before; whoever needs an empty cache, other settings or an engine to kill starts a server of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import pytest

from tests.e2e.differences import DIFFERENT
from tests.fakes import vllm_fleet
from tests.fakes.server import Server

TENANTS = """
[auth]
admin_keys = ["admin-key-123"]
[[tenants]]
name = "north"
keys = ["north-key-123"]
[[tenants]]
name = "south"
keys = ["south-key-123"]
[[tenants]]
name = "agents"
keys = ["agents-key-123"]
cache_key = "hint"
[[namespaces]]
name = "handbook"
tenants = ["north", "south"]
[[namespaces]]
name = "norths"
tenants = ["north"]
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that does not hold for servers of others is skipped with them, and says why."""
    for item in items:
        if isinstance(item, pytest.Function) and "[vllm" in item.name and item.originalname in DIFFERENT:
            item.add_marker(pytest.mark.skip(reason=f"with replicas: {DIFFERENT[item.originalname]}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport]:
    """A failed test says what its servers said."""
    report = yield
    if report.when == "call" and report.failed:
        used = item.funcargs.items() if isinstance(item, pytest.Function) else ()
        report.sections += [(f"{name} said", one.tell()) for name, one in used if isinstance(one, Server)]
    return report


@pytest.fixture(scope="session")
def vllms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_fleet.Replicas]:
    """Two real vLLM. Tests put gateways and salts of their own before them."""
    with vllm_fleet.replicas(tmp_path_factory.mktemp("vllm")) as running:
        yield running


@pytest.fixture(scope="session", params=["bundled", pytest.param("vllm", marks=vllm_fleet.MARKS)])
def replicas(request: pytest.FixtureRequest) -> vllm_fleet.Replicas | None:
    """What these servers have as engines: each test runs with the bundled one (None), and with two vLLM."""
    return None if request.param == "bundled" else request.getfixturevalue("vllms")


def one_of(servers: Sequence[Server], request: pytest.FixtureRequest) -> Server:
    """Modules take turns."""
    return servers[sum(request.module.__name__.encode()) % len(servers)]


@pytest.fixture(scope="session")
def _servers(
    tmp_path_factory: pytest.TempPathFactory, replicas: vllm_fleet.Replicas | None
) -> Iterator[tuple[Server, ...]]:
    with vllm_fleet.serving(
        tmp_path_factory.mktemp("serve"), replicas, engine=(*vllm_fleet.DEMO, str(64 << 20))
    ) as running:
        yield running


@pytest.fixture(scope="module")
def server(_servers: tuple[Server, ...], request: pytest.FixtureRequest) -> Server:
    """One for all modules."""
    return one_of(_servers, request)


@pytest.fixture(scope="session")
def no_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose engine has no room to keep a prefix on a promise."""
    flags = (*vllm_fleet.DEMO, str(32 << 20), "--engine-lease-share", "0.0001")
    with Server(tmp_path_factory.mktemp("no_room"), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def _tenants(
    tmp_path_factory: pytest.TempPathFactory, replicas: vllm_fleet.Replicas | None
) -> Iterator[tuple[Server, ...]]:
    folder = tmp_path_factory.mktemp("tenants")
    with vllm_fleet.serving(folder, replicas, engine=(*vllm_fleet.DEMO, str(64 << 20)), config=TENANTS) as running:
        yield running


@pytest.fixture(scope="module")
def tenants(_tenants: tuple[Server, ...], request: pytest.FixtureRequest) -> Server:
    """One with tenants and two namespaces."""
    return one_of(_tenants, request)
