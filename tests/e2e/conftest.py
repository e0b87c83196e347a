"""Servers that tests share. Who asks one of these asks for what no other test does, and compares figures with those
before; whoever needs an empty cache, other settings or an engine to kill starts a server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `kvasir serve` with the demo model for all modules."""
    data_dir: Path = tmp_path_factory.mktemp("serve")
    with Server(data_dir, "--kv-cache-bytes", str(64 << 20), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def no_room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose engine has no room to keep a prefix on a promise."""
    flags = ("--kv-cache-bytes", str(32 << 20), "--dtype", "float32", "--engine-lease-share", "0.0001")
    with Server(tmp_path_factory.mktemp("no_room"), *flags) as running:
        yield running


@pytest.fixture(scope="session")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One with tenants and two namespaces."""
    flags = ("--kv-cache-bytes", str(64 << 20), "--dtype", "float32")
    with Server(tmp_path_factory.mktemp("tenants"), *flags, config=TENANTS) as running:
        yield running
