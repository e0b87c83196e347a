"""`kvasir serve --workers 2` with two engines: a prefix is found whichever worker is asked."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes.server import Server

SMALL = ("--kv-cache-bytes", str(32 << 20), "--dtype", "float32")
FIRST = {"role": "user", "content": "Which of the two houses by the river was the older one, and who lived there? " * 4}


def usage(server: Server, messages: list[Any]) -> dict[str, Any]:
    """Of an answer over a connection of its own, which any worker may get."""
    body = orjson.dumps({"model": "demo", "max_tokens": 2, "temperature": 0, "messages": messages})
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data=body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = orjson.loads(answer.read())["usage"]
    return found


@pytest.mark.slow
def test_turns_of_a_conversation_hit_though_workers_and_engines_are_several(tmp_path: Path) -> None:
    with Server(tmp_path, *SMALL, "--workers", "2", "--engines", "2", "--redis-timeout-s", "10") as server:
        assert len(server.children("gateway.worker")) == 2
        messages: list[Any] = [FIRST]
        prompts = cached = before = 0
        for turn in range(12):
            found = usage(server, messages)
            prompts += before
            cached += found["prompt_tokens_details"]["cached_tokens"]
            before = found["prompt_tokens"]
            messages += [{"role": "assistant", "content": f"In turn {turn}, nobody."}, {"role": "user", "content": "?"}]
        assert cached > 0.9 * prompts  # all but the last, incomplete block of each earlier prompt
        stats = server.get("/admin/stats")
        assert stats["cache"]["cached_tokens"] == cached
        assert [one["state"] for one in stats["engines"]] == ["ready", "ready"]
        assert stats["workers"] == {"configured": 2, "running": 2, "restarts": 0}
