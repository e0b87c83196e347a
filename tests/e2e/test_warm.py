"""`kvasir serve` with [[warm]]: the first request after the start reads what was computed before it came."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from tests.fakes.server import Server

RULES = "You are the clerk of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)
CONFIG = """
[server]
min_warm = 1
[[warm]]
model = "demo"
file = "{file}"
"""


def first(server: Server) -> openai.types.CompletionUsage:
    """Usage of the first request."""
    answer = server.client().chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": RULES}, {"role": "user", "content": "May I take four bags?"}],
        max_tokens=4,
    )
    assert answer.usage is not None
    return answer.usage


def is_ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/health/readiness") as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False


@pytest.mark.slow
def test_the_first_request_is_warm_after_a_start_and_after_an_engine_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "rules.md"
    file.write_text(RULES, encoding="utf-8")
    flags = ("--kv-cache-bytes", str(64 << 20), "--engine-disk-bytes", "0")
    with Server(tmp_path / "data", *flags, config=CONFIG.format(file=file)) as server:
        server.wait_until(lambda: is_ready(server), "readiness", 120.0)
        usage = first(server)
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens - 40 > 1000
        (prompt,) = server.get("/admin/stats")["warm"]["prompts"]
        ((engine, place),) = prompt["places"].items()
        assert (place["lease"], place["failed"]) == ("kept", None)

        os.kill(server.children("engine")[0], signal.SIGKILL)

        def is_warm_again() -> bool:
            again = server.get("/admin/stats")["warm"]["prompts"][0]["places"].get(engine, place)
            return again["computed_at"] not in (None, place["computed_at"])

        server.wait_until(is_warm_again, "the engine that was started in its place is warm", 120.0)
        usage = first(server)
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) > usage.prompt_tokens - 40
