"""Responses that `kvasir serve` keeps: over a restart, and over the end of its Redis."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.server import Server

FLAGS = ("--kv-cache-bytes", str(64 << 20), "--dtype", "float32")
TOLD = 'kvasir_stored_responses_total{outcome="kept"}'


def ask(server: Server, **options: Any) -> openai.types.responses.Response:
    response: openai.types.responses.Response = server.client().responses.create(
        model="demo", max_output_tokens=16, temperature=0, **options
    )
    return response


def stored(response: openai.types.responses.Response) -> bool:
    return bool(response.to_dict()["store"])


@pytest.mark.slow
def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    with Server(tmp_path, *FLAGS) as first_day:
        said = ask(first_day, input="Remember this.")
    with Server(tmp_path, *FLAGS) as second_day:
        assert second_day.client().responses.retrieve(said.id).to_dict() == said.to_dict()
        ask(second_day, input="And now?", previous_response_id=said.id)
        items = list(second_day.client().responses.input_items.list(said.id))
        assert len(items) == 1


@pytest.mark.slow
def test_answers_go_on_without_redis_and_say_that_they_are_not_kept(tmp_path: Path) -> None:
    with Server(tmp_path, *FLAGS) as server:
        assert stored(ask(server, input="One."))
        (redis,) = server.children("unixsocket")
        os.kill(redis, signal.SIGKILL)
        lost = ask(server, input="Two.")
        assert (lost.status, stored(lost)) == ("incomplete", False) or stored(lost)  # a new Redis may be quick
        server.wait_until(lambda: stored(ask(server, input="Three.")), "responses are kept again")
        assert TOLD in server.get("/metrics")
        warnings = [line for line in server.lines if "Redis is unreachable" in line]
        assert len(warnings) == 1
        assert not [line for line in server.lines if "Traceback" in line]
