"""The response cache over a real engine: answers come again as they were, also after a restart, from Redis."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server

ASK: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Where is the letter?"}],
    "temperature": 0,
    "max_completion_tokens": 24,
}
CACHE = ("--response-cache-mode", "on", "--response-cache-truncated", "true")


def ask(server: Server, **more: Any) -> tuple[str, str]:
    """What the cache had, and the text."""
    body = orjson.dumps(ASK | more)
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", data=body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = orjson.loads(answer.read())
        return answer.headers["x-kvasir-cache"], told["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_answers_come_again_as_an_engine_would_give_them_also_after_a_restart(tmp_path: Path) -> None:
    with RedisProcess(tmp_path) as redis:
        flags = (*CACHE, "--redis-url", redis.url)
        with Server(tmp_path / "one", *flags) as server:
            first, text = ask(server)
            again, same = ask(server)
            assert (first, again, same) == ("miss", "exact", text)
            outcome, anew = ask(server, cache={"no-cache": True})
            assert (outcome, anew) == ("miss", text)  # an engine says the same, and so the cache may
            seeded = [ask(server, temperature=1, seed=7) for _ in range(2)]
            assert [outcome for outcome, _ in seeded] == ["miss", "exact"]
            assert ask(server, temperature=1, seed=7, cache={"no-cache": True})[1] == seeded[0][1]
            stats = server.get("/admin/stats")
            assert stats["response_cache"]["outcomes"] == {"miss": 4, "exact": 2}
        with Server(tmp_path / "two", *flags, "--semantic-cache-mode", "ask") as server:
            server.wait_until(lambda: server.get("/admin/stats")["embeddings"]["loaded"], "the encoder is loaded")
            assert ask(server) == ("exact", text)
            assert server.get("/admin/stats")["response_cache"]["events"]["redis_hits"] == 1
