"""Gateways and engines as processes of their own, with one Redis between them; and a Redis that is not there at all."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
import redis

from tests.fakes.redis_process import RedisProcess
from tests.fakes.server import Server

MESSAGE = {
    "role": "user",
    "content": "Which of the two houses by the river was the older one, and who lived in it? " * 4,
}
SMALL = ("--kv-cache-bytes", str(32 << 20), "--dtype", "float32")


def with_secret(secret: str) -> str:
    """A file of settings, whose secrets may not be flags."""
    return f'[engine]\nsecret = "{secret}"\n'


def an_engine(data_dir: Path, *flags: str, secret: str) -> Server:
    """An engine on a port of its own choice, which its `url` tells once it is up."""
    flags = (*SMALL, *flags, "--listen", "127.0.0.1:0")
    engine = Server(data_dir, *flags, command="engine", config=with_secret(secret))
    engine.ready_line = r"engine ready: .* on (http://[\d.:]+)"
    return engine


def cached_tokens(server: Server) -> int:
    answer = server.client().chat.completions.create(
        model="demo",
        messages=[MESSAGE],
        max_tokens=2,
        temperature=0,  # type: ignore[list-item]
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def remembered(server: Server) -> str:
    """What the response cache had for a question, whose answer ends by itself."""
    answer = server.client().chat.completions.with_raw_response.create(
        model="demo", messages=[MESSAGE], temperature=0, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    return str(answer.headers["x-kvasir-cache"])


def post(server: Server, path: str, body: object) -> Any:
    request = urllib.request.Request(server.url + path, data=orjson.dumps(body))
    with urllib.request.urlopen(request, timeout=60) as answer:
        return orjson.loads(answer.read())


def ready(server: Server, count: int) -> bool:
    return len([engine for engine in server.get("/admin/stats")["engines"] if engine["state"] == "ready"]) == count


@pytest.mark.slow
def test_two_gateways_find_an_engine_in_redis_and_share_its_blocks(tmp_path: Path, own_redis: RedisProcess) -> None:
    shared, config = ("--redis-url", own_redis.url), with_secret("between-us")
    ours = (*shared, "--response-cache-mode", "on")
    with (
        Server(tmp_path / "one", *ours, command="gateway", config=config) as one,
        Server(tmp_path / "two", *ours, command="gateway", config=config) as two,
    ):
        with pytest.raises(openai.NotFoundError):
            cached_tokens(one)
        with an_engine(tmp_path / "engine", *shared, secret="between-us"):
            for gateway in (one, two):
                gateway.wait_until(lambda gateway=gateway: ready(gateway, 1), "the engine was found")  # type: ignore[misc]
            assert cached_tokens(one) == 0
            assert cached_tokens(two) > 0
            # What is removed at one gateway is in no other one's memory any more.
            assert remembered(one) == "miss"
            # A client has its answer before Redis has.
            with redis.Redis(unix_socket_path=str(own_redis.socket)) as client:
                one.wait_until(lambda: bool(client.keys("kvasir:{answers:*}:*")), "the answer is in Redis")
            assert [remembered(two) for _ in range(2)] == ["exact", "exact"]
            chosen = {"everything": True}
            confirm = post(one, "/admin/cache/invalidate", chosen)["confirm"]
            assert post(one, "/admin/cache/invalidate", {**chosen, "confirm": confirm})["removed"] > 0
            two.wait_until(lambda: remembered(two) == "miss", "the removal was heard of")
            # A gateway that is killed takes nothing with it.
            os.kill(one.process.pid, signal.SIGKILL)
            assert cached_tokens(two) > 0
        # An engine that ends says goodbye: its model is known, and away.
        two.wait_until(lambda: ready(two, 0), "the engine is gone")
        with pytest.raises(openai.InternalServerError) as away:
            cached_tokens(two)
        assert away.value.response.status_code == 503
        assert int(away.value.response.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_an_engine_with_a_secret_turns_others_away(tmp_path: Path) -> None:
    with an_engine(tmp_path / "e", secret="between-us") as engine:
        stranger = ("--engine-urls", engine.url, "--engines-start-timeout-s", "3")
        with Server(tmp_path / "g", *stranger, command="gateway", config=with_secret("guessed")) as gateway:
            assert ready(gateway, 0)
            assert any("401" in line for line in gateway.lines)
            assert not [line for line in gateway.lines + engine.lines if "between-us" in line or "guessed" in line]


@pytest.mark.slow
def test_a_redis_that_is_not_there_costs_one_warning_and_is_used_when_it_comes(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    folder.mkdir()
    late = RedisProcess(folder)
    with Server(tmp_path / "serve", *SMALL, "--redis-url", late.url) as server:
        assert cached_tokens(server) == 0
        assert cached_tokens(server) > 0
        server.wait_until(lambda: "kvasir_redis_up 0" in server.get("/metrics"), "Redis is known to be away")
        assert (
            len([line for line in server.lines if "WARNING gateway.storage.breaker Redis is unreachable" in line]) == 1
        )
        with late:
            server.wait_until(lambda: "kvasir_redis_up 1" in server.get("/metrics"), "Redis is used")
            assert cached_tokens(server) > 0
            assert (
                len([line for line in server.lines if "WARNING gateway.storage.breaker Redis is unreachable" in line])
                == 1
            )


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_stops_the_start_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(TimeoutError) as ended, Server(tmp_path / "serve", "--model", str(tmp_path / "empty")):
        pass
    assert str(tmp_path / "empty") in str(ended.value)
    assert "Traceback" not in str(ended.value)


def test_a_port_in_use_stops_the_start_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(TimeoutError) as ended, Server(tmp_path, "--port", port, command="gateway"):
            pass
    assert port in str(ended.value)
    assert "Traceback" not in str(ended.value)
