"""A purge of one tenant's blocks at a whole server, whose engine is killed afterwards."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e.conftest import TENANTS
from tests.fakes.server import Server

BOOK = "Which of the two houses by the river was the older one, and who lived in it? " * 8


def cached_tokens(server: Server, tenant: str) -> int:
    answer = server.client(f"{tenant}-key-123").chat.completions.create(
        model="demo", messages=[{"role": "user", "content": BOOK}], max_tokens=2
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def purge(server: Server, **chosen: str) -> tuple[int, Any]:
    headers = {"Authorization": "Bearer admin-key-123"}
    request = urllib.request.Request(
        f"{server.url}/admin/cache/blocks/purge", data=orjson.dumps(chosen), headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, orjson.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, orjson.loads(error.read())


@pytest.mark.slow
def test_a_purged_tenant_finds_nothing_and_another_one_all_of_its_own(tmp_path: Path) -> None:
    flags = ("--kv-cache-bytes", str(32 << 20), "--dtype", "float32")
    with Server(tmp_path / "data", *flags, config=TENANTS) as server:
        assert [cached_tokens(server, tenant) for tenant in ("north", "south")] == [0, 0]
        found = [cached_tokens(server, tenant) for tenant in ("north", "south")]
        assert min(found) > 0
        status, told = purge(server, tenant="north")
        assert (status, told["complete"]) == (200, True), told
        (engine,) = told["engines"]
        assert engine["tiers"]["device"]["blocks"] > 0
        assert [cached_tokens(server, tenant) for tenant in ("north", "south")] == [0, found[1]]
        # An engine that is gone may have left blocks on disk.
        (pid,) = server.children("gateway.cli")
        os.kill(pid, signal.SIGKILL)
        server.wait_for_line("engine .* was lost")
        status, told = purge(server, tenant="north")
        assert (status, told["complete"]) == (502, False)
        assert [(one["name"], one["reason"]) for one in told["engines"]] == [(engine["name"], "It is unreachable.")]
