"""`kvasir serve` twice with one data directory: what was computed the day before is there for the first request."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import pytest

from tests.fakes.server import Server

POLICY = "You are the clerk of a small railway station. " + " ".join(
    f"Rule {number}: a passenger with ticket class {number % 3} may take {number % 5} bags." for number in range(60)
)
FLAGS = ("--kv-cache-bytes", str(64 << 20), "--dtype", "float32")


def ask(server: Server, question: str = "May I take four bags?") -> openai.types.chat.ChatCompletion:
    return server.client().chat.completions.create(
        model="demo",
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": question}],
        max_tokens=8,
        temperature=0,
    )


def tokens(answer: openai.types.chat.ChatCompletion) -> tuple[int, int]:
    """Of the prompt, and of those the cached ones."""
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0


def disk(server: Server) -> dict[str, int]:
    """What the gateway says of the engine's disk tier."""
    (engine,) = server.get("/admin/stats")["engines"]
    tiers: dict[str, dict[str, int]] = engine["tiers"]
    return tiers["disk"]


@pytest.mark.slow
def test_the_second_days_first_request_is_warm_and_says_the_same(tmp_path: Path) -> None:
    with Server(tmp_path, *FLAGS) as first_day:
        cold = ask(first_day)
        assert tokens(cold)[1] == 0
        # Saving is in the background; a shutdown that is asked for waits for it.
    blocks = tmp_path / "blocks"
    files = [path for path in blocks.rglob("*") if path.is_file()]
    assert len(files) >= tokens(cold)[0] // 16
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}

    with Server(tmp_path, *FLAGS) as second_day:
        warm = ask(second_day)
        assert tokens(warm)[1] >= tokens(cold)[0] - 32
        assert warm.choices[0].message.content == cold.choices[0].message.content
        other = ask(second_day, "And two?")
        assert tokens(other)[1] >= tokens(cold)[0] - 64
        used = second_day.get("/admin/ledger")["total"]["used"]
        answers = [tokens(answer) for answer in (cold, warm, other)]
        assert [used["prompt_tokens"], used["cached_tokens"]] == [sum(column) for column in zip(*answers, strict=True)]
        for path in files[::7]:  # as if the power had failed before all of it was on the disk
            path.write_bytes(path.read_bytes()[:-1000] + bytes(1000))

    with Server(tmp_path, *FLAGS) as third_day:
        torn = ask(third_day)
        assert tokens(torn)[1] < tokens(cold)[0] - 32
        assert torn.choices[0].message.content == cold.choices[0].message.content
        third_day.wait_until(lambda: disk(third_day)["blocks"] >= len(files) - 2, "what was torn is saved again")
        assert disk(third_day)["torn"] == 1, "the first one that a request came upon"
        (engine,) = third_day.children("engine")
        os.kill(engine, signal.SIGKILL)
        third_day.wait_for_line("engine engine-0 joined", 120.0, after=len(third_day.lines))
        assert tokens(ask(third_day))[1] >= tokens(cold)[0] - 32, "an engine that was killed finds its blocks too"
