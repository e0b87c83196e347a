from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.server import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `kvasir serve` with the demo model for a whole module."""
    data_dir: Path = tmp_path_factory.mktemp("serve")
    with Server(data_dir, "--kv-cache-bytes", str(64 << 20), "--dtype", "float32") as running:
        yield running
